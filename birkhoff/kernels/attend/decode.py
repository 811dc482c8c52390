"""Attention of one new token per sequence on a GPU, over the state as it lies.

The keys of a token are its window's ring and its compressed entries (all finished ones, or those in a list), as one
range that is cut among programs: each takes sixteen heads and a share of the keys, normalises and rotates its queries
itself, and leaves an unnormalised sum with its largest logit and mass. `combine` adds the shares, lets the sink in, and
turns the result back. Scores and sums are float32, probabilities meet the values in the keys' dtype. On NVIDIA GPUs
`cuda/attend.cu` does the same for few rows, in the same buffers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from birkhoff.kernels.gpu import power_of_two
from birkhoff.kernels.rope.decode import turned, turned_heads


@triton.jit
def _attend(
    queries,
    query_stride,
    keys,
    ring,
    window,
    pages,
    table,
    table_stride,
    chosen,
    topk,
    slots,
    positions,
    cos,
    sin,
    sums,
    peaks,
    masses,
    heads,
    share,
    scale,
    eps,
    shares,
    RATIO: tl.constexpr,
    CHOSEN: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNING: tl.constexpr,
    KEYS: tl.constexpr,
    WIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    position = tl.load(positions + row).to(tl.int32)  # 64-bit division is slow
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, WIDTH)
    kept = keys.dtype.element_ty
    q = tl.load(
        queries + row * query_stride + h[:, None] * WIDTH + d[None, :], mask=(h < heads)[:, None], other=0.0
    )
    q = q.to(tl.float32)
    q = (q * (1.0 / tl.sqrt(tl.sum(q * q, axis=1) / WIDTH + eps))[:, None]).to(kept).to(tl.float32)
    at = row * 4 * (TURNING // 2)
    q = turned_heads(q, cos + at, sin + at, HEADS, WIDTH, TURNING).to(kept)
    entries = tl.full([], 0, tl.int32)
    if RATIO > 0:
        entries = (position + 1) // RATIO
        if CHOSEN:
            entries = tl.minimum(entries, topk)
    peak = tl.full([HEADS], -1e30, tl.float32)
    mass = tl.zeros([HEADS], tl.float32)
    total = tl.zeros([HEADS, WIDTH], tl.float32)
    newest = position % ring
    first = tl.program_id(2) * share
    for start in range(first, tl.minimum(first + share, ring + entries), KEYS):
        j = start + tl.arange(0, KEYS)
        age = newest - j
        age = tl.where(age < 0, age + ring, age)  # how long ago a row of the ring was written
        recent = (j < ring) & (age < window) & (age <= position)
        seen = recent
        source = keys + (slot * ring + j) * WIDTH
        if RATIO > 0:
            PER_PAGE: tl.constexpr = 128 // RATIO
            e = j - ring
            far = (e >= 0) & (e < entries)
            number = tl.maximum(e, 0)
            if CHOSEN:
                number = tl.load(chosen + row * topk + number, mask=far, other=0)
            page = tl.load(table + slot * table_stride + number // PER_PAGE, mask=far, other=0)
            source = tl.where(far, pages + (page * PER_PAGE + number % PER_PAGE) * WIDTH, source)
            seen = recent | far
        k = tl.load(source[:, None] + d[None, :], mask=seen[:, None], other=0.0)
        if WIDE:
            logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        else:
            logits = tl.dot(q, tl.trans(k)) * scale
        logits = tl.where(seen[None, :], logits, float("-inf"))
        higher = tl.maximum(peak, tl.max(logits, axis=1))
        old = tl.exp(peak - higher)
        p = tl.exp(logits - higher[:, None])
        mass = mass * old + tl.sum(p, axis=1)
        if WIDE:
            total = tl.dot(p, k, total * old[:, None], input_precision="ieee")
        else:
            total = tl.dot(p.to(kept), k, total * old[:, None])
        peak = higher
    place = (row * shares + tl.program_id(2)) * heads + h
    tl.store(sums + place[:, None] * WIDTH + d[None, :], total, mask=(h < heads)[:, None])
    tl.store(peaks + place, peak, mask=h < heads)
    tl.store(masses + place, mass, mask=h < heads)


@triton.jit
def _combine(
    sums,
    peaks,
    masses,
    sink,
    cos,
    sin,
    out,
    half,
    heads,
    shares,
    SHARES: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNING: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    s = tl.arange(0, SHARES)
    d = tl.arange(0, WIDTH)
    place = (row * shares + s) * heads + head
    peak = tl.load(peaks + place, mask=s < shares, other=-1e30)
    mass = tl.load(masses + place, mask=s < shares, other=0.0)
    drain = tl.load(sink + head)
    top = tl.maximum(tl.max(peak, axis=0), drain)
    weight = tl.exp(peak - top)
    whole = tl.sum(mass * weight, axis=0) + tl.exp(drain - top)
    part = tl.load(sums + place[:, None] * WIDTH + d[None, :], mask=(s < shares)[:, None], other=0.0)
    kept = out.dtype.element_ty
    mixed = (tl.sum(part * weight[:, None], axis=0) / whole).to(kept).to(tl.float32)
    at = row * 4 * (TURNING // 2)
    back = turned(mixed, cos + at, sin + at, WIDTH, TURNING, -1)
    tl.store(out + (row * heads + head) * WIDTH + d, back.to(kept))
    if HALF:
        tl.store(half + (row * heads + head) * WIDTH + d, back.to(tl.float16))


def heads_at_once(rows: int, heads: int) -> int:
    """Few rows want many programs; many rows want each key read once for all heads."""
    return 32 if rows >= 16 and heads >= 32 else 16


def split_keys(rows: int, heads: int, reach: int, processors: int = 132) -> tuple[int, int]:
    """Into how many shares the keys are cut, and how many keys a share has: about two programs a processor."""
    together = heads_at_once(rows, heads)
    blocks = rows * -(-heads // together)
    wanted = max(1, -(-2 * processors // blocks))
    least = 32 if together == 16 else 64
    each = -(-reach // wanted)
    share = max(least, -(-each // least) * least)
    return -(-reach // share), share


def attend(
    queries,
    keys,
    window,
    pages,
    ratio,
    table,
    chosen,
    slots,
    positions,
    cos,
    sin,
    sums,
    peaks,
    masses,
    sink,
    share,
    scale,
    eps,
    out,
    half,
    pdl=False,
) -> None:
    """queries [n, >= h * c] as projected; keys [slots, ring, c]; pages of entries or None; chosen [n, topk] or None;
    sums [n, shares, h, c], peaks and masses [n, shares, h] float32 -> out [n, h * c], and in float16 when asked."""
    n, shares, heads, width = sums.shape
    turning = 2 * cos.shape[-1]
    wide = keys.dtype is torch.float32
    together = heads_at_once(n, heads)
    few, listed = together == 16, chosen is not None
    _attend[(n, -(-heads // together), shares)](
        queries,
        queries.stride(0),
        keys,
        keys.shape[1],
        window,
        keys if pages is None else pages,
        table,
        table.stride(0),
        chosen if listed else slots,
        chosen.shape[1] if listed else 1,
        slots,
        positions,
        cos,
        sin,
        sums,
        peaks,
        masses,
        heads,
        share,
        scale,
        eps,
        shares,
        RATIO=ratio,
        CHOSEN=listed,
        HEADS=together,
        WIDTH=width,
        TURNING=turning,
        KEYS=16 if wide else 32 if few else 64,
        WIDE=wide,
        num_warps=4 if few else 8,
        num_stages=2,
    )
    _combine[(n, heads)](
        sums,
        peaks,
        masses,
        sink,
        cos,
        sin,
        out,
        out if half is None else half,
        heads,
        shares,
        SHARES=power_of_two(shares),
        WIDTH=width,
        TURNING=turning,
        HALF=half is not None,
        num_warps=4,
        PDL=pdl,
    )
