"""How results look in a notebook: small HTML without scripts or styles of a page, and progress bars.

Objects have a `_repr_html_` that calls the functions here. Text of models and users is escaped. Colours are backgrounds
with some transparency, so that they fit a light and a dark page."""

from __future__ import annotations

import html
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

POSITIVE, NEGATIVE = "37, 99, 235", "220, 38, 38"
CELL = "padding:1px 6px;border:none;text-align:right;white-space:nowrap"
REDRAW_S = 0.1  # seconds between two pictures of a progress bar


class Html:
    """A piece of HTML that a notebook shows; `str` gives the source, for a file."""

    def __init__(self, source: str):
        self.source = source

    def _repr_html_(self) -> str:
        return self.source

    def __str__(self) -> str:
        return self.source

    def __repr__(self) -> str:
        return f"Html({len(self.source)} characters)"


def escape(value: Any) -> str:
    """Text for HTML; line breaks and leading spaces stay visible."""
    return html.escape(str(value)).replace("\n", "⏎")


def facts(title: str, values: Mapping[str, Any]) -> str:
    """A title and a table of names and values; values that are None are left out."""
    rows = [
        f"<tr><td style='{CELL};text-align:left;opacity:.7'>{escape(name)}</td>"
        f"<td style='{CELL};text-align:left'>{escape(value)}</td></tr>"
        for name, value in values.items()
        if value is not None
    ]
    return f"<div><b>{escape(title)}</b><table>{''.join(rows)}</table></div>"


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> str:
    """A plain table."""
    head = "".join(f"<th style='{CELL};text-align:left'>{escape(name)}</th>" for name in header)
    body = "".join(
        "<tr>" + "".join(f"<td style='{CELL};text-align:left'>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    caption = f"<b>{escape(title)}</b>" if title else ""
    return f"<div>{caption}<table><tr>{head}</tr>{body}</table></div>"


def colours(values: Iterable[float | None]) -> list[str]:
    """A background for each number: blue above zero and red below, or from the smallest to the largest if none is
    below zero. Missing numbers have none."""
    numbers = [None if value is None or not math.isfinite(value) else float(value) for value in values]
    known = [number for number in numbers if number is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    signed = low < 0
    largest = max(abs(low), abs(high)) if signed else high - low

    def colour(number: float | None) -> str:
        if number is None or not largest:
            return ""
        strength = abs(number) / largest if signed else (number - low) / largest
        return f"background:rgba({NEGATIVE if number < 0 else POSITIVE}, {0.75 * strength:.3f})"

    return [colour(number) for number in numbers]


def tokens(texts: Sequence[str], values: Sequence[float | None] | None = None, label: str = "") -> str:
    """The tokens of a text in a row, coloured by one number each; the number shows on hover."""
    shades = colours(values) if values is not None else [""] * len(texts)
    numbers: Sequence[float | None] = values if values is not None else [None] * len(texts)
    spans = []
    for index, (text, shade, value) in enumerate(zip(texts, shades, numbers)):
        shown = escape(text) or "∅"
        number = "" if value is None else f", {label or 'value'} {value:.4g}"
        spans.append(
            f"<span title='{index}: {html.escape(repr(text), quote=True)}{html.escape(number, quote=True)}' "
            f"style='{shade};border-radius:2px;white-space:pre-wrap'>{shown}</span>"
        )
    name = f"<div style='opacity:.7'>{escape(label)}</div>" if label else ""
    return f"<div style='font-family:monospace;line-height:1.7'>{name}{''.join(spans)}</div>"


def heat(
    values: Sequence[Sequence[float | None]],
    rows: Sequence[Any],
    columns: Sequence[Any],
    texts: Sequence[Sequence[str]] | None = None,
    corner: str = "",
) -> str:
    """A table of coloured cells with the numbers, or other texts, in them."""
    width = len(columns)
    shades = colours([value for row in values for value in row])
    head = "".join(f"<th style='{CELL}'>{escape(name)}</th>" for name in columns)
    body = []
    for index, (name, row) in enumerate(zip(rows, values)):
        cells = [
            f"<td style='{CELL};{shades[index * width + place]}' title='{'' if value is None else f'{value:.6g}'}'>"
            f"{escape(texts[index][place]) if texts is not None else '' if value is None else f'{value:.2f}'}</td>"
            for place, value in enumerate(row)
        ]
        body.append(f"<tr><th style='{CELL};text-align:left'>{escape(name)}</th>{''.join(cells)}</tr>")
    return (
        "<div style='overflow-x:auto'><table style='font-family:monospace;font-size:85%'>"
        f"<tr><th style='{CELL};text-align:left'>{escape(corner)}</th>{head}</tr>{''.join(body)}</table></div>"
    )


def bars(terms: Sequence[tuple[str, float]], title: str = "") -> str:
    """Named numbers with a bar each."""
    largest = max((abs(value) for _, value in terms), default=0.0) or 1.0
    rows = [
        f"<tr><td style='{CELL};text-align:left'>{escape(name)}</td><td style='{CELL}'>{value:+.4f}</td>"
        f"<td style='{CELL};text-align:left'><div style='height:.8em;width:{160 * abs(value) / largest:.0f}px;"
        f"background:rgba({NEGATIVE if value < 0 else POSITIVE}, .7)'></div></td></tr>"
        for name, value in terms
    ]
    return f"<div><b>{escape(title)}</b><table style='font-family:monospace'>{''.join(rows)}</table></div>"


def progress(label: str, total: int | None = None) -> NotebookBar | None:
    """A progress bar in the output of the running cell; None outside a notebook."""
    display = _display()
    return None if display is None else NotebookBar(label, display, total)


class NotebookBar:
    """A bar that is redrawn in place as it is called; it says how long the work took when all is done."""

    def __init__(self, label: str, display: Any, total: int | None = None):
        self._label = label
        self._total = total
        self._started = self._drawn = time.monotonic()
        self._handle = display.display(Html(self._bar(0, total)), display_id=True)

    def __call__(self, done: int, total: int | None = None) -> None:
        """So much is done, of so much if that is known."""
        total = self._total if total is None else total
        now = time.monotonic()
        if now - self._drawn >= REDRAW_S or (total is not None and done >= total):
            self._drawn = now
            self._handle.update(Html(self._bar(done, total)))

    def _bar(self, done: int, total: int | None) -> str:
        seconds = time.monotonic() - self._started
        share = f"value='{done}' max='{total}'" if total else ""
        count = f"{done:,}" if total is None else f"{done:,} of {total:,}"
        return f"<div>{escape(self._label)} <progress {share}></progress> {count}, {seconds:.1f} s</div>"


def in_kernel() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return hasattr(shell, "kernel")


def _display() -> Any:
    """IPython's display functions if this is the kernel of a notebook, which has imported them."""
    return sys.modules.get("IPython.display") if in_kernel() else None
