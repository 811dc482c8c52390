"""Attention of prompts on Hopper for 64 heads of 512 channels in bfloat16, with the contract of `prefill._attend`.

Its products and copies are placed by hand in Gluon, Triton's lower-level language. A tile of keys and the queries fill
three quarters of the shared memory, so that one program runs on a multiprocessor, and what it waits for is lost. It
therefore handles many rows: the copy of a tile starts as soon as the scores of the tile before it are computed, and
with the last tile of a row the queries and the first tile of the next row. The result goes through the tile that is
free by then, so that rows are written whole and the inverse rotation finds pairs of channels together.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # renamed in Triton 3.7


@gluon.jit
def _key_count(positions, counts, row, window, ENTRIES: gl.constexpr):
    total = gl.minimum(gl.load(positions + row).to(gl.int32) + 1, window)
    if ENTRIES:
        total += gl.load(counts + row)
    return total


@gluon.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["positions", "counts"])
def _attend_hopper(
    queries,
    keys,
    offsets,
    listed,
    positions,
    counts,
    sink,
    out,
    window,
    rows,
    scale,
    cos,
    sin,
    PAIRS: gl.constexpr,
    ENTRIES: gl.constexpr,
    HEADS: gl.constexpr,
    WIDTH: gl.constexpr,
    KEYS: gl.constexpr,
):
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    TURN: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [8, 1], [1, 0])
    PAIR: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [8, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, KEYS // 2, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, WIDTH // 2, 16])
    ROTATED: gl.constexpr = WIDTH - 2 * PAIRS
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [HEADS, WIDTH], SHARED)
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, WIDTH], SHARED)
    weights = gl.allocate_shared_memory(gl.bfloat16, [HEADS, KEYS], SHARED)
    d = gl.arange(0, WIDTH, gl.SliceLayout(0, COPY))
    i = gl.arange(0, KEYS, gl.SliceLayout(1, COPY))
    h = gl.arange(0, HEADS, gl.SliceLayout(1, COPY))
    column = gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
    pair = gl.arange(0, PAIRS, gl.SliceLayout(0, PAIR))
    pair_head = gl.arange(0, HEADS, gl.SliceLayout(1, TURN))
    channel = gl.arange(0, 2 * PAIRS, gl.SliceLayout(0, TURN))
    zeros = gl.zeros([HEADS, KEYS], gl.float32, SCORES)
    sink_logit = gl.load(sink + gl.arange(0, HEADS, gl.SliceLayout(1, SCORES))) * 1.4426950408889634
    step = gl.num_programs(0)
    first = gl.program_id(0)
    place = gl.multiple_of(gl.load(offsets + first.to(gl.int64) * listed + i), 8)
    at_head = (first.to(gl.int64) * HEADS + h) * WIDTH
    async_copy.async_copy_global_to_shared(q_tile, queries + at_head[:, None] + d[None, :])
    async_copy.async_copy_global_to_shared(k_tiles.index(0), keys + place[:, None] + d[None, :])
    async_copy.commit_group()
    place = gl.multiple_of(gl.load(offsets + first.to(gl.int64) * listed + KEYS + i), 8)
    total = _key_count(positions, counts, first, window, ENTRIES)
    buffer = 0
    for turn in range((rows - first + step - 1) // step):
        row = first + turn * step
        following = gl.minimum(row + step, rows - 1)
        own = offsets + row.to(gl.int64) * listed + i
        own_next = offsets + following.to(gl.int64) * listed + i
        tiles = (total + KEYS - 1) // KEYS
        next_total = _key_count(positions, counts, following, window, ENTRIES)
        c = gl.load(cos + row.to(gl.int64) * PAIRS + pair)[None, :]
        s = gl.load(sin + row.to(gl.int64) * PAIRS + pair)[None, :]
        top = gl.full([HEADS], -1e30, gl.float32, gl.SliceLayout(1, SCORES))
        sums = gl.zeros([HEADS, KEYS], gl.float32, SCORES)
        acc = warpgroup_mma_init(gl.zeros([HEADS, WIDTH], gl.float32, VALUES))
        for t in range(tiles):
            k_tile = k_tiles.index(buffer)
            async_copy.wait_group(0)
            fence_async_shared()  # matrix instructions read what the copies wrote
            _barrier()
            logits = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
            logits, result = warpgroup_mma_wait(0, deps=(logits, acc))
            _barrier()  # all warps have read the tile before this one, and of the last tile the queries
            if t + 1 == tiles:
                if row + step < rows:
                    if t == 0:  # offsets were read for a second tile of this row
                        place = gl.multiple_of(gl.load(own_next), 8)
                    at_head = (following.to(gl.int64) * HEADS + h) * WIDTH
                    async_copy.async_copy_global_to_shared(q_tile, queries + at_head[:, None] + d[None, :])
                    async_copy.async_copy_global_to_shared(
                        k_tiles.index(1 - buffer), keys + place[:, None] + d[None, :]
                    )
                place = gl.multiple_of(gl.load(own_next + KEYS), 8)
            else:
                async_copy.async_copy_global_to_shared(
                    k_tiles.index(1 - buffer), keys + place[:, None] + d[None, :]
                )
                place = gl.multiple_of(gl.load(gl.where(t + 2 < tiles, own + (t + 2) * KEYS, own_next)), 8)
            async_copy.commit_group()
            if (t + 1) * KEYS > total:
                logits = gl.where((t * KEYS + column < total)[None, :], logits, float("-inf"))
            new_top = gl.maximum(top, gl.max(logits, axis=1) * scale)
            rescale = gl.exp2(top - new_top)
            p = gl.exp2(logits * scale - new_top[:, None])
            sums = sums * rescale[:, None] + p
            top = new_top
            factor = gl.convert_layout(rescale, gl.SliceLayout(1, VALUES))
            weights.store(p.to(gl.bfloat16))
            fence_async_shared()
            _barrier()
            acc = warpgroup_mma(weights, k_tile, result * factor[:, None], is_async=True)
            buffer = 1 - buffer
        most = gl.maximum(top, sink_logit)
        weight = gl.exp2(top - most)
        share = weight / (gl.sum(sums, axis=1) * weight + gl.exp2(sink_logit - most))
        share = gl.convert_layout(share, gl.SliceLayout(1, VALUES))
        result = warpgroup_mma_wait(0, deps=(acc,))
        _barrier()  # all warps have read the last tile, which makes room for the result
        staged = k_tiles.index(1 - buffer)
        staged.store((result * share[:, None]).to(gl.bfloat16))
        _barrier()
        at_row = out + ((row.to(gl.int64) * HEADS + h) * WIDTH)[:, None] + d[None, :]
        gl.store(at_row, staged.load(COPY), mask=(d < ROTATED)[None, :])
        turned = staged.slice(ROTATED, 2 * PAIRS, dim=1).load(TURN).to(gl.float32)
        even, odd = gl.split(gl.reshape(turned, [HEADS, PAIRS, 2]))
        even = gl.convert_layout(even, PAIR)
        odd = gl.convert_layout(odd, PAIR)
        turned = gl.reshape(gl.join(even * c + odd * s, odd * c - even * s), [HEADS, 2 * PAIRS])
        at_pair = ((row.to(gl.int64) * HEADS + pair_head) * WIDTH + ROTATED)[:, None] + channel[None, :]
        gl.store(out + at_pair, gl.convert_layout(turned, TURN).to(gl.bfloat16))
        total = next_total


def attend_rows(
    queries: torch.Tensor,
    keys: torch.Tensor,
    offsets: torch.Tensor,
    listed: int,
    positions: torch.Tensor,
    counts: torch.Tensor,
    sink: torch.Tensor,
    out: torch.Tensor,
    window: int,
    scale: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    entries: bool,
) -> None:
    """queries [n, 64, 512], offsets [n, listed] of `_list_keys` -> out; `scale` includes log2(e)."""
    rows, heads, width = queries.shape
    programs = min(torch.cuda.get_device_properties(queries.device).multi_processor_count, rows)
    _attend_hopper[(programs,)](
        queries,
        keys,
        offsets,
        listed,
        positions,
        counts,
        sink,
        out,
        window,
        rows,
        scale,
        cos,
        sin,
        PAIRS=cos.shape[-1],
        ENTRIES=entries,
        HEADS=heads,
        WIDTH=width,
        KEYS=64,
        num_warps=8,
    )
