"""`birkhoff generate PROMPT`: complete a text, or answer it with --chat, streaming to stdout.

Without --chat the prompt is completed as it is; with --chat it is one user message in the V4 chat format. After Ctrl-C
the text so far stays on stdout; with --json it is printed as an output with finish reason `cancelled`.
"""

from __future__ import annotations

import json as json_module
import secrets
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from birkhoff.cli.engine_io import ChatGeneration, open_engine, output_to_json, summarize
from birkhoff.cli.options import shared_options, split_options
from birkhoff.cli.steer_option import Steer, load_vectors, parse_steer
from birkhoff.cli.terminal import escape_control, print_status, progress_bar
from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.errors import OptionError, PromptError

if TYPE_CHECKING:
    from birkhoff.output import Output, Stream

MAX_REQUESTS = 8
Effort = Annotated[str | None, typer.Option(help="Reasoning effort: high or max (with --thinking).")]
JsonAnswers = Annotated[bool, typer.Option("--json", help="Print one JSON object per answer.")]


@shared_options("Model", "Sampling")
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to complete; - reads it from standard input.")],
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the text as a user message in the chat format.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message (with --chat).")] = None,
    thinking: Annotated[
        bool, typer.Option("--thinking", help="Generate reasoning before the answer (with --chat).")
    ] = False,
    effort: Effort = None,
    steer: Steer = None,
    json: JsonAnswers = False,
    **options: Any,
) -> None:
    """Complete a text; the output is streamed to stdout."""
    if not chat and (thinking or effort or system):
        raise OptionError("--system, --thinking and --effort are parts of the chat format. Add --chat.")
    load_options, sampling = split_options(options)
    parsed = parse_steer(steer)
    text = read_prompt(prompt)
    if sampling.get("temperature") != 0:
        # Printed below, so that the output can be reproduced.
        sampling.setdefault("seed", secrets.randbits(32))
    choices = sampling.get("n", 1)
    with open_engine(load_options, min(choices, MAX_REQUESTS)) as engine:
        if "seed" in sampling:
            print_status(f"seed {sampling['seed']}")
        edits = load_vectors(parsed, engine) or None
        messages = [{"role": "system", "content": system}] * bool(system) + [
            {"role": "user", "content": text}
        ]
        if choices > 1:
            outputs = (
                engine.chat(messages, thinking=thinking, effort=effort, steer=edits, **sampling)
                if chat
                else engine.generate(text, steer=edits, **sampling)
            )
            for output in outputs:
                _print_output(output, json, {} if chat else engine.tokenizer.markers)
        elif chat:
            generation = ChatGeneration(
                engine, messages, sampling, thinking=thinking, effort=effort, steer=edits
            )
            _print_stream(generation, sampling, json)
        else:
            stream = engine.stream(text, steer=edits, **sampling)
            _print_stream(stream, sampling, json, engine.tokenizer.markers)


def read_prompt(prompt: str) -> str:
    """Return the prompt, or read it from standard input when it is `-`."""
    if prompt != "-":
        return prompt
    if sys.stdin.isatty():
        print_status("reading the prompt from the terminal; Ctrl-D ends it")
    return decode_utf8(sys.stdin.buffer.read(), "standard input")


def decode_utf8(data: bytes, source: str) -> str:
    """Decode UTF-8; the error names `source` and the first invalid byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{source} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start} begins no character. "
            "Convert it first, for example: iconv -f latin1 -t utf-8"
        ) from None


def _print_stream(
    stream: Stream | ChatGeneration,
    sampling: dict[str, Any],
    json: bool,
    markers: Mapping[str, int] | None = None,
) -> None:
    """Print an output while it streams, without the chat markers of a raw completion.

    After Ctrl-C the partial output is printed before the exception goes on."""
    on_screen = sys.stdout.isatty() and not json
    max_tokens = sampling.get("max_tokens", SamplingParams.max_tokens)
    last = ""
    try:
        with progress_bar("answering", "tokens", enabled=not on_screen) as advance:
            for count, text in enumerate(_text_deltas(stream, markers or {}), start=1):
                advance(count, max_tokens)
                if text and not json:
                    last = escape_control(text) if on_screen else text
                    sys.stdout.write(last)
                    sys.stdout.flush()
    except KeyboardInterrupt:
        stream.close()
        _finish(stream.output, json, last)
        raise
    _finish(stream.output, json, last)


def _text_deltas(stream: Stream | ChatGeneration, markers: Mapping[str, int]) -> Iterator[str]:
    """Yield the text each token adds, without reasoning and without these markers."""
    from birkhoff.text.events import ContentDelta

    hidden = set(markers.values())
    for step in stream:
        if isinstance(step, list):
            yield "".join(event.text for event in step if isinstance(event, ContentDelta))
        else:
            yield "" if step.token_id in hidden else step.text


def _finish(output: Output, json: bool, last: str) -> None:
    if json:
        typer.echo(json_module.dumps(output_to_json(output), ensure_ascii=False))
    elif not last.endswith("\n"):
        typer.echo()
    print_status(summarize(output))
    if output.error is not None:
        raise output.error


def _print_output(output: Output, json: bool, markers: Mapping[str, int]) -> None:
    """Print one complete output (used with --n > 1), without the markers among its tokens."""
    text = output.text
    for marker in (marker for marker, token in markers.items() if token in output.token_ids):
        text = text.replace(marker, "")
    text = escape_control(text) if sys.stdout.isatty() else text
    if not json:
        sys.stdout.write(text)
    _finish(output, json, text)
