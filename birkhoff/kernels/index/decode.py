"""The indexer of a decode step on a GPU: scores of all finished entries, then the indices of the `topk` highest.

`score` scores every finished entry of every sequence; `topk_entries` selects the `topk` highest (ties go to the lower
index) and writes their indices in ascending order. A sequence with at most `topk` entries keeps all of them without
scoring. The number of entries of a sequence is read on the device; a CUDA graph fixes only the size of the score
buffer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from birkhoff.kernels.gpu import power_of_two
from birkhoff.kernels.quant.device import fp4_groups, hadamard_signs
from birkhoff.kernels.rope.decode import rope_heads

RATIO = 4
PER_PAGE = 128 // RATIO
MAX_TILE = 1 << 15  # scores of a row that are selected from registers
FORBID, FORCE = tl.constexpr(2), tl.constexpr(3)  # kinds of rules


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
    max_entries,
    topk,
    scale,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    ENTRIES: tl.constexpr,
    FP32: tl.constexpr,
    RELEASED: tl.constexpr,
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
        key_type = pages.dtype.element_ty
        q = tl.load(queries + row * query_stride + h[:, None] * WIDTH + d[None, :]).to(tl.float32)
        at = row * 4 * (ROPE_DIM // 2)
        q = rope_heads(q, cos + at, sin + at, HEADS, WIDTH, ROPE_DIM).to(key_type)
        if RELEASED:
            signs = hadamard_signs(d[:, None] & d[None, :]).to(key_type)
            if FP32:
                turned = tl.dot(q, signs, input_precision="ieee")
            else:
                turned = tl.dot(q, signs)
            turned = (turned * (WIDTH**-0.5)).to(key_type).to(tl.float32)
            SIZE: tl.constexpr = 32 if WIDTH >= 32 else WIDTH
            turned = fp4_groups(tl.reshape(turned, [HEADS * (WIDTH // SIZE), SIZE]))
            q = tl.reshape(turned, [HEADS, WIDTH]).to(key_type)
        e = first + tl.arange(0, ENTRIES)
        page = tl.load(table + slot * table_stride + e // 32, mask=e < count, other=0)
        key = (page * 32 + e % 32) * WIDTH
        k = tl.load(pages + key[None, :] + d[:, None], mask=(e < count)[None, :], other=0.0)
        if FP32:
            match = tl.dot(q, k, input_precision="ieee")
        else:
            match = tl.dot(q, k)
        w = tl.load(weights + row * weight_stride + h).to(tl.float32) * scale
        tl.store(
            scores + row * max_entries + e,
            tl.sum(tl.maximum(match, 0.0) * w[:, None], axis=0),
            mask=e < count,
        )


@triton.jit
def _force_and_forbid(
    scores,
    max_entries,
    rule_counts,
    rules,
    RULES: tl.constexpr,
    RULE_WIDTH: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(rule_counts + row)
    if count > 0:
        e = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
        forced = tl.zeros([ENTRIES], tl.int32)
        forbidden = tl.zeros([ENTRIES], tl.int32)
        for r in range(count):
            rule = rules + (row * RULES + r) * RULE_WIDTH
            kind = tl.load(rule)
            inside = ((e >= tl.load(rule + 1)) & (e < tl.load(rule + 2))).to(tl.int32)
            forced |= tl.where(kind == FORCE, inside, 0)
            forbidden |= tl.where(kind == FORBID, inside, 0)
        at = scores + row * max_entries + e
        value = tl.where(forbidden > 0, float("-inf"), float("inf"))
        tl.store(at, value, mask=(e < max_entries) & ((forced | forbidden) > 0))


@triton.jit
def _sortable_bits(score):
    """int32 with the order of the float."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _score_of(key):
    """The float of `_sortable_bits`."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high, turn):
    """A key after `low` and at most `high`: halfway between their scores at first, which separates few of them soon,
    later halfway between their bits, which comes to an end."""
    low_score = tl.maximum(_score_of(low), -3e38)  # forbidden and forced entries have infinite scores
    high_score = tl.minimum(_score_of(high), 3e38)
    score = 0.5 * low_score + 0.5 * high_score
    key = _sortable_bits(score)
    return tl.where((turn < 24) & (key > low) & (key <= high), key, (low | high) - ((low ^ high) >> 1))


@triton.jit
def _keys(scores, first, count, BLOCK: tl.constexpr):
    """Entries first.. and their sortable bits (-0 equals 0); the lowest value after the last entry."""
    e = first + tl.arange(0, BLOCK)
    key = _sortable_bits(tl.load(scores + e, mask=e < count, other=0.0) + 0.0)
    return e, tl.where(e < count, key, -2147483648)


@triton.jit
def _count_at_least(scores, candidate, count, BLOCK: tl.constexpr):
    """How many entries are at least `candidate`."""
    count_reached = tl.full([], 0, tl.int32)
    for first in range(0, count, BLOCK):
        _, key = _keys(scores, first, count, BLOCK)
        count_reached += tl.sum((key >= candidate).to(tl.int32), axis=0)
    return count_reached


@triton.jit(do_not_specialize=["max_entries"], do_not_specialize_on_alignment=["positions"])
def _topk_entries(
    scores,
    positions,
    topk_indices,
    max_entries,
    topk,
    BLOCK: tl.constexpr,
    TOPK: tl.constexpr,
    TILE: tl.constexpr,
    COUNTED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(positions + row).to(tl.int32)
    if not COUNTED:
        count = (count + 1) // 4
    out = topk_indices + row * topk
    scores += row * max_entries
    if count <= topk:
        e = tl.arange(0, TOPK)
        tl.store(out + e, e, mask=e < count)
    else:
        # Bisection: a value that exactly `topk` entries reach, or the largest that more reach because some are equal.
        if TILE > 0:  # all scores fit one tile
            numbers, row_keys = _keys(scores, 0, count, TILE)
            low = tl.min(tl.where(numbers < count, row_keys, 2147483647), axis=0)
            high = tl.max(row_keys, axis=0)
        else:
            low = tl.full([], 2147483647, tl.int32)
            high = tl.full([], -2147483648, tl.int32)
            for first in range(0, count, BLOCK):
                part, part_keys = _keys(scores, first, count, BLOCK)
                low = tl.minimum(low, tl.min(tl.where(part < count, part_keys, 2147483647), axis=0))
                high = tl.maximum(high, tl.max(part_keys, axis=0))
        reached = count
        turn = tl.full([], 0, tl.int32)
        while (low < high) & (reached != topk):
            middle = _middle(low, high, turn)
            if TILE > 0:
                enough = tl.sum((row_keys >= middle).to(tl.int32), axis=0)
            else:
                enough = _count_at_least(scores, middle, count, BLOCK)
            low = tl.where(enough >= topk, middle, low)
            high = tl.where(enough >= topk, high, middle - 1)
            reached = tl.where(enough >= topk, enough, reached)
            turn += 1
        if TILE > 0:
            above = tl.sum((row_keys > low).to(tl.int32), axis=0)
        else:
            above = _count_at_least(scores, low + 1, count, BLOCK)
        ties_kept = topk - above  # entries equal to the threshold that are selected
        stored = tl.full([], 0, tl.int32)
        tied = tl.full([], 0, tl.int32)
        for first in range(0, count, BLOCK):
            entry, key = _keys(scores, first, count, BLOCK)
            kinds = (key > low).to(tl.int32) + ((key == low).to(tl.int32) << 16)  # counted by one scan
            until = tl.cumsum(kinds, axis=0)
            rank = tied + (until >> 16)
            place = stored + (until & 0xFFFF) + tl.minimum(rank, ties_kept) - 1
            tl.store(out + place, entry, mask=(key > low) | ((key == low) & (rank <= ties_kept)))
            total = tl.sum(kinds, axis=0)
            stored += total & 0xFFFF
            tied += total >> 16


def score(
    queries, weights, pages, table, slots, positions, cos, sin, scores, topk, scale, pdl=False, released=False
) -> None:
    """queries [n, h * c] before rotation, weights [n, h], pages of index keys -> scores [n, max_entries] float32.
    `released` rounds the queries as the released numerics do."""
    n, max_entries = scores.shape
    width, heads = pages.shape[2], weights.shape[1]
    assert heads == power_of_two(heads, 16) and width == power_of_two(width, 16)
    _score[(n, -(-max_entries // 64))](
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
        max_entries,
        topk,
        scale,
        HEADS=heads,
        WIDTH=width,
        ROPE_DIM=2 * cos.shape[-1],
        ENTRIES=64,
        FP32=pages.dtype is torch.float32,
        RELEASED=released,
        num_warps=4,
        PDL=pdl,
    )


def force_and_forbid(scores, rules) -> None:
    """Set the scores [n, max_entries] of entries that rules (as of `attend`) force or forbid."""
    counts, table, _ = rules
    n, max_entries = scores.shape
    _force_and_forbid[(n, -(-max_entries // 256))](
        scores,
        max_entries,
        counts,
        table,
        RULES=table.shape[1],
        RULE_WIDTH=table.shape[2],
        ENTRIES=256,
        num_warps=4,
    )


def topk_entries(scores, positions, topk_indices, counted: bool = False) -> None:
    """scores [n, max_entries] -> topk_indices [n, topk], ascending; all entries if there are at most `topk`. With
    `counted`, `positions` are the numbers of visible entries instead."""
    n, max_entries = scores.shape
    topk = topk_indices.shape[1]
    tile = power_of_two(max_entries, 64)
    _topk_entries[(n,)](
        scores,
        positions,
        topk_indices,
        max_entries,
        topk,
        BLOCK=min(8192 if tile == MAX_TILE else 4096, tile),
        TOPK=power_of_two(topk),
        TILE=tile if tile <= MAX_TILE else 0,
        COUNTED=counted,
        num_warps=8 if tile > 1024 else 4,
    )
