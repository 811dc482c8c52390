"""`birkhoff chat`: a conversation in the terminal, or line by line through a pipe.

On a terminal answers stream, reasoning is dimmed, and Ctrl-C stops the answer (at the prompt it exits the program).
On a pipe every line of stdin is a message or a command and answers go to stdout; a failed turn is reported, the next
line is processed, and the exit status is 1 at the end.
"""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from birkhoff.cli.engine_io import open_engine, output_to_json
from birkhoff.cli.generate import Effort, JsonAnswers, decode_utf8
from birkhoff.cli.line_input import read_lines, stop_on_interrupt
from birkhoff.cli.options import shared_options, split_options
from birkhoff.cli.steer_option import Steer, load_vectors, parse_steer
from birkhoff.cli.terminal import print_error, print_status
from birkhoff.errors import BirkhoffError, OptionError

if TYPE_CHECKING:
    from birkhoff.cli.conversation import Conversation

PROMPT = ">>> "


@shared_options("Model", "Sampling", without=("n", "logprobs"))
def chat(
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    thinking: Annotated[
        bool, typer.Option("--thinking", help="Generate reasoning before the answer.")
    ] = False,
    effort: Effort = None,
    steer: Steer = None,
    json: JsonAnswers = False,
    **options: Any,
) -> None:
    """Chat with a model; type /help for the commands."""
    if effort and not thinking:
        raise OptionError("--effort is for reasoning. Add --thinking.")
    load_options, sampling = split_options(options)
    parsed = parse_steer(steer)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    with open_engine(load_options) as engine:
        from birkhoff.cli.conversation import Conversation
        from birkhoff.steering.edit_syntax import print_line

        conversation = Conversation(
            engine,
            sampling,
            system=system,
            thinking=thinking,
            effort=effort,
            steer=load_vectors(parsed, engine) or None,
            steer_line=print_line(parsed),
        )
        if interactive:
            print_status("type a message, /help for commands, Ctrl-D to leave")
        failed = False
        for line in read_lines(PROMPT) if interactive else _piped_lines():
            try:
                if not _turn(conversation, line, json, interactive):
                    break
            except BirkhoffError as error:
                print_error(error.code, str(error))
                failed = True
    if failed and not interactive:
        raise typer.Exit(1)


def _turn(conversation: Conversation, line: str, json: bool, interactive: bool) -> bool:
    """Process one message or command; return False after `/quit`."""
    if line.startswith("/") and not line.startswith("//"):
        return conversation.command(line)
    message = line.removeprefix("/")  # // escapes a leading slash
    if not message.strip():
        return True
    with stop_on_interrupt() if interactive else nullcontext() as stop:
        output = conversation.send(message, silent=json, stop=stop)
    if json:
        typer.echo(json_module.dumps(output_to_json(output), ensure_ascii=False))
    return True


def _piped_lines() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, start=1):
        yield decode_utf8(line.rstrip(b"\r\n"), f"line {number} of standard input")
