"""`birkhoff sae crosscoder`: train one dictionary over several sites, or a transcoder from sites to other ones."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from birkhoff.cli.export import parse_site
from birkhoff.cli.options import Json
from birkhoff.cli.sae_train import BatchRows, Features, Rate, Steps, training_progress
from birkhoff.cli.terminal import print_status


def crosscoder(
    store: Annotated[Path, typer.Option(help="Harvest of all its sites: the --out of capture, or a tag.")],
    inputs: Annotated[
        list[str], typer.Option("--input", help="Site that features are computed from: mlp_in.4; repeatable.")
    ],
    out: Annotated[Path, typer.Option(help="Directory to write it to.")],
    outputs: Annotated[
        list[str] | None,
        typer.Option(
            "--output", help="Site that it reconstructs, for a transcoder; repeatable. [default: its inputs]"
        ),
    ] = None,
    view: Annotated[str, typer.Option(help="View of streams: flat or mean.")] = "flat",
    features: Features = 4096,
    k: Annotated[int, typer.Option(help="Active features per row.")] = 32,
    kind: Annotated[str, typer.Option(help="batchtopk, topk, jumprelu, gated or matryoshka.")] = "batchtopk",
    steps: Steps = 1000,
    batch_rows: BatchRows = 2048,
    rate: Rate = None,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed and rows give the same weights.")] = 0,
    device: Annotated[str, typer.Option(help="Device to train on: cpu or cuda.")] = "cpu",
    half: Annotated[
        bool, typer.Option("--half", help="Save matrices in bfloat16, which halves the size.")
    ] = False,
    json: Json = False,
) -> None:
    """Train a crosscoder on several sites of a harvest or, with --output, a transcoder."""
    from birkhoff.analysis.crosscoder_train import SiteRowSource, train_crosscoder
    from birkhoff.sae.train import TrainOptions

    options = TrainOptions(features, k=k, kind=kind, steps=steps, rate=rate, seed=seed)
    source = SiteRowSource(
        store,
        [parse_site(text, "--input") for text in inputs],
        None if not outputs else [parse_site(text, "--output") for text in outputs],
        stream_view=view,
        batch_rows=batch_rows,
        seed=seed,
    )
    with training_progress(steps) as report_step:
        result = train_crosscoder(source, options, out, device=device, half=half, progress=report_step)
    explained = ", ".join(
        f"{name} {share:.1%}" for name, share in result.quality["explained_variance"].items()
    )
    print_status(
        f"{result.crosscoder!r}: {explained} explained with {result.quality['l0']:.1f} features a row"
    )
    typer.echo(json_module.dumps({"path": str(out), **result.to_json()}) if json else str(out))
