"""`birkhoff convert SRC DST`: convert a checkpoint to another format. Prints DST to stdout."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from birkhoff.cli.options import Json
from birkhoff.cli.terminal import print_status, progress_bar


def convert(
    src: Annotated[str, typer.Argument(help="nano, a checkpoint directory or a GGUF file.")],
    dst: Annotated[Path, typer.Argument(help="NAME.gguf, or a directory for safetensors.")],
    to: Annotated[
        str | None, typer.Option(help="gguf or safetensors; default: from the name of DST.")
    ] = None,
    experts: Annotated[
        str | None,
        typer.Option(
            help="Routed experts: fp4 (MXFP4 in GGUF; also called mxfp4), bf16 or f32; in a directory also fp8."
        ),
    ] = None,
    dense: Annotated[
        str | None,
        typer.Option(help="Dense matrices: bf16 or f32; in GGUF also q8_0, in a directory also fp8."),
    ] = None,
    preset: Annotated[str, typer.Option(help="GGUF dialect: upstream or ds4.")] = "upstream",
    mtp: Annotated[bool, typer.Option(help="Include multi-token prediction (GGUF: NAME-mtp.gguf).")] = True,
    shard_size: Annotated[
        str | None, typer.Option(help="Split into files of about this size, such as 45GB.")
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Fail if a weight would be rounded.")] = False,
    workers: Annotated[int | None, typer.Option(help="Threads.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Report what would be written and exit.")
    ] = False,
    json: Json = False,
) -> None:
    """Convert a checkpoint between the released layout and GGUF; streams, resumes and verifies."""
    from birkhoff.byte_size import parse_bytes
    from birkhoff.convert.convert import convert as convert_checkpoint

    with progress_bar("converting") as advance:
        result = convert_checkpoint(
            src,
            dst,
            to=to,
            experts=experts,
            dense=dense,
            preset=preset,
            mtp=mtp,
            shard_bytes=parse_bytes(shard_size) if shard_size is not None else None,
            exact=exact,
            dry_run=dry_run,
            workers=workers,
            progress=advance,
        )
    for notice in result.notices:
        print_status(notice)
    sizes = ", ".join(f"{kind} {size / 1e6:.1f} MB" for kind, size in result.bytes_by_class.items())
    print_status(
        f"{result.to}, experts {result.experts}, dense {result.dense}: {result.tensors} tensors, {sizes}"
    )
    for file in result.files:
        print_status(f"{file['name']}  {file['bytes'] / 1e6:.1f} MB, {file['tensors']} tensors")
    if result.written:
        changed = {kind: row for kind, row in result.rounding.items() if row["changed"]}
        for kind, row in changed.items():
            share = 100 * row["changed"] / row["numbers"]
            print_status(
                f"{kind}: {share:.0f} % of numbers rounded, by up to {row['worst']:.2g} of their tensor's largest"
            )
        if not changed:
            print_status("every number is exactly what it was")
        rate = result.source_bytes / 1e6 / max(result.seconds, 1e-9)
        resumed = (
            f", {result.resumed_units} of {result.units} parts were there already"
            if result.resumed_units
            else ""
        )
        print_status(
            f"{result.seconds:.1f} s, {rate:.0f} MB/s of source; {result.checked} tensors read back{resumed}"
        )
    # A split file has no file of the name DST: its first part is what opens it.
    path = dst.with_name(str(result.files[0]["name"])) if result.to == "gguf" else dst
    typer.echo(json_module.dumps(result.to_dict()) if json else str(path))
