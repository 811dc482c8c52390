"""Compression and cache writes for the chunks of a prefill step on a GPU, all sequences in one launch.

`compress_blocks` runs one program per row, which returns unless its token completes a block. Rows of the block come
from the step itself or, before the chunk, from the ring of the slot. `store_rows` must run after everything that reads
the ring: a long chunk overwrites the rows that it continues.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from birkhoff.kernels.compress.decode import _rms_norm
from birkhoff.kernels.compress.reference import RawRows, RingRows
from birkhoff.kernels.gpu import power_of_two
from birkhoff.kernels.quant.device import round_index, round_key
from birkhoff.kernels.rope.decode import rope
from birkhoff.kernels.row_index import RowIndex


@triton.jit
def _compress_row(
    row,
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


@triton.jit(do_not_specialize=["raw_stride", "raw_stride2", "ring_size", "ring_size2", "table_stride"])
def _compress(
    raw,
    raw_stride,
    ape,
    norm,
    ring,
    ring_size,
    pages,
    raw2,
    raw_stride2,
    ape2,
    norm2,
    ring2,
    ring_size2,
    pages2,
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
    WIDTH2: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    ITEMS: tl.constexpr,
    ROUNDING: tl.constexpr,
    ROUNDING2: tl.constexpr,
):
    """One program per row and compressor."""
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        _compress_row(
            row, raw, raw_stride, ape, norm, ring, ring_size, pages, table, table_stride, slots, positions, starts,
            cos, sin, eps, RATIO, WIDTH, ROPE_DIM, ITEMS, ROUNDING,
        )  # fmt: skip
    else:
        _compress_row(
            row, raw2, raw_stride2, ape2, norm2, ring2, ring_size2, pages2, table, table_stride, slots, positions,
            starts, cos, sin, eps, RATIO, WIDTH2, ROPE_DIM, ITEMS, ROUNDING2,
        )  # fmt: skip


def compress_blocks(
    parts: Sequence[RawRows],
    table: torch.Tensor,
    rows: RowIndex,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> None:
    pointers: list[torch.Tensor | int] = []
    for raw, ape, norm, ring, pages, _ in (parts[0], parts[-1]):
        assert raw.stride(1) == 1 and pages.shape[2] == power_of_two(pages.shape[2])
        pointers += [raw, raw.stride(0), ape, norm, ring, ring.shape[1], pages]
    ratio = len(parts[0].ape)
    assert len(parts) <= 2 and ratio == len(parts[-1].ape)
    _compress[(len(parts[0].raw), len(parts))](
        *pointers,
        table,
        table.stride(0),
        rows.slots,
        rows.positions,
        rows.starts,
        cos.contiguous(),
        sin.contiguous(),
        eps,
        RATIO=ratio,
        WIDTH=parts[0].pages.shape[2],
        WIDTH2=parts[-1].pages.shape[2],
        ROPE_DIM=2 * cos.shape[-1],
        ITEMS=8 if ratio == 4 else 16,
        ROUNDING=parts[0].rounding,
        ROUNDING2=parts[-1].rounding,
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


@triton.jit
def _store_row(
    row,
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
    position = tl.load(positions + row).to(tl.int32)
    if position >= tl.load(stops + row) - ring_size:
        c = tl.arange(0, PADDED)
        kept = _row(values + row * stride, ape, position, c, WIDTH, RATIO)
        target = ring + (tl.load(slots + row) * ring_size + position % ring_size) * WIDTH
        tl.store(target + c, kept.to(ring.dtype.element_ty), mask=c < WIDTH)


@triton.jit(do_not_specialize=["stride", "stride2", "stride3", "ring_size", "ring_size2", "ring_size3"])
def _store(
    values,
    stride,
    ape,
    ring,
    ring_size,
    values2,
    stride2,
    ape2,
    ring2,
    ring_size2,
    values3,
    stride3,
    ape3,
    ring3,
    ring_size3,
    slots,
    positions,
    stops,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    RATIO: tl.constexpr,
    WIDTH2: tl.constexpr,
    PADDED2: tl.constexpr,
    RATIO2: tl.constexpr,
    WIDTH3: tl.constexpr,
    PADDED3: tl.constexpr,
    RATIO3: tl.constexpr,
):
    """One program per row and ring."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if part == 0:
        _store_row(
            row, values, stride, ape, ring, ring_size, slots, positions, stops,
            WIDTH, PADDED, RATIO,
        )  # fmt: skip
    elif part == 1:
        _store_row(
            row, values2, stride2, ape2, ring2, ring_size2, slots, positions, stops,
            WIDTH2, PADDED2, RATIO2,
        )  # fmt: skip
    else:
        _store_row(
            row, values3, stride3, ape3, ring3, ring_size3, slots, positions, stops,
            WIDTH3, PADDED3, RATIO3,
        )  # fmt: skip


def store_rows(parts: Sequence[RingRows], rows: RowIndex) -> None:
    pointers: list[torch.Tensor | int] = []
    sizes: dict[str, int] = {}
    for number, (values, ring, ape) in zip(("", "2", "3"), [*parts, parts[-1], parts[-1]]):
        assert values.stride(1) == 1
        pointers += [values, values.stride(0), values if ape is None else ape, ring, ring.shape[1]]
        width, ratio = values.shape[1], 0 if ape is None else len(ape)
        sizes |= {f"WIDTH{number}": width, f"PADDED{number}": power_of_two(width), f"RATIO{number}": ratio}
    assert len(parts) <= 3
    _store[(len(parts[0].values), len(parts))](
        *pointers, rows.slots, rows.positions, rows.stops, **sizes, num_warps=4
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
