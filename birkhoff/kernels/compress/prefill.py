"""Compression and cache writes for the chunks of a prefill step on a GPU, all sequences in one launch.

`compress_blocks` runs one program per row, which returns unless its token completes a block. Rows of the block come
from the step itself or, before the chunk, from the ring of the slot. `store_rows` must run after everything that reads
the ring: a long chunk overwrites the rows that it continues.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from birkhoff.kernels.compress.decode import _rms_norm
from birkhoff.kernels.compress.reference import Rounding
from birkhoff.kernels.gpu import power_of_two
from birkhoff.kernels.quant.device import round_index, round_key
from birkhoff.kernels.rope.decode import rope
from birkhoff.kernels.row_index import RowIndex


@triton.jit(do_not_specialize=["raw_stride", "ring_size", "table_stride"])
def _compress(
    raw,
    raw_stride,
    ape,
    norm,
    ring,
    ring_size,
    pages,
    table,
    table_stride,
    slots,
    positions,
    starts,
    cos,
    sin,
    eps,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    ITEMS: tl.constexpr,
    ROUNDING: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row).to(tl.int32)
    if (position + 1) % RATIO == 0:
        slot = tl.load(slots + row)
        begin = tl.load(starts + row).to(tl.int32)
        dtype = pages.dtype.element_ty
        OVERLAP: tl.constexpr = 2 if RATIO == 4 else 1
        HALF: tl.constexpr = OVERLAP * WIDTH
        d = tl.arange(0, WIDTH)
        top = tl.full([WIDTH], float("-inf"), tl.float32)
        weight_sum = tl.zeros([WIDTH], tl.float32)
        total = tl.zeros([WIDTH], tl.float32)
        for first in range(0, OVERLAP * RATIO, ITEMS):
            item = first + tl.arange(0, ITEMS)
            at = position + 1 - OVERLAP * RATIO + item
            # with overlap: the first half of the channels of the older block, the second half of the newer
            offset = (item // RATIO) * WIDTH if OVERLAP == 2 else item * 0
            exists = (at >= 0)[:, None]
            here = exists & (at >= begin)[:, None]
            there = exists & (at < begin)[:, None]
            near = raw + (row - position + at) * raw_stride + offset
            far = ring + (slot * ring_size + (at + ring_size) % ring_size) * (2 * HALF) + offset
            bias = ape + (at + RATIO) % RATIO * HALF + offset
            value = tl.load(near[:, None] + d[None, :], mask=here, other=0.0).to(tl.float32)
            value += tl.load(far[:, None] + d[None, :], mask=there, other=0.0)
            gate = tl.load(near[:, None] + (HALF + d)[None, :], mask=here, other=0.0).to(tl.float32)
            gate += tl.load(bias[:, None] + d[None, :], mask=here, other=0.0)
            gate += tl.load(far[:, None] + (HALF + d)[None, :], mask=there, other=0.0)
            gate = tl.where(exists, gate, float("-inf"))
            peak = tl.maximum(top, tl.max(gate, axis=0))
            old, new = tl.exp(top - peak), tl.exp(gate - peak[None, :])
            weight_sum = weight_sum * old + tl.sum(new, axis=0)
            total = total * old + tl.sum(new * value, axis=0)
            top = peak
        at_phase = row * (ROPE_DIM // 2)
        entry = _rms_norm(total / weight_sum, norm, eps, WIDTH, dtype)
        entry = rope(entry, cos + at_phase, sin + at_phase, WIDTH, ROPE_DIM, 1)
        if ROUNDING == "key":
            entry = round_key(entry.to(dtype).to(tl.float32), WIDTH, ROPE_DIM)
        elif ROUNDING == "index":
            entry = round_index(entry.to(dtype).to(tl.float32), WIDTH, dtype)
        index = position // RATIO
        PER_PAGE: tl.constexpr = 128 // RATIO
        page = tl.load(table + slot * table_stride + index // PER_PAGE)
        tl.store(pages + (page * PER_PAGE + index % PER_PAGE) * WIDTH + d, entry.to(dtype))


def compress_blocks(
    raw: torch.Tensor,
    ape: torch.Tensor,
    norm: torch.Tensor,
    ring: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    rows: RowIndex,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    rounding: Rounding = "none",
) -> None:
    ratio, width = len(ape), pages.shape[2]
    assert raw.stride(1) == 1 and width == power_of_two(width)
    _compress[(len(raw),)](
        raw,
        raw.stride(0),
        ape,
        norm,
        ring,
        ring.shape[1],
        pages,
        table,
        table.stride(0),
        rows.slots,
        rows.positions,
        rows.starts,
        cos.contiguous(),
        sin.contiguous(),
        eps,
        RATIO=ratio,
        WIDTH=width,
        ROPE_DIM=2 * cos.shape[-1],
        ITEMS=8 if ratio == 4 else 16,
        ROUNDING=rounding,
        num_warps=4 if ratio != 128 else 8,
    )


@triton.jit
def _row(values, ape, position, columns, WIDTH: tl.constexpr, RATIO: tl.constexpr):
    """A row of a step as the ring keeps it: gates, the second half of a raw row, with their position bias."""
    row = tl.load(values + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    if RATIO > 0:
        HALF: tl.constexpr = WIDTH // 2
        bias = ape + position % RATIO * HALF + columns - HALF
        row += tl.load(bias, mask=(columns >= HALF) & (columns < WIDTH), other=0.0)
    return row


@triton.jit(do_not_specialize=["stride", "ring_size"])
def _store(
    values,
    stride,
    ape,
    ring,
    ring_size,
    slots,
    positions,
    stops,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    RATIO: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row).to(tl.int32)
    if position >= tl.load(stops + row) - ring_size:
        c = tl.arange(0, PADDED)
        kept = _row(values + row * stride, ape, position, c, WIDTH, RATIO)
        target = ring + (tl.load(slots + row) * ring_size + position % ring_size) * WIDTH
        tl.store(target + c, kept.to(ring.dtype.element_ty), mask=c < WIDTH)


def store_rows(
    values: torch.Tensor, ring: torch.Tensor, rows: RowIndex, ape: torch.Tensor | None = None
) -> None:
    width = values.shape[1]
    assert values.stride(1) == 1
    _store[(len(values),)](
        values,
        values.stride(0),
        values if ape is None else ape,
        ring,
        ring.shape[1],
        rows.slots,
        rows.positions,
        rows.stops,
        WIDTH=width,
        PADDED=power_of_two(width),
        RATIO=0 if ape is None else len(ape),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["stride", "ring_size"])
def _gather(
    values,
    stride,
    ape,
    ring,
    ring_size,
    slots,
    positions,
    sources,
    out,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    RATIO: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + i).to(tl.int32)
    source = tl.load(sources + i)
    c = tl.arange(0, PADDED)
    if source >= 0:
        kept = _row(values + source * stride, ape, position, c, WIDTH, RATIO)
        tl.store(out + i * WIDTH + c, kept.to(out.dtype.element_ty), mask=c < WIDTH)
    else:
        slot = tl.load(slots + i)
        row = tl.load(ring + (slot * ring_size + position % ring_size) * WIDTH + c, mask=c < WIDTH)
        tl.store(out + i * WIDTH + c, row, mask=c < WIDTH)


def gather_rows(
    values: torch.Tensor,
    ring: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    sources: torch.Tensor,
    ape: torch.Tensor | None = None,
) -> torch.Tensor:
    width = values.shape[1]
    out = torch.empty(len(slots), width, dtype=ring.dtype, device=ring.device)
    if len(slots):
        _gather[(len(slots),)](
            values,
            values.stride(0),
            values if ape is None else ape,
            ring,
            ring.shape[1],
            slots,
            positions,
            sources,
            out,
            WIDTH=width,
            PADDED=power_of_two(width),
            RATIO=0 if ape is None else len(ape),
            num_warps=4,
        )
    return out
