"""Digests of a request's edits: equal bytes mean an equal effect on the tokens of a phase.

Every edit describes its effect on a phase as `DigestPart`s: canonical bytes, each in the block of its operation.
`combine` prefixes every part with its length and every block with its name, so that content of one kind cannot be
read as content of another. Parts of a block are sorted where their order has no effect and kept in order otherwise.
A phase without edits has no digest: edits of generated tokens do not affect the cache of a prompt. Nothing here
imports torch, so digests can be compared without it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Phase = Literal["prefill", "decode"]
Block = Literal["patch", "add", "delta", "full", "call", "clamp", "bound", "attend"]
BLOCKS: tuple[Block, ...] = ("patch", "add", "delta", "full", "call", "clamp", "bound", "attend")
IN_ORDER: frozenset[str] = frozenset({"patch", "clamp", "bound"})  # operations whose order matters
DIGEST_BYTES = 16


@dataclass(frozen=True, order=True)
class DigestPart:
    """One edit at one site, or one use of a dictionary of features, in canonical bytes."""

    block: Block
    content: bytes


def framed(*pieces: bytes) -> bytes:
    """Pieces, each after its length: different lists of pieces give different bytes."""
    return b"".join(struct.pack("<Q", len(piece)) + piece for piece in pieces)


def number(value: float | None) -> bytes:
    """A float64 with minus zero as zero; empty for None."""
    return b"" if value is None else struct.pack("<d", value + 0.0)


def float32_bytes(values: Any) -> bytes:
    """Numbers as little-endian float32, from a list, an array or a tensor."""
    array = values.detach().float().cpu().numpy() if hasattr(values, "detach") else np.asarray(values)
    return (array.astype("<f4") + np.float32(0)).tobytes()  # turns minus zero into zero


def int64_bytes(values: Iterable[int]) -> bytes:
    """Whole numbers as little-endian int64."""
    return np.asarray(list(values), "<i8").tobytes()


def row_digest(row: Any) -> bytes:
    """Digest of the content of a row."""
    return hashlib.sha256(b"birkhoff row 1" + float32_bytes(row)).digest()[:DIGEST_BYTES]


def combine(parts: Iterable[DigestPart]) -> bytes | None:
    """128-bit digest of all parts together; None if there are none."""
    blocks: dict[str, list[bytes]] = {}
    for part in parts:
        blocks.setdefault(part.block, []).append(part.content)
    if not blocks:
        return None
    whole = hashlib.sha256(b"birkhoff steering 1")
    for block in BLOCKS:
        if block in blocks:
            contents = blocks[block] if block in IN_ORDER else sorted(blocks[block])
            whole.update(framed(b"block " + block.encode(), *contents))
    return whole.digest()[:DIGEST_BYTES]


def salt(prefill: bytes | None, decode: bytes | None, prompt_len: int) -> str | None:
    """A name for the cached state of a text whose prompt and generated tokens were edited with these digests; None if
    neither was. Equal text with a different salt must not share cache entries.

    Where prompt and generated tokens are edited differently, the state depends on where the prompt ends."""
    if prefill is None and decode is None:
        return None
    border = b"" if prefill == decode else str(prompt_len).encode()
    content = framed(prefill or b"", decode or b"", border)
    return hashlib.sha256(b"birkhoff salt 1" + content).hexdigest()[: 2 * DIGEST_BYTES]


def short(digest: bytes | None) -> int:
    """63 bits of a digest as a positive integer, for formats that hold no more; 0 for None."""
    return 0 if digest is None else int.from_bytes(digest[:8], "big") >> 1 or 1
