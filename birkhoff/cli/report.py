"""`birkhoff report RUN`: one HTML file that shows a capture, with its data inside; it needs no server.

Prints the path of the file to stdout. Tokens are shown as text with the tokenizer of --model; nothing else of the model
is read.
"""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from birkhoff.byte_size import format_bytes
from birkhoff.cli.options import Json
from birkhoff.cli.terminal import print_status
from birkhoff.errors import HubError, OptionError

if TYPE_CHECKING:
    from birkhoff.text.tokenizer import Tokenizer

Tokens = Annotated[
    str | None,
    typer.Option(help="Model whose tokenizer reads the tokens. [default: the model that was captured]"),
]


def report(
    run: Annotated[
        Path, typer.Argument(help="Directory of a capture: its --out, a tag in it, or one request.")
    ],
    out: Annotated[Path | None, typer.Option(help="File to write. [default: RUN.html]")] = None,
    model: Tokens = None,
    limit: Annotated[int, typer.Option(help="Show at most this many texts.")] = 8,
    json: Json = False,
) -> None:
    """Write an HTML file that shows the texts and rows of a capture, without a server."""
    if limit < 1:
        raise OptionError(f"limit is {limit}, expected a positive whole number.")
    from birkhoff.report.capture_report import write_report

    path = run.with_name(f"{run.name or 'capture'}.html") if out is None else out
    facts = write_report(run, path, read_tokenizer(model, run)[0], limit)
    print_status(f"{facts['texts']} texts, {facts['rows']} rows: {format_bytes(path.stat().st_size)}")
    typer.echo(json_module.dumps({"path": str(path), **facts}) if json else str(path))


def read_tokenizer(model: str | None, run: Path) -> tuple[Tokenizer | None, str | None]:
    """The tokenizer of a model and its name; by default of the model that the run was captured with. The tokenizer is
    None, with a message, if none is found."""
    from birkhoff.capture.store.reader import captured_model
    from birkhoff.hf.checkpoint import read_config, runs_here
    from birkhoff.hf.open_model import open_text
    from birkhoff.text.tokenizer import Tokenizer
    from birkhoff.weights.locate import locate

    name = captured_model(run) if model is None else model
    try:
        path = None if name is None else locate(name)
    except HubError:
        if model is not None:
            raise
        path = None
    if path is not None:
        folder = path if path.is_dir() else path.parent
        if (folder / "config.json").is_file() and runs_here(config := read_config(folder)):
            tokenizer: Tokenizer | None = open_text(folder, int(config["vocab_size"])).tokenizer
        else:
            file = folder / "tokenizer.json"
            tokenizer = Tokenizer.from_file(file) if file.is_file() else None
        if tokenizer is not None:
            return tokenizer, name
    if not run.exists():
        return None, name  # the caller says so
    print_status(f"{name or run} has no tokenizer here: tokens are shown by their numbers. Name one: --model")
    return None, name
