"""`birkhoff synth OUT`: write a checkpoint with random weights in the released layout. Prints OUT to stdout."""

from __future__ import annotations

import json as json_module
import math
from pathlib import Path
from typing import Annotated

import typer

from birkhoff.cli.options import Json
from birkhoff.cli.terminal import print_status, progress_bar


def synth(
    out: Annotated[Path, typer.Argument(help="Directory to write; it must not contain a checkpoint.")],
    like: Annotated[str, typer.Option(help="Size: flash, pro, nano or tiny.")] = "tiny",
    layers: Annotated[int | None, typer.Option(help="Number of layers; default: all.")] = None,
    routed_experts: Annotated[
        int | None, typer.Option(help="Number of routed experts of a layer; default: all.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed gives the same bytes.")] = 0,
    dense: Annotated[str, typer.Option(help="Format of dense matrices: fp8, bf16 or f32.")] = "fp8",
    experts: Annotated[str, typer.Option(help="Format of routed experts: fp4, fp8, bf16 or f32.")] = "fp4",
    mtp: Annotated[bool, typer.Option(help="Include the multi-token-prediction block.")] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Report what would be written and exit.")
    ] = False,
    json: Json = False,
) -> None:
    """Write a checkpoint with random weights in the released tensor names and formats."""
    from birkhoff.convert.formats import resolve_format
    from birkhoff.convert.presets import preset
    from birkhoff.convert.synth import synth as write_synthetic
    from birkhoff.weights.inspect import tensor_class
    from birkhoff.weights.layout import expected_tensors
    from birkhoff.weights.safetensors import item_bytes

    config = preset(like, layers, mtp, routed_experts)
    dense, experts = (
        resolve_format(option, name, "safetensors")
        for option, name in (("dense", dense), ("experts", experts))
    )
    sizes: dict[str, int] = {}
    stored_tensors = expected_tensors(config, dense, experts)
    for name, stored in stored_tensors.items():
        kind = tensor_class(name)
        sizes[kind] = sizes.get(kind, 0) + math.prod(stored.shape) * item_bytes(stored.dtype)
    total = sum(sizes.values())
    result = {
        "path": str(out),
        "like": like,
        "layers": config.num_hidden_layers,
        "routed_experts": config.n_routed_experts,
        "seed": seed,
        "dense": dense,
        "experts": experts,
        "mtp_blocks": config.num_nextn_predict_layers,
        "tensors": len(stored_tensors),
        "bytes": total,
        "bytes_by_class": sizes,
        "written": not dry_run,
    }
    del stored_tensors  # tens of thousands of entries for a large model
    print_status(
        f"{like}, {config.num_hidden_layers} layers, seed {seed}, dense {dense}, experts {experts}: "
        f"{result['tensors']} tensors, {total / 1e9:.2f} GB"
    )
    if not dry_run:
        with progress_bar("writing") as advance:
            write_synthetic(
                out, like, layers, seed, dense, experts, mtp, progress=advance, routed_experts=routed_experts
            )
    typer.echo(json_module.dumps(result) if json else str(out))
