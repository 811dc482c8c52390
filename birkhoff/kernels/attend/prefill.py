"""Attention of the many queries of a prompt on a GPU, with the contract of the plain twin.

A program is one query and many of its heads: all of them see the same keys, so a tile of keys is read once for all of
those heads and meets them in tensor cores, as values too. It walks the query's window, then its entries (the first
ones, or those listed for it), and lets the sink in at the end; nothing of the size queries x keys is ever stored.
Scores and sums are float32, probabilities meet the values in the keys' dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from birkhoff.kernels.attend import reference
from birkhoff.kernels.attend.topk_indices import TopkIndices
from birkhoff.kernels.gpu import power_of_two


@triton.jit
def _meet(q, k, seen, peak, mass, total, scale, WIDE: tl.constexpr):
    """A tile of keys [KEYS, WIDTH] joins what the heads have summed up; `scale` turns products into powers of two."""
    if WIDE:
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    else:
        logits = tl.dot(q, tl.trans(k)) * scale
    logits = tl.where(seen[None, :], logits, float("-inf"))
    higher = tl.maximum(peak, tl.max(logits, axis=1))
    old = tl.exp2(peak - higher)
    p = tl.exp2(logits - higher[:, None])
    mass = mass * old + tl.sum(p, axis=1)
    if WIDE:
        total = tl.dot(p, k, total * old[:, None], input_precision="ieee")
    else:
        total = tl.dot(p.to(k.dtype), k, total * old[:, None])
    return higher, mass, total


@triton.jit
def _attend(
    queries,
    recent,
    oldest,
    entries,
    counts,
    numbers,
    sink,
    out,
    length,
    span,
    window,
    num_entries,
    topk,
    heads,
    scale,
    ENTRIES: tl.constexpr,
    LISTED: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    WIDE: tl.constexpr,
):
    row = tl.program_id(1)
    piece = row // length
    at = span - length + row % length
    h = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, PADDED)
    place = (row.to(tl.int64) * heads + h)[:, None] * WIDTH + d[None, :]
    real = (h < heads)[:, None] & (d < WIDTH)[None, :]
    q = tl.load(queries + place, mask=real, other=0.0)
    peak = tl.full([HEADS], -1e30, tl.float32)
    mass = tl.zeros([HEADS], tl.float32)
    total = tl.zeros([HEADS, PADDED], tl.float32)
    near = recent + piece.to(tl.int64) * span * WIDTH
    first = tl.maximum(tl.maximum(at - window + 1, 0), tl.load(oldest + piece).to(tl.int32))
    for start in range(first, at + 1, KEYS):
        j = start + tl.arange(0, KEYS)
        seen = j <= at
        k = tl.load(
            near + j[:, None] * WIDTH + d[None, :], mask=seen[:, None] & (d < WIDTH)[None, :], other=0.0
        )
        peak, mass, total = _meet(q, k, seen, peak, mass, total, scale, WIDE)
    if ENTRIES:
        far = entries + piece.to(tl.int64) * num_entries * WIDTH
        count = tl.load(counts + row)
        for start in range(0, count, KEYS):
            e = start + tl.arange(0, KEYS)
            seen = e < count
            number = e
            if LISTED:
                number = tl.load(numbers + row.to(tl.int64) * topk + e, mask=seen, other=0)
            tile = seen[:, None] & (d < WIDTH)[None, :]
            k = tl.load(far + number.to(tl.int64)[:, None] * WIDTH + d[None, :], mask=tile, other=0.0)
            peak, mass, total = _meet(q, k, seen, peak, mass, total, scale, WIDE)
    drain = tl.load(sink + h, mask=h < heads, other=0.0) * 1.4426950408889634
    top = tl.maximum(peak, drain)
    weight = tl.exp2(peak - top)
    mixed = total * (weight / (mass * weight + tl.exp2(drain - top)))[:, None]
    tl.store(out + place, mixed.to(out.dtype.element_ty), mask=real)


def shape_of(heads: int, wide: bool) -> dict[str, int]:
    """Heads of a program, keys of a tile, warps and stages."""
    if wide:
        return {"HEADS": min(16, power_of_two(heads, 16)), "KEYS": 16, "num_warps": 4, "num_stages": 1}
    together = min(64, power_of_two(heads, 16))
    return {
        "HEADS": together,
        "KEYS": 64 if together == 64 else 32,
        "num_warps": 8 if together == 64 else 4,
        "num_stages": 2,
    }


def attend(
    queries: torch.Tensor,
    recent: torch.Tensor,
    oldest: torch.Tensor,
    entries: torch.Tensor | None,
    chosen: torch.Tensor | TopkIndices | None,
    sink: torch.Tensor,
    window: int,
    scale: float,
    shape: dict[str, int] | None = None,
) -> torch.Tensor:
    if isinstance(chosen, torch.Tensor):
        return reference.attend(queries, recent, oldest, entries, chosen, sink, window, scale)
    batch, length, heads, width = queries.shape
    queries, recent = queries.contiguous(), recent.contiguous()
    out = torch.empty_like(queries)
    some = entries is not None and chosen is not None
    far = entries.contiguous() if some else recent  # type: ignore[union-attr]
    counts = chosen.counts.contiguous() if isinstance(chosen, TopkIndices) else oldest
    listed = isinstance(chosen, TopkIndices) and chosen.numbers is not None
    numbers = chosen.numbers.contiguous() if listed else oldest  # type: ignore[union-attr]
    wide = queries.dtype is torch.float32
    shape = shape or shape_of(heads, wide)
    _attend[(-(-heads // shape["HEADS"]), batch * length)](
        queries,
        recent,
        oldest,
        far,
        counts,
        numbers,
        sink,
        out,
        length,
        recent.shape[1],
        window,
        far.shape[1],
        numbers.shape[-1],
        heads,
        scale * 1.4426950408889634,
        ENTRIES=some,
        LISTED=listed,
        WIDTH=width,
        PADDED=power_of_two(width, 16),
        WIDE=wide,
        **shape,
    )
    return out
