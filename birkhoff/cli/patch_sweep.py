"""`birkhoff patch-sweep CLEAN CORRUPT`: patch activations of one text into another, one site at a time.

Prints the cells that move the metric the furthest, or all of them as JSON with --json. `--pairs FILE` sweeps over
several pairs of texts and prints their mean."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer

from birkhoff.cli.engine_io import open_engine
from birkhoff.cli.generate import read_prompt
from birkhoff.cli.options import shared_options, split_options
from birkhoff.cli.parsers import parse_layers, parse_streams
from birkhoff.cli.steer_option import Steer, load_vectors, parse_steer
from birkhoff.cli.terminal import escape_control
from birkhoff.cli.text_pairs import Other, Pairs, Position, TextPairs, Token, metric_of
from birkhoff.errors import OptionError, quoted


@shared_options("Model")
def patch_sweep(
    clean: Annotated[
        str | None, typer.Argument(help="Text whose activations are taken.", show_default=False)
    ] = None,
    corrupt: Annotated[
        str | None,
        typer.Argument(help="Text they are patched into; - reads standard input.", show_default=False),
    ] = None,
    token: Token = None,
    other: Other = None,
    position: Position = -1,
    pairs: Pairs = None,
    over: Annotated[
        list[str] | None, typer.Option(help="A hook, or heads; repeatable. Default: the residual streams.")
    ] = None,
    layers: Annotated[str, typer.Option(help="Layers: 4 or 4,6 or 4..8 or *.")] = "*",
    positions: Annotated[
        str, typer.Option(help="each, all (together), or positions joined by commas.")
    ] = "each",
    streams: Annotated[
        str | None, typer.Option(help="each, or streams joined by commas; by default all together.")
    ] = None,
    align: Annotated[str, typer.Option(help="Which row goes where: position or tokens.")] = "position",
    top: Annotated[int, typer.Option(help="Number of cells to print.", min=1)] = 20,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw the sweep to this file: .png, .svg, .pdf or .html.")
    ] = None,
    steer: Steer = None,
    json: Annotated[bool, typer.Option("--json", help="Print all cells as JSON.")] = False,
    **options: Any,
) -> None:
    """Patch activations of one text into another, one site at a time, and measure every run."""
    load_options, _ = split_options(options)
    texts, metric = _texts(clean, corrupt, pairs, token, other, position)
    keywords = {
        "layers": parse_layers(layers),
        "positions": _chosen("positions", positions, {"each": "each", "all": None}),
        "streams": None if streams is None else _chosen("streams", streams, {"each": "each"}),
        "align": align,
    }
    parsed = parse_steer(steer)
    with open_engine(load_options) as engine:
        from birkhoff.analysis.forward import residual_hook
        from birkhoff.analysis.patching import PatchSweep

        hooks = over or [residual_hook(engine)]
        sites = hooks[0] if len(hooks) == 1 else hooks
        result = engine.patch_sweep(
            *texts, metric, sites, **keywords, steer=load_vectors(parsed, engine) or None
        )
    sweep = result if isinstance(result, PatchSweep) else result.mean
    if plot is not None:
        from birkhoff import plot as pictures

        pictures.save(pictures.patch_sweep(sweep, recovered=sweep.spans), plot)
    if json:
        typer.echo(json_module.dumps(result.to_json()))
        return
    count = "" if isinstance(result, PatchSweep) else f"mean of {len(result)} pairs, "
    typer.echo(f"{count}{sweep.cells} cells: clean {sweep.clean:.4f}, corrupt {sweep.corrupt:.4f}", err=True)
    for labels, value in sweep.top(top):
        recovered = (
            f"{(value - sweep.corrupt) / (sweep.clean - sweep.corrupt):+8.2f}" if sweep.spans else " " * 8
        )
        names = " ".join(f"{axis} {label}" for axis, label in labels.items())
        place = labels.get("position")
        text = "" if place is None or sweep.tokens is None else f" {escape_control(sweep.tokens[place])!r}"
        typer.echo(f"{value:+9.4f} {recovered}  {names}{text}")


def _texts(
    clean: str | None,
    corrupt: str | None,
    pairs: Path | None,
    token: str | None,
    other: str | None,
    position: int,
) -> tuple[tuple[Any, Any], Any]:
    """The clean and the corrupted text, or a list of each, and their metric or metrics."""
    if pairs is None:
        if clean is None or corrupt is None:
            raise OptionError("give the texts CLEAN and CORRUPT, or several with --pairs FILE.")
        return (clean, read_prompt(corrupt)), metric_of(token, other, position)
    if clean is not None or corrupt is not None:
        raise OptionError("give two texts, or several with --pairs FILE, not both.")
    read = TextPairs.read(pairs, token, other, position)
    if read.corrupt is None:
        raise OptionError(f'{pairs} has no corrupted texts. Add "corrupt" to every line.')
    return (read.clean, read.corrupt), read.metrics


def _chosen(name: str, text: str, words: dict[str, Any]) -> Any:
    """A word, or numbers joined by commas."""
    if text in words:
        return words[text]
    if name == "streams":
        return parse_streams(text)
    try:
        return [int(piece) for piece in text.split(",")]
    except ValueError:
        raise OptionError(
            f"{name} is {quoted(text)}, expected {', '.join(words)}, or whole numbers joined by commas."
        ) from None
