"""`birkhoff export RUN`: captured rows as Parquet, safetensors, Zarr v3 or a folder of Hugging Face `datasets`.

Prints the output folder to stdout, or a report with --json.
"""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from birkhoff.byte_size import format_bytes
from birkhoff.cli.options import Json
from birkhoff.cli.terminal import print_status
from birkhoff.errors import OptionError, quoted


def export(
    run: Annotated[
        Path, typer.Argument(help="Directory of a capture: its --out, a tag in it, or one request.")
    ],
    format: Annotated[str, typer.Option(help="parquet, safetensors, zarr or datasets.")],
    out: Annotated[Path, typer.Option(help="New folder to write.")],
    site: Annotated[
        list[str] | None, typer.Option(help="Only these rows: mlp_out.3; repeatable. [default: all]")
    ] = None,
    shard_rows: Annotated[int | None, typer.Option(help="Rows per file. [default: about 256 MiB]")] = None,
    json: Json = False,
) -> None:
    """Write captured rows in a format of other tools."""
    from birkhoff.data.export_rows import export_rows

    sites = None if site is None else [parse_site(text, "--site") for text in site]
    report = export_rows(run, out, format, sites=sites, shard_rows=shard_rows)
    print_status(
        f"{sum(report.rows.values())} rows of {len(report.rows)} sites in {report.files} files, "
        f"{format_bytes(report.bytes)}"
    )
    typer.echo(json_module.dumps(report.to_json()) if json else report.out)


def parse_site(text: str, option: str) -> tuple[str, int]:
    """`mlp_out.3` as hook and layer."""
    hook, _, layer = text.rpartition(".")
    if not hook or not layer.isdecimal():
        raise OptionError(f"{option} is {quoted(text)}, expected HOOK.LAYER such as mlp_out.3.")
    return hook, int(layer)
