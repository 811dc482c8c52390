"""Norms, rotations and cache writes between the QKV projection and the query projection of a decode step, in one
launch.

`norm_rope_store` takes the output of the QKV projection, `qkv [n, all projections of x]` float32. Per token, one
program normalises the query latent; one normalises the key, rotates it and stores it in the window's ring; and one
per compressor stores the token's values and gates in their ring and, if the token completes a block, pools the block,
normalises, rotates and appends the entry to its page. Positions, slots and page tables are read on the device.

A step that verifies draft tokens has several rows of one slot, at consecutive positions in adjacent rows. Programs of a
launch run in any order, so a block that is completed by one of them takes the values of the rows before it from `qkv`
and not from the ring. Rings are long enough (`lookback`) that no row overwrites what another row of the launch reads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from birkhoff.kernels.gpu import power_of_two
from birkhoff.kernels.quant.device import round_index, round_key
from birkhoff.kernels.rope.decode import rope


@triton.jit
def _rms_norm(x, weight, eps, WIDTH: tl.constexpr, dtype: tl.constexpr):
    """Weighted RMS norm of x [WIDTH], rounded before and after as in the reference."""
    x = x.to(dtype).to(tl.float32)
    rho = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    return (x * rho * tl.load(weight + tl.arange(0, WIDTH))).to(dtype).to(tl.float32)


@triton.jit
def _pool(
    raw,
    ape,
    norm,
    ring,
    pages,
    table,
    cos,
    sin,
    row,
    slots,
    positions,
    slot,
    position,
    raw_stride,
    ring_size,
    table_stride,
    eps,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    ITEMS: tl.constexpr,
    DRAFTS: tl.constexpr,
    ROUNDING: tl.constexpr,
    dtype: tl.constexpr,
):
    """One compressor's work for a token; `raw` points to its values and gates."""
    OVERLAP: tl.constexpr = 2 if RATIO == 4 else 1
    ROW: tl.constexpr = 2 * OVERLAP * WIDTH
    c = tl.arange(0, OVERLAP * WIDTH)
    ring_row = ring + (slot * ring_size + position % ring_size) * ROW
    tl.store(ring_row + c, tl.load(raw + c))
    gates = tl.load(raw + OVERLAP * WIDTH + c) + tl.load(ape + (position % RATIO) * OVERLAP * WIDTH + c)
    tl.store(ring_row + OVERLAP * WIDTH + c, gates)
    tl.debug_barrier()  # the row above is read below by other threads
    if (position + 1) % RATIO == 0:
        d = tl.arange(0, WIDTH)
        top = tl.full([WIDTH], float("-inf"), tl.float32)
        weight_sum = tl.zeros([WIDTH], tl.float32)
        total = tl.zeros([WIDTH], tl.float32)
        before = tl.full([], 0, tl.int32)  # rows directly above this one that hold the preceding tokens
        for i in tl.static_range(1, DRAFTS + 1):
            above = tl.maximum(row - i, 0)
            same = (tl.load(slots + above) == slot) & (
                tl.load(positions + above).to(tl.int32) == position - i
            )
            before += (same & (row >= i) & (before == i - 1)).to(tl.int32)
        for first in range(0, OVERLAP * RATIO, ITEMS):
            item = first + tl.arange(0, ITEMS)
            # with overlap: the first half of the older block first
            at = position + 1 - OVERLAP * RATIO + item
            half_offset = (item // RATIO) * WIDTH if OVERLAP == 2 else item * 0
            from_row = ring + (slot * ring_size + (at + ring_size) % ring_size) * ROW + half_offset
            valid = (at >= 0)[:, None]
            if DRAFTS > 0:
                age = position - at
                of_step = (age > 0) & (age <= before)
                from_row = tl.where(of_step, raw - age * raw_stride + half_offset, from_row)
            value = tl.load(from_row[:, None] + d[None, :], mask=valid, other=0.0)
            gate = tl.load(
                from_row[:, None] + (OVERLAP * WIDTH + d)[None, :], mask=valid, other=float("-inf")
            )
            if DRAFTS > 0:  # gates in the ring include the bias already
                bias = ape + ((at + RATIO * OVERLAP) % RATIO) * OVERLAP * WIDTH + half_offset
                gate += tl.load(bias[:, None] + d[None, :], mask=of_step[:, None], other=0.0)
            peak = tl.maximum(top, tl.max(gate, axis=0))
            old, new = tl.exp(top - peak), tl.exp(gate - peak[None, :])
            weight_sum = weight_sum * old + tl.sum(new, axis=0)
            total = total * old + tl.sum(new * value, axis=0)
            top = peak
        entry = rope(_rms_norm(total / weight_sum, norm, eps, WIDTH, dtype), cos, sin, WIDTH, ROPE_DIM, 1)
        if ROUNDING == "key":
            entry = round_key(entry.to(dtype).to(tl.float32), WIDTH, ROPE_DIM)
        elif ROUNDING == "index":
            entry = round_index(entry.to(dtype).to(tl.float32), WIDTH, dtype)
        entry_index = position // RATIO
        PER_PAGE: tl.constexpr = 128 // RATIO
        page = tl.load(table + slot * table_stride + entry_index // PER_PAGE)
        tl.store(pages + (page * PER_PAGE + entry_index % PER_PAGE) * WIDTH + d, entry.to(dtype))


@triton.jit
def _norm_rope_store(
    qkv,
    qkv_stride,
    q_norm,
    latent,
    latent_half,
    kv_norm,
    keys,
    key_ring,
    ape,
    norm,
    ring,
    pages,
    ape2,
    norm2,
    ring2,
    pages2,
    table,
    table_stride,
    slots,
    positions,
    cos,
    sin,
    eps,
    ring_size,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    RATIO: tl.constexpr,
    INDEX: tl.constexpr,
    FP16: tl.constexpr,
    ITEMS: tl.constexpr,
    DRAFTS: tl.constexpr,
    RELEASED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    task = tl.program_id(1)
    slot = tl.load(slots + row)
    position = tl.load(positions + row).to(tl.int32)  # 64-bit division is slow
    qkv += row * qkv_stride
    dtype = latent.dtype.element_ty
    if task == 0:
        k = tl.arange(0, RANK)
        out = _rms_norm(tl.load(qkv + k), q_norm, eps, RANK, dtype)
        tl.store(latent + row * RANK + k, out.to(dtype))
        if FP16:
            tl.store(latent_half + row * RANK + k, out.to(tl.float16))
    elif task == 1:
        d = tl.arange(0, WIDTH)
        key = _rms_norm(tl.load(qkv + RANK + d), kv_norm, eps, WIDTH, dtype)
        rotated = rope(
            key, cos + row * 4 * (ROPE_DIM // 2), sin + row * 4 * (ROPE_DIM // 2), WIDTH, ROPE_DIM, 1
        )
        if RELEASED:
            rotated = round_key(rotated.to(dtype).to(tl.float32), WIDTH, ROPE_DIM)
        tl.store(keys + (slot * key_ring + position % key_ring) * WIDTH + d, rotated.to(dtype))
    elif task == 2:
        # phases: 0 position of the token, 1 start of its block of 4, 2 start of its block of 128
        at = (row * 4 + (1 if RATIO == 4 else 2)) * (ROPE_DIM // 2)
        _pool(
            qkv + RANK + WIDTH,
            ape,
            norm,
            ring,
            pages,
            table,
            cos + at,
            sin + at,
            row,
            slots,
            positions,
            slot,
            position,
            qkv_stride,
            ring_size,
            table_stride,
            eps,
            RATIO,
            WIDTH,
            ROPE_DIM,
            ITEMS,
            DRAFTS,
            "key" if RELEASED else "none",
            dtype,
        )
    elif INDEX > 0:
        at = (row * 4 + 1) * (ROPE_DIM // 2)
        _pool(
            qkv + RANK + WIDTH + 4 * WIDTH,
            ape2,
            norm2,
            ring2,
            pages2,
            table,
            cos + at,
            sin + at,
            row,
            slots,
            positions,
            slot,
            position,
            qkv_stride,
            ring_size,
            table_stride,
            eps,
            RATIO,
            INDEX,
            ROPE_DIM,
            ITEMS,
            DRAFTS,
            "index" if RELEASED else "none",
            dtype,
        )


def norm_rope_store(
    qkv,
    q_norm,
    latent,
    latent_fp16,
    kv_norm,
    keys,
    entry,
    index,
    table,
    slots,
    positions,
    cos,
    sin,
    eps,
    pdl=False,
    drafts=0,
    released=False,
) -> None:
    """Norms, rotations and cache writes of n new tokens.

    keys [slots, ring, c]; `entry` and `index` are (ape, norm, ring, pages) of a compressor or None; table [slots,
    pages]; cos, sin [n, 4, r / 2]: at the position of a token, and at the first of the 4 and of the 128 tokens that
    it may complete. `released` rounds keys and entries as the released numerics do. Up to `drafts` rows of a slot may
    follow its first one, adjacent and at consecutive positions."""
    n, rank = latent.shape
    width = keys.shape[2]
    ratio = 0 if entry is None else entry[0].shape[0]
    placeholders = (q_norm, q_norm, keys, keys)
    _norm_rope_store[(n, 2 if entry is None else 3 if index is None else 4)](
        qkv,
        qkv.stride(0),
        q_norm,
        latent,
        latent if latent_fp16 is None else latent_fp16,
        kv_norm,
        keys,
        keys.shape[1],
        *(entry or placeholders),
        *(index or placeholders),
        table,
        table.stride(0),
        slots,
        positions,
        cos,
        sin,
        eps,
        1 if entry is None else entry[2].shape[1],
        RANK=rank,
        WIDTH=width,
        ROPE_DIM=2 * cos.shape[-1],
        RATIO=ratio or 4,
        INDEX=0 if index is None else index[3].shape[2],
        FP16=latent_fp16 is not None,
        ITEMS=8 if ratio == 4 else 16,
        num_warps=4 if ratio != 128 else 8,
        DRAFTS=0 if entry is None else min(drafts, n - 1),
        RELEASED=released,
        PDL=pdl,
    )
    assert rank == power_of_two(rank) and width == power_of_two(width)
