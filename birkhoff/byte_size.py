"""Byte counts as text: parse what a user types, format what a message prints."""

from __future__ import annotations

import re

from birkhoff.errors import OptionError, quoted

_UNITS = {"": 1} | {
    letter + suffix: base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("", 1000), ("i", 1024))
}


def parse_bytes(text: str) -> int:
    """Convert `80GiB`, `24 GB`, `1.5TiB` or a plain number of bytes to an integer."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([kmgt]?i?)b?\s*", str(text).lower())
    if match is None or match[2] not in _UNITS:
        raise OptionError(f"{quoted(text)} is no size, expected a number of bytes such as 80GiB or 24GB.")
    size = int(float(match[1]) * _UNITS[match[2]])
    if size < 1:
        raise OptionError(f"{quoted(text)} is no size, expected more than nothing.")
    return size


def format_bytes(count: float) -> str:
    """Format a byte count with a binary unit: `12 B`, `1.50 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"
