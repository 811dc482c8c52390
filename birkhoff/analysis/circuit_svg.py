"""A circuit as an SVG picture: tokens from left to right, sublayers from the embedding at the bottom to the output.

Circles are the verified nodes, larger with their score; lines are edges in the colour of their stream, wider with their
score and dashed if they act against the metric. The picture has a background of its own, so it can stand on any page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from birkhoff.analysis.circuit import Circuit

ROW, LEFT, COLUMN, FOOT = 18, 84, 100, 24
MAX_TEXT = 13
STREAMS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # told apart with any colour vision
ATTENTION = ("mhc_streams_pre_attn", "pre_attn", "attn_head_out", "attn_z", "attn_out", "post_attn")
INK, SOFT, AGAINST = "#20242c", "#5c6370", "#b3541e"


def circuit_svg(circuit: Circuit) -> str:
    """The picture of a circuit, as the text of an SVG file."""
    ends = [end for edge in circuit.edges for end in (edge.source, edge.target)]
    inner = [end[1] for end in ends if end[0] not in ("embedding", "output")]
    layers = 1 + max([0, *(node.layer for node in circuit.nodes), *inner])
    used = {node.position for node in circuit.nodes} | {end[2] for end in ends}
    column = {position: index for index, position in enumerate(sorted(used))}
    rows = [
        "embedding",
        *(f"{kind} {layer}" for layer in range(layers) for kind in ("attn", "ffn")),
        "output",
    ]

    def row_of(hook: str, layer: int) -> int:
        if hook in ("embedding", "output"):
            return 0 if hook == "embedding" else len(rows) - 1
        return 1 + 2 * layer + (hook not in ATTENTION)

    def height_of(row: int) -> float:
        return (len(rows) - row - 0.5) * ROW

    def place(hook: str, layer: int, position: int) -> tuple[float, float]:
        return LEFT + COLUMN * (column[position] + 0.5), height_of(row_of(hook, layer))

    width, height = LEFT + COLUMN * max(len(column), 1), len(rows) * ROW + FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="{SOFT}">',
        f"<title>{escape(repr(circuit))}</title>",
        f'<rect width="{width}" height="{height}" fill="#fcfcfa"/>',
    ]
    parts += [f'<text x="4" y="{height_of(row) + 4:g}">{name}</text>' for row, name in enumerate(rows)]
    for position, index in column.items():
        text = str(position) if circuit.tokens is None else _short(circuit.tokens[position])
        x = LEFT + COLUMN * (index + 0.5)
        parts.append(f'<text x="{x:g}" y="{height - 8}" text-anchor="middle">{escape(text)}</text>')
    widest = _largest(circuit.edges)
    for edge in reversed(circuit.edges):
        (x0, y0), (x1, y1) = place(*edge.source), place(*edge.target)
        bend, middle = 9 * (edge.stream - 1.5), (y0 + y1) / 2
        dashes = ' stroke-dasharray="4 3"' if edge.score < 0 else ""
        parts.append(
            f'<path d="M{x0:g} {y0:g}C{x0 + bend:g} {middle:g} {x1 + bend:g} {middle:g} {x1:g} {y1:g}" fill="none" '
            f'stroke="{STREAMS[edge.stream % 4]}" stroke-width="{0.6 + 4 * abs(edge.score) / widest:.2f}"'
            f"{dashes}/>"
        )
    strongest = _largest(circuit.nodes)
    for node in circuit.nodes:
        x, y = place(node.hook, node.layer, node.position)
        part = "".join(f" {axis} {number}" for axis, number in node.index)
        parts.append(
            f'<circle cx="{x:g}" cy="{y:g}" r="{3 + 5 * abs(node.score) / strongest:.2f}" '
            f'fill="{AGAINST if node.score < 0 else INK}"><title>{escape(node.hook)}[{node.layer}]{escape(part)} at '
            f"{node.position}: {node.score:.3f}</title></circle>"
        )
    return "\n".join([*parts, "</svg>"])


def _largest(parts: Sequence[Any]) -> float:
    return max(1e-9, *(abs(float(part.score)) for part in parts), 0.0)


def _short(text: str) -> str:
    shown = "".join(char if char.isprintable() else "·" for char in text).replace(" ", "·")
    return shown if len(shown) <= MAX_TEXT else shown[: MAX_TEXT - 1] + "…"
