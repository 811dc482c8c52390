"""`birkhoff generate PROMPT`: go on from a text, or answer it with --chat. The text goes to stdout as it comes.

A completion is raw by default: the model goes on from exactly what it is given. With --chat the prompt is one user
message in the V4 chat format. On Ctrl-C what was said stays said; with --json it is printed as a cancelled answer.
"""

from __future__ import annotations

import json as json_module
import secrets
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from birkhoff.cli.answer import ChatAnswer, as_json, how_it_went, open_engine
from birkhoff.cli.options import divide, takes
from birkhoff.cli.steer import Steer, read_line, with_vectors
from birkhoff.cli.talk import bar, say, visible
from birkhoff.engine.sampling import SamplingOptions
from birkhoff.errors import OptionError, PromptError

if TYPE_CHECKING:
    from birkhoff.output import Output, Stream

MOST_AT_ONCE = 8


@takes("Model", "Sampling")
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to go on from; - reads it from standard input.")],
    chat: Annotated[
        bool, typer.Option("--chat", help="Answer the text as a message, in the chat format.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="System message (with --chat).", show_default=False)
    ] = None,
    thinking: Annotated[
        bool, typer.Option("--thinking", help="Reason before answering (with --chat).")
    ] = False,
    effort: Annotated[
        str | None, typer.Option(help="high or max (with --thinking).", show_default=False)
    ] = None,
    steer: Steer = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per answer.")] = False,
    **options: Any,
) -> None:
    """Go on from a text; it is printed as it comes."""
    if not chat and (thinking or effort or system):
        raise OptionError("--system, --thinking and --effort are parts of the chat format. Add --chat.")
    loading, sampling = divide(options)
    line = read_line(steer)
    text = read_prompt(prompt)
    if sampling.get("temperature") != 0:
        sampling.setdefault("seed", secrets.randbits(32))  # said below, so that any answer can be had again
    choices = sampling.get("n", 1)
    with open_engine(loading, min(choices, MOST_AT_ONCE)) as engine:
        if "seed" in sampling:
            say(f"seed {sampling['seed']}")
        edits = with_vectors(line, engine) or None
        messages = [{"role": "system", "content": system}] * bool(system) + [
            {"role": "user", "content": text}
        ]
        if choices > 1:
            how = {"thinking": thinking, "effort": effort, "steer": edits, **sampling}
            outputs = engine.chat(messages, **how) if chat else engine.generate(text, steer=edits, **sampling)
            for output in outputs:
                _show(output, json)
        elif chat:
            answer = ChatAnswer(engine, messages, sampling, thinking=thinking, effort=effort, steer=edits)
            _follow(answer, sampling, json)
        else:
            _follow(engine.stream(text, steer=edits, **sampling), sampling, json)


def read_prompt(prompt: str) -> str:
    """The prompt itself, or standard input when it is a dash."""
    if prompt != "-":
        return prompt
    if sys.stdin.isatty():
        say("reading the prompt from the terminal; Ctrl-D ends it")
    return decoded(sys.stdin.buffer.read(), "standard input")


def decoded(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{source} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start} begins no character. "
            "Convert it first, for example: iconv -f latin1 -t utf-8"
        ) from None


def _follow(answer: Stream | ChatAnswer, sampling: dict[str, Any], json: bool) -> None:
    """Print an answer while it comes; whatever happens, what there was of it is kept."""
    on_screen = sys.stdout.isatty() and not json
    most = sampling.get("max_tokens", SamplingOptions.max_tokens)
    last = ""
    try:
        with bar("answering", "tokens", wanted=not on_screen) as advance:
            for count, text in enumerate(_texts(answer), start=1):
                advance(count, most)
                if text and not json:
                    last = visible(text) if on_screen else text
                    sys.stdout.write(last)
                    sys.stdout.flush()
    except KeyboardInterrupt:
        answer.close()
        _end(answer.output, json, last)
        raise
    _end(answer.output, json, last)


def _texts(answer: Stream | ChatAnswer) -> Iterator[str]:
    """What each token adds to the text; reasoning is not part of it."""
    from birkhoff.text.events import ContentDelta

    for step in answer:
        if isinstance(step, list):
            yield "".join(event.text for event in step if isinstance(event, ContentDelta))
        else:
            yield step.text


def _end(output: Output, json: bool, last: str) -> None:
    if json:
        typer.echo(json_module.dumps(as_json(output), ensure_ascii=False))
    elif not last.endswith("\n"):
        typer.echo()
    say(how_it_went(output))
    if output.error is not None:
        raise output.error


def _show(output: Output, json: bool) -> None:
    """One of several answers, which come whole."""
    text = visible(output.text) if sys.stdout.isatty() else output.text
    if not json:
        sys.stdout.write(text)
    _end(output, json, text)
