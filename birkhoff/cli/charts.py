"""Terminal charts: mixing matrices as shaded tables, and sparklines.

Functions take plain lists of numbers and return rich objects; every number is printed, colour only repeats it.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.style import Style
from rich.table import Table
from rich.text import Text

Matrix = Sequence[Sequence[float]]
_LEVELS = " ▁▂▃▄▅▆▇█"


def cell_style(value: float, maximum: float = 1.0) -> Style:
    """Background from near black (0) to warm yellow (`maximum`), with a contrasting text colour."""
    level = min(max(value / maximum, 0.0), 1.0) if maximum else 0.0
    red = int(40 + 215 * level)
    green = int(40 + 160 * level)
    blue = int(60 - 20 * level)
    return Style(color="black" if level > 0.45 else "white", bgcolor=f"rgb({red},{green},{blue})")


def cell(value: float, maximum: float = 1.0) -> Text:
    """A number with two decimals on a background that shows its size."""
    return Text(f" {value:.2f} ", style=cell_style(value, maximum))


def mixing_matrix(title: str, mix: Matrix, read: Sequence[float], write: Sequence[float]) -> Table:
    """Table of one mixer: `mix[source][target]` with row and column sums, then its read and write weights."""
    streams = range(len(mix))
    table = Table(title=title, box=None, pad_edge=False, padding=0, title_justify="left", title_style="bold")
    table.add_column("", style="dim", min_width=7)
    for target in streams:
        table.add_column(f"to {target}", justify="center")
    table.add_column(" sum", justify="right", style="dim")
    for source in streams:
        row = mix[source]
        table.add_row(f"from {source}", *(cell(value) for value in row), f" {sum(row):.2f}")
    column_sums = [sum(row[target] for row in mix) for target in streams]
    table.add_row("sum", *(Text(f"{value:.2f}", style="dim") for value in column_sums), "")
    table.add_row("read", *(cell(value) for value in read), "")
    table.add_row("write", *(cell(value, 2.0) for value in write), "")
    return table


def sparkline(values: Sequence[float]) -> str:
    """One bar character per value, scaled to the largest."""
    maximum = max(values, default=0.0)
    return "".join(_LEVELS[round(8 * max(value, 0.0) / maximum)] if maximum > 0 else " " for value in values)
