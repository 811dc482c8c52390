"""Plot how an edit propagates: how far each stream moves, layer by layer, when one stream or all are steered.

    python examples/steering_wake.py "Once upon a time" --stream 1 --layer 3 --out wake.svg

The same direction is added to one stream and, in another run, to all of them, at the same total norm. Cell (layer,
stream) is the distance that stream's rows moved, relative to their norm, averaged over the prompt. Streams are shown at
the input of a layer, so that nothing moves up to the edited layer; from the next on the mixers have spread the edit.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import birkhoff
from birkhoff import Add

HOOK = "mhc_streams_pre_attn"
CELL = 44
LEFT = 70
TOP = 46


def wake(engine: birkhoff.Engine, ids: list[int], edit: Add) -> torch.Tensor:
    """Relative distance each stream moves, [depths, streams]: at the input of each layer, and at the end."""
    layers = engine.config.num_hidden_layers
    sites = [(HOOK, layer) for layer in range(layers)] + [("mhc_streams_final", layers - 1)]
    names = [HOOK, "mhc_streams_final"]
    plain = engine.trace(ids, hooks=names)
    steered = engine.trace(ids, hooks=names, steer=[edit])
    moved = [(steered[site] - plain[site]).norm(dim=-1) / plain[site].norm(dim=-1) for site in sites]
    return torch.stack([rows.mean(0) for rows in moved])


def svg(wakes: dict[str, torch.Tensor], layer: int) -> str:
    depths, streams = next(iter(wakes.values())).shape
    largest = max(float(distances.max()) for distances in wakes.values()) or 1.0
    width = LEFT + len(wakes) * (streams * CELL + 40)
    height = TOP + depths * CELL
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
    ]
    out.append('<rect width="100%" height="100%" fill="white"/>')
    for column, (title, distances) in enumerate(wakes.items()):
        left = LEFT + column * (streams * CELL + 40)
        out.append(f'<text x="{left}" y="16" font-size="12">{title} of layer {layer}</text>')
        for depth in range(depths):
            label = f"layer {depth}" if depth < depths - 1 else "end"
            top = TOP + depth * CELL
            out.append(f'<text x="8" y="{top + CELL // 2}" font-size="11">{label}</text>' * (column == 0))
            for stream in range(streams):
                share = float(distances[depth, stream])
                red, green, blue = (
                    round(255 - (255 - full) * (share / largest) ** 0.5) for full in (20, 90, 160)
                )
                out.append(
                    f'<rect x="{left + stream * CELL}" y="{top}" width="{CELL - 1}" height="{CELL - 1}" '
                    f'fill="rgb({red},{green},{blue})">'
                    f"<title>{title}, {label}, stream {stream}: {share:.4f}</title></rect>"
                )
    return "\n".join([*out, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompt", nargs="?", default="Once upon a time there was a cat who could sing.")
    parser.add_argument("--model", default="nano")
    parser.add_argument("--layer", type=int, default=2)
    parser.add_argument("--stream", type=int, default=1)
    parser.add_argument("--strength", type=float, default=0.5, help="norm in units of the mean row norm")
    parser.add_argument("--out", type=Path, default=Path("wake.svg"))
    options = parser.parse_args()
    with birkhoff.load(options.model) as engine:
        ids = engine.prompt_ids(options.prompt)
        streams = engine.config.hc_mult
        size = engine.trace(ids, hooks=[HOOK])[HOOK, options.layer].flatten(1).norm(dim=-1).mean()
        direction = torch.randn(engine.config.hidden_size, generator=torch.Generator().manual_seed(0))
        direction *= options.strength * size / direction.norm()
        at = {"hook": HOOK, "layers": [options.layer]}
        wakes = {
            f"stream {options.stream}": wake(engine, ids, Add(direction, streams=[options.stream], **at)),
            "all streams": wake(engine, ids, Add(direction / streams**0.5, streams="all", **at)),
        }
    for title, distances in wakes.items():
        table = Table(
            "entering", *(f"stream {n}" for n in range(streams)), title=f"{title} of layer {options.layer}"
        )
        for depth, row in enumerate(distances.tolist()):
            table.add_row(
                f"layer {depth}" if depth < len(distances) - 1 else "the head",
                *(f"{share:.3f}" for share in row),
            )
        Console(highlight=False).print(table)
    options.out.write_text(svg(wakes, options.layer), encoding="utf-8")
    print(f"both wakes: {options.out}")


if __name__ == "__main__":
    main()
