"""What a request's edits amount to, as bytes: equal bytes, equal effect on the tokens of a phase.

Every edit says what it does to the tokens of a phase as `DigestPart`s: canonical bytes, each in the block of its
operation. `combine` frames every part with its length and every block with a name of its own, so that no content of
one kind can be read as content of another. Parts of a block whose order cannot matter are sorted; the others stand
as they came. A phase that nothing touches has no digest, whatever the other phase does: edits of generated tokens
leave the cache of a prompt alone. Nothing here imports torch, so that what was steered can be compared where there
is none."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Phase = Literal["prefill", "decode"]
Block = Literal["patch", "add", "delta", "full", "clamp"]
BLOCKS: tuple[Block, ...] = ("patch", "add", "delta", "full", "clamp")
IN_ORDER: frozenset[str] = frozenset({"patch", "clamp"})  # a second one sees what the first has left
DIGEST_BYTES = 16


@dataclass(frozen=True, order=True)
class DigestPart:
    """One edit at one site, or one use of a dictionary of features, in canonical bytes."""

    block: Block
    content: bytes


def framed(*pieces: bytes) -> bytes:
    """Pieces behind their lengths: no two lists of pieces give the same bytes."""
    return b"".join(struct.pack("<Q", len(piece)) + piece for piece in pieces)


def number(value: float | None) -> bytes:
    """A float64, where minus zero is zero; nothing for None."""
    return b"" if value is None else struct.pack("<d", value + 0.0)


def float32_bytes(values: Any) -> bytes:
    """Numbers as little-endian float32, whatever they came as: a list, a packed blob, a tensor."""
    array = values.detach().float().cpu().numpy() if hasattr(values, "detach") else np.asarray(values)
    return (array.astype("<f4") + np.float32(0)).tobytes()  # adding zero makes every zero a positive one


def row_digest(row: Any) -> bytes:
    """Names a row of numbers by its content."""
    return hashlib.sha256(b"birkhoff row 1" + float32_bytes(row)).digest()[:DIGEST_BYTES]


def combine(parts: Iterable[DigestPart]) -> bytes | None:
    """128 bits that name what all parts do together; None when there are none."""
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


def short(digest: bytes | None) -> int:
    """63 bits of a digest as a positive number, for places that hold no more; 0 when there is none."""
    return 0 if digest is None else int.from_bytes(digest[:8], "big") >> 1 or 1
