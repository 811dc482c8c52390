"""`birkhoff chat`: a conversation in the terminal, or line by line through a pipe.

On a terminal answers stream, reasoning is dimmed, and Ctrl-C ends the answer rather than the program (at the prompt it
ends the program). On a pipe every line of stdin is a message or a command and every answer is a line or more of stdout;
a turn that failed is reported and the next one goes on, but the exit status remembers.
"""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from birkhoff.cli.answer import as_json, open_engine
from birkhoff.cli.generate import decoded
from birkhoff.cli.options import divide, takes
from birkhoff.cli.steer import Steer, read_line, with_vectors
from birkhoff.cli.talk import complain, say
from birkhoff.cli.typed import asked_to_stop, typed
from birkhoff.errors import BirkhoffError, OptionError

if TYPE_CHECKING:
    from birkhoff.cli.conversation import Conversation

PROMPT = ">>> "


@takes("Model", "Sampling", without=("n", "logprobs"))
def chat(
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    thinking: Annotated[bool, typer.Option("--thinking", help="Reason before answering.")] = False,
    effort: Annotated[
        str | None, typer.Option(help="high or max (with --thinking).", show_default=False)
    ] = None,
    steer: Steer = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per answer.")] = False,
    **options: Any,
) -> None:
    """Talk with a model; /help lists what else can be typed."""
    if effort and not thinking:
        raise OptionError("--effort is for reasoning. Add --thinking.")
    loading, sampling = divide(options)
    asked = read_line(steer)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    with open_engine(loading) as engine:
        from birkhoff.cli.conversation import Conversation
        from birkhoff.steering.edit_syntax import print_line

        edits = with_vectors(asked, engine) or None
        how: dict[str, Any] = {
            "thinking": thinking,
            "effort": effort,
            "steer": edits,
            "steered_by": print_line(asked),
        }
        talk = Conversation(engine, sampling, system=system, **how)
        if interactive:
            say("type a message, /help for what else there is, Ctrl-D to leave")
        failed = False
        for line in typed(PROMPT) if interactive else _piped():
            try:
                if not _turn(talk, line, json, interactive):
                    break
            except BirkhoffError as error:
                complain(error.code, str(error))
                failed = True
    if failed and not interactive:
        raise typer.Exit(1)


def _turn(talk: Conversation, line: str, json: bool, interactive: bool) -> bool:
    """One message or command; False when it was the last."""
    if line.startswith("/") and not line.startswith("//"):
        return talk.command(line)
    message = line.removeprefix("/")  # a second slash makes it text
    if not message.strip():
        return True
    with asked_to_stop() if interactive else nullcontext() as stop:
        output = talk.ask(message, silent=json, stop=stop)
    if json:
        typer.echo(json_module.dumps(as_json(output), ensure_ascii=False))
    return True


def _piped() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, start=1):
        yield decoded(line.rstrip(b"\r\n"), f"line {number} of standard input")
