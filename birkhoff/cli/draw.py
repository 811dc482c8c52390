"""Pictures of a model's inside for a terminal: mixing matrices, stream norms, shares.

Every picture is a rich object whose numbers stay readable without colour; colour only adds to them. Numbers come in as
plain lists, so nothing here knows tensors or models.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.style import Style
from rich.table import Table
from rich.text import Text

Matrix = Sequence[Sequence[float]]
_LEVELS = " ▁▂▃▄▅▆▇█"


def shade(value: float, most: float = 1.0) -> Style:
    """From black to a warm yellow, readable on either side."""
    level = min(max(value / most, 0.0), 1.0) if most else 0.0
    red = int(40 + 215 * level)
    green = int(40 + 160 * level)
    blue = int(60 - 20 * level)
    return Style(color="black" if level > 0.45 else "white", bgcolor=f"rgb({red},{green},{blue})")


def number(value: float, most: float = 1.0) -> Text:
    return Text(f" {value:.2f} ", style=shade(value, most))


def mixing_matrix(title: str, mix: Matrix, read: Sequence[float], write: Sequence[float]) -> Table:
    """One sublayer's mixer: what goes from each stream to each, the sums, and the weights it reads and writes with."""
    streams = range(len(mix))
    table = Table(title=title, box=None, pad_edge=False, padding=0, title_justify="left", title_style="bold")
    table.add_column("", style="dim", min_width=7)
    for to in streams:
        table.add_column(f"to {to}", justify="center")
    table.add_column(" sum", justify="right", style="dim")
    for source in streams:
        row = mix[source]
        table.add_row(f"from {source}", *(number(value) for value in row), f" {sum(row):.2f}")
    columns = [sum(row[to] for row in mix) for to in streams]
    table.add_row("sum", *(Text(f"{value:.2f}", style="dim") for value in columns), "")
    table.add_row("read", *(number(value) for value in read), "")
    table.add_row("write", *(number(value, 2.0) for value in write), "")
    return table


def sparks(values: Sequence[float]) -> str:
    """A row of little bars, the largest full height."""
    most = max(values, default=0.0)
    return "".join(_LEVELS[round(8 * max(value, 0.0) / most)] if most > 0 else " " for value in values)
