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
from birkhoff.errors import OptionError

if TYPE_CHECKING:
    from birkhoff.text.tokenizer import Tokenizer


def report(
    run: Annotated[
        Path, typer.Argument(help="Directory of a capture: its --out, a tag in it, or one request.")
    ],
    out: Annotated[Path | None, typer.Option(help="File to write. [default: RUN.html]")] = None,
    model: Annotated[str, typer.Option(help="Model whose tokenizer reads the tokens.")] = "nano",
    limit: Annotated[int, typer.Option(help="Show at most this many texts.")] = 8,
    json: Json = False,
) -> None:
    """Write an HTML file that shows the texts and rows of a capture, without a server."""
    if limit < 1:
        raise OptionError(f"limit is {limit}, expected a positive whole number.")
    from birkhoff.report.capture_report import write_report

    path = run.with_name(f"{run.name or 'capture'}.html") if out is None else out
    facts = write_report(run, path, read_tokenizer(model), limit)
    print_status(f"{facts['texts']} texts, {facts['rows']} rows: {format_bytes(path.stat().st_size)}")
    typer.echo(json_module.dumps({"path": str(path), **facts}) if json else str(path))


def read_tokenizer(model: str) -> Tokenizer | None:
    """The tokenizer of a model; None if its directory has none."""
    from birkhoff.text.tokenizer import Tokenizer
    from birkhoff.weights.locate import locate

    path = locate(model)
    file = (path if path.is_dir() else path.parent) / "tokenizer.json"
    if not file.is_file():
        print_status(f"{path} has no tokenizer.json: tokens are shown by their numbers")
        return None
    return Tokenizer.from_file(file)
