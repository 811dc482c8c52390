"""The indexer of a decoding step on a GPU: scores of all finished entries, then the best few, as a list.

`score` gives every finished entry of every sequence a number; `topk_entries` keeps the `topk` best (the lowest entry among
equals) and writes their numbers in ascending order. A sequence with no more than `topk` entries keeps all of them, and
its scores are not even computed. How many entries a sequence has is data; the room for scores is what a graph fixes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from birkhoff.kernels.gpu import power_of_two
from birkhoff.kernels.rope.decode import turned_heads

RATIO = 4
PER_PAGE = 128 // RATIO


@triton.jit
def _score(
    queries,
    query_stride,
    weights,
    weight_stride,
    pages,
    table,
    table_stride,
    slots,
    positions,
    cos,
    sin,
    scores,
    room,
    topk,
    scale,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNING: tl.constexpr,
    ENTRIES: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    count = ((tl.load(positions + row) + 1) // 4).to(tl.int32)
    first = tl.program_id(1) * ENTRIES
    if (count > topk) & (first < count):
        slot = tl.load(slots + row)
        h = tl.arange(0, HEADS)
        d = tl.arange(0, WIDTH)
        kept = pages.dtype.element_ty
        q = tl.load(queries + row * query_stride + h[:, None] * WIDTH + d[None, :]).to(tl.float32)
        at = row * 4 * (TURNING // 2)
        q = turned_heads(q, cos + at, sin + at, HEADS, WIDTH, TURNING).to(kept)
        e = first + tl.arange(0, ENTRIES)
        page = tl.load(table + slot * table_stride + e // 32, mask=e < count, other=0)
        key = (page * 32 + e % 32) * WIDTH
        k = tl.load(pages + key[None, :] + d[:, None], mask=(e < count)[None, :], other=0.0)
        if WIDE:
            match = tl.dot(q, k, input_precision="ieee")
        else:
            match = tl.dot(q, k)
        w = tl.load(weights + row * weight_stride + h).to(tl.float32) * scale
        tl.store(scores + row * room + e, tl.sum(tl.maximum(match, 0.0) * w[:, None], axis=0), mask=e < count)


@triton.jit
def _ordered(score):
    """A float's place among floats, as an integer."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _keys(scores, first, count, BLOCK: tl.constexpr):
    """Entries first.. and their places among floats; below every number beyond the last entry."""
    e = first + tl.arange(0, BLOCK)
    key = _ordered(tl.load(scores + e, mask=e < count, other=0.0))
    return e, tl.where(e < count, key, -2147483648)


@triton.jit
def _reach(scores, tried, count, BLOCK: tl.constexpr):
    """How many entries reach `tried`."""
    reached = tl.full([], 0, tl.int32)
    for first in range(0, count, BLOCK):
        _, key = _keys(scores, first, count, BLOCK)
        reached += tl.sum((key >= tried).to(tl.int32), axis=0)
    return reached


@triton.jit
def _topk_entries(
    scores, positions, chosen, room, topk, BLOCK: tl.constexpr, TOPK: tl.constexpr, WHOLE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    count = ((tl.load(positions + row) + 1) // 4).to(tl.int32)
    out = chosen + row * topk
    scores += row * room
    if count <= topk:
        e = tl.arange(0, TOPK)
        tl.store(out + e, e, mask=e < count)
    else:
        # The value of the last place, bit by bit from the top: the largest that `topk` entries reach.
        place = tl.full([], -2147483648, tl.int32)
        if WHOLE:  # all scores fit one tile
            _, key = _keys(scores, 0, count, BLOCK)
            place = tl.where(tl.sum((key >= 0).to(tl.int32), axis=0) >= topk, 0, place)
            for bit in tl.static_range(31):
                tried = place + (1 << (30 - bit))
                place = tl.where(tl.sum((key >= tried).to(tl.int32), axis=0) >= topk, tried, place)
        else:
            place = tl.where(_reach(scores, 0, count, BLOCK) >= topk, 0, place)
            for bit in range(31):
                tried = place + (1 << (30 - bit))
                place = tl.where(_reach(scores, tried, count, BLOCK) >= topk, tried, place)
        places = topk - _reach(scores, place + 1, count, BLOCK)  # for those that tie with the last
        taken = tl.full([], 0, tl.int32)
        tied = tl.full([], 0, tl.int32)
        for first in range(0, count, BLOCK):
            e, key = _keys(scores, first, count, BLOCK)
            ties = (key == place).to(tl.int32)
            rank = tied + tl.cumsum(ties, axis=0)
            kept = ((key > place) | ((ties > 0) & (rank <= places))).to(tl.int32)
            tl.store(out + taken + tl.cumsum(kept, axis=0) - 1, e, mask=kept > 0)
            tied += tl.sum(ties, axis=0)
            taken += tl.sum(kept, axis=0)


def score(queries, weights, pages, table, slots, positions, cos, sin, scores, topk, scale, pdl=False) -> None:
    """queries [n, h * c] before rotation, weights [n, h], pages of index keys -> scores [n, room] float32."""
    n, room = scores.shape
    width, heads = pages.shape[2], weights.shape[1]
    assert heads == power_of_two(heads, 16) and width == power_of_two(width, 16)
    _score[(n, -(-room // 64))](
        queries,
        queries.stride(0),
        weights,
        weights.stride(0),
        pages,
        table,
        table.stride(0),
        slots,
        positions,
        cos,
        sin,
        scores,
        room,
        topk,
        scale,
        HEADS=heads,
        WIDTH=width,
        TURNING=2 * cos.shape[-1],
        ENTRIES=64,
        WIDE=pages.dtype is torch.float32,
        num_warps=4,
        PDL=pdl,
    )


def topk_entries(scores, positions, chosen) -> None:
    """scores [n, room] -> chosen [n, topk] entry numbers, ascending; of fewer entries all of them."""
    n, room = scores.shape
    topk = chosen.shape[1]
    block = min(4096, power_of_two(room, 64))
    _topk_entries[(n,)](
        scores,
        positions,
        chosen,
        room,
        topk,
        BLOCK=block,
        TOPK=power_of_two(topk),
        WHOLE=room <= block,
        num_warps=8 if room > 1024 else 4,
    )
