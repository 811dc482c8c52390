"""Parsers for option values: layer selections, positions, token counts, and lists joined by commas."""

from __future__ import annotations

import json
import re
from typing import Any

from birkhoff.errors import OptionError, quoted

_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_INTEGER = re.compile(r"-?\d+")


def parse_hooks(text: str) -> dict[str, Any]:
    """Parse `HOOK=LAYERS;…` with layers such as `4`, `4,6`, `4..8`, `-1` or `*`; a bare hook means all layers."""
    hooks: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        hook, _, layers = (piece.strip() for piece in part.partition("="))
        if not hook or hook in hooks or ("=" in part and not layers):
            raise OptionError(
                f"hooks has {quoted(part)}, expected HOOK=LAYERS with each hook once, such as mlp_out=4,6..8."
            )
        hooks[hook] = _layers(layers, f"hooks has {quoted(part)}")
    if not hooks:
        raise OptionError(
            f"hooks is {quoted(text)}, expected HOOK=LAYERS parts joined by ';', such as mlp_out=*."
        )
    return hooks


def parse_layers(text: str) -> Any:
    """Parse `4`, `4,6`, `4..8`, `-1` or `*` to the layer selector of `birkhoff.hooks.layers`."""
    return _layers(text.strip(), f"layers is {quoted(text)}")


def _layers(text: str, context: str) -> Any:
    if text in ("", "*"):
        return "all"
    layers: list[int] = []
    ranges: list[list[int]] = []
    for piece in (piece.strip() for piece in text.split(",")):
        if _INTEGER.fullmatch(piece):
            layers.append(int(piece))
        elif match := _RANGE.fullmatch(piece):
            ranges.append([int(match[1]), int(match[2])])
        else:
            raise OptionError(f"{context}: {quoted(piece)} is no layer. Layers: 4 or 4,6 or 4..8 or *.")
    return layers if not ranges else {"ranges": ranges} | ({"layers": layers} if layers else {})


def parse_positions(text: str) -> Any:
    """Return a name such as `all_prompt` unchanged; parse text that starts with `[` or `{` as JSON."""
    if not text.lstrip().startswith(("[", "{")):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise OptionError(f"positions is {quoted(text)}, which is not JSON ({error}).") from None


def parse_streams(text: str) -> list[int]:
    """Parse stream indices joined by commas."""
    pieces = [piece.strip() for piece in text.split(",")]
    if not all(re.fullmatch(r"\d+", piece) for piece in pieces):
        raise OptionError(f"streams is {quoted(text)}, expected whole numbers joined by commas.")
    return [int(piece) for piece in pieces]


def parse_floats(name: str, text: str) -> list[float]:
    """Parse numbers joined by commas; `name` is the option in the error message."""
    values = []
    for piece in text.split(","):
        try:
            values.append(float(piece))
        except ValueError:
            raise OptionError(f"{name} has {quoted(piece)}, expected numbers joined by commas.") from None
    return values


def parse_words(text: str) -> list[str]:
    """Split at commas and drop empty pieces."""
    return [piece.strip() for piece in text.split(",") if piece.strip()]


def parse_token_count(text: str) -> int:
    """Parse `4096`, `128k` (times 1,024) or `1M` (times 1,024 squared)."""
    scale = {"k": 1024, "m": 1024**2}.get(text[-1:].lower())
    digits = text if scale is None else text[:-1]
    scale = scale or 1
    if not digits.isascii() or not digits.isdigit() or not 1 <= int(digits) * scale <= 2**24:
        raise OptionError(f"context is {quoted(text)}, expected a number of tokens such as 4096, 128k or 1M.")
    return int(digits) * scale
