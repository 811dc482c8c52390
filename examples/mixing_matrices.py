"""Plot how every layer mixes the four residual streams, averaged over a prompt.

    python examples/mixing_matrices.py "Once upon a time" --out mixing.svg

One row per layer, the mixer around attention on the left and around the experts on the right: cell (from, to) is the
share of a stream that is mixed into another. The middle layer is also shown in the terminal.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.columns import Columns
from rich.console import Console

import birkhoff
from birkhoff.cli.charts import mixing_matrix
from birkhoff.trace import Trace

CELL = 22
GAP = 26
LEFT = 70
TOP = 40
SUBLAYERS = {"attn": "around attention", "ffn": "around the experts"}


def svg(trace: Trace, layers: int) -> str:
    """SVG of all mixers; each cell has its value as a tooltip."""
    size = 4 * CELL
    width = LEFT + 2 * (size + GAP)
    height = TOP + layers * (size + GAP)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
    ]
    out.append('<rect width="100%" height="100%" fill="white"/>')
    for column, (name, title) in enumerate(SUBLAYERS.items()):
        left = LEFT + column * (size + GAP)
        out.append(f'<text x="{left}" y="{TOP - 14}" font-size="10">{title}</text>')
        for layer in range(layers):
            top = TOP + layer * (size + GAP)
            out.append(
                f'<text x="8" y="{top + size // 2}" font-size="12">layer {layer}</text>' * (column == 0)
            )
            mix = trace[f"mhc_{name}_res_mix", layer].mean(0).tolist()  # [from, to]
            for source, row in enumerate(mix):
                for target, share in enumerate(row):
                    red, green, blue = (round(255 - (255 - full) * min(share, 1)) for full in (180, 60, 20))
                    out.append(
                        f'<rect x="{left + target * CELL}" y="{top + source * CELL}" width="{CELL - 1}" '
                        f'height="{CELL - 1}" fill="rgb({red},{green},{blue})">'
                        f"<title>layer {layer} {name}: {source} to {target} {share:.3f}</title></rect>"
                    )
    return "\n".join([*out, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompt", nargs="?", default="Once upon a time there was a cat who could sing.")
    parser.add_argument("--model", default="nano")
    parser.add_argument("--out", type=Path, default=Path("mixing.svg"))
    options = parser.parse_args()
    with birkhoff.load(options.model) as engine:
        layers = engine.config.num_hidden_layers
        trace = engine.trace(engine.prompt_ids(options.prompt))
    middle, tables = layers // 2, []
    for name, title in SUBLAYERS.items():
        mix, read, write = (
            trace[f"mhc_{name}_{kind}_mix", middle].mean(0).tolist() for kind in ("res", "pre", "post")
        )
        tables.append(mixing_matrix(f"layer {middle}, {title}", mix, read, write))
    Console(highlight=False).print(Columns(tables, padding=(0, 3)))
    options.out.write_text(svg(trace, layers), encoding="utf-8")
    print(f"all {layers} layers: {options.out}")


if __name__ == "__main__":
    main()
