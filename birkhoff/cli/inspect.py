"""`birkhoff inspect PATH`: what is in a checkpoint, from headers alone. Exit status 1 when problems were found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from birkhoff.weights.inspect import Inspection

_CLASS_TEXT = {
    "experts": "routed experts",
    "dense": "attention projections, shared experts",
    "vocabulary": "embedding and head",
    "compressor": "compressors and indexers",
    "router": "router weights, biases, token tables",
    "mhc": "stream mixers (mHC)",
    "norms": "norms and sinks",
    "mtp": "multi-token prediction",
    "other": "not recognised",
}


def inspect(
    path: Annotated[Path, typer.Argument(help="Directory with config.json and safetensors files.", show_default=False)],
    json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Show layers, bytes by class, what fits where, and every problem found; reads headers only."""
    from rich.console import Console

    from birkhoff.weights.inspect import inspect_checkpoint

    report = inspect_checkpoint(path)
    if json:
        typer.echo(report.to_json())
    else:
        _print(report, Console(highlight=False, soft_wrap=not sys.stdout.isatty()))  # a pipe has no edge to wrap at
    if report.problems:
        raise typer.Exit(1)


def _print(report: Inspection, console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    from birkhoff.weights.inspect import places

    console.print(
        f"[bold]{escape(report.path)}[/]  {report.dialect or 'no readable config'}, {report.tensors} tensors "
        f"in {report.files} files, {_size(report.file_bytes)}"
    )
    table = Table("class", "", "bytes", "share")
    for kind, size in report.bytes_by_class.items():
        table.add_row(kind, _CLASS_TEXT[kind], _size(size), f"{100 * size / max(report.file_bytes, 1):.1f} %")
    console.print(table)
    if report.config:
        layers = ", ".join(f"{len(indices)} {kind}" for kind, indices in report.layers.items() if indices)
        console.print(f"layers      {layers}, {report.mtp_blocks} mtp")
        active = f", {_count(report.parameters_active)} active per token" if report.parameters_active else ""
        console.print(f"parameters  {_count(report.parameters)}{active}, {_count(report.parameters_mtp)} in mtp")
        console.print(
            f"cache       {report.cache_bytes_per_token:g} B per token and "
            f"{_size(report.cache_bytes_per_sequence or 0)} per sequence, as bfloat16"
        )
        console.print("config      " + ", ".join(f"{name} {value}" for name, value in report.config.items()))
    sizes = ", ".join(f"{form} {_size(size)}" for form, size in report.weight_bytes.items())
    console.print(f"weights     {sizes}")
    room = places()
    for place, forms in report.fits(room).items():
        console.print(f"fits        {place} ({_size(room[place])}): {', '.join(forms) or 'no form'}")
    for notice in report.notices:
        console.print(f"[yellow]notice[/]      {escape(notice)}")
    for problem in report.problems:
        console.print(f"[red]{problem['code']}[/]  {escape(problem['message'])}")
    if not report.problems:
        console.print("[green]no problems found[/]")


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def _count(number: int) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)
