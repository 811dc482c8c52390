"""Limits on JSON text, checked before a parser sees it: nesting, and the memory that its values will take.

A few bytes of JSON can become hundreds in memory: `{"":0}` takes more than 300. `check_json` counts the structural
characters, which bounds the memory of the parsed values, and refuses text that would exceed its share.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 64
MEMORY_FACTOR = 6  # parsed values may take this many times the byte limit of the text
# Upper bounds of the bytes that CPython allocates for each structural character: the container or key it begins, and
# the number or list slot beside it.
_BYTES_OF = {b"{": 240, b"[": 90, b":": 180, b",": 40}
# Strings, also an unterminated one at the end. Possessive quantifiers and `\Z` keep the scan linear in hostile text.
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.?+[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
_NOT_STRUCTURE = bytes(byte for byte in range(256) if byte not in b"[]{}:")

PairsHook = Callable[[list[tuple[str, Any]]], Any]


def structure(raw: bytes) -> bytes:
    """The brackets and colons of a JSON text, without those inside strings."""
    return _STRINGS.sub(b"", raw).translate(None, _NOT_STRUCTURE)


def exceeds_depth(brackets: bytes, max_depth: int) -> bool:
    """Whether the text of this `structure` is nested more than `max_depth` deep."""
    depth = 0
    for byte in brackets.replace(b":", b""):
        depth += 1 if byte in b"[{" else -1
        if depth > max_depth:
            return True
    return False


def check_json(raw: bytes, max_bytes: int, max_depth: int = MAX_DEPTH) -> None:
    """Raise ValueError if `raw` is longer than `max_bytes`, nested too deeply, or would take more than
    `MEMORY_FACTOR` times `max_bytes` once parsed.

    Characters beyond ASCII take up to four bytes each in memory, so such text may have a quarter of the length."""
    limit = max_bytes if raw.isascii() else max_bytes // 4
    if len(raw) > limit:
        raise ValueError(f"it has {len(raw)} bytes, at most {limit} are read")
    needed = sum(size * raw.count(character) for character, size in _BYTES_OF.items())
    if needed > MEMORY_FACTOR * max_bytes:
        raise ValueError(
            f"its values would take up to {needed} bytes, {MEMORY_FACTOR * max_bytes} are allowed"
        )
    if raw.count(b"[") + raw.count(b"{") > max_depth and exceeds_depth(structure(raw), max_depth):
        raise ValueError(f"it is nested more than {max_depth} deep")


def parse_json(
    raw: bytes, max_bytes: int, max_depth: int = MAX_DEPTH, object_pairs_hook: PairsHook | None = None
) -> Any:
    """Parse JSON in UTF-8 within these limits. NaN and infinities are refused. Raises ValueError."""
    check_json(raw, max_bytes, max_depth)
    text = raw.decode("utf-8")
    del raw  # an index is tens of megabytes; its bytes are freed before its values are made
    return json.loads(text, object_pairs_hook=object_pairs_hook, parse_constant=_no_constant)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
