"""Sparse products and the Adam step of training on a GPU.

The pairs of a code read whole rows of a table, so that every kernel is bounded by the memory bandwidth. One program
updates one row of a matrix: it sums the gradient in registers, applies Adam and, for unit rows, scales the row, which
is still in the cache. Programs start with the rows that have most pairs, which take longest."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from birkhoff.kernels.gpu import power_of_two
from birkhoff.kernels.sparse.reference import TINY, AdamStep, RowGradient, RowParameters

TILE = 2048  # columns at a time


@triton.jit
def _weighted_sum(starts, index, weights, table, group, d, mask, width, BLOCK: tl.constexpr):
    """The columns d of the weighted rows of one group, float32 [BLOCK]."""
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(tl.load(starts + group), tl.load(starts + group + 1)):
        row = tl.load(index + j).to(tl.int64)
        total += tl.load(weights + j) * tl.load(table + row * width + d, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _weighted_rows(starts, index, weights, table, out, width, BLOCK: tl.constexpr):
    group = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = d < width
    total = _weighted_sum(starts, index, weights, table, group, d, mask, width, BLOCK)
    tl.store(out + group * width + d, total, mask=mask)


@triton.jit
def _pair_dots(left, left_index, right, right_index, out, width, BLOCK: tl.constexpr):
    j = tl.program_id(0)
    row = tl.load(left_index + j).to(tl.int64) * width
    other = tl.load(right_index + j).to(tl.int64) * width
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        d = first + tl.arange(0, BLOCK)
        x = tl.load(left + row + d, mask=d < width, other=0.0).to(tl.float32)
        total += x * tl.load(right + other + d, mask=d < width, other=0.0).to(tl.float32)
    tl.store(out + j, tl.sum(total))


@triton.jit(do_not_specialize=["groups"])
def _segment_sums(starts, weights, out, groups, GROUPS: tl.constexpr):
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    valid = group < groups
    first = tl.load(starts + group, mask=valid, other=0)
    count = tl.load(starts + group + 1, mask=valid, other=0) - first
    total = tl.zeros([GROUPS], tl.float32)
    for j in range(tl.max(count)):
        total += tl.load(weights + first + j, mask=j < count, other=0.0)
    tl.store(out + group, total, mask=valid)


@triton.jit(do_not_specialize=["rate", "correction"])
def _adam_rows(
    weights,
    first_moment,
    second_moment,
    rounded,
    order,
    starts,
    index,
    pair_weights,
    table,
    along,
    extra_at,
    extra,
    width,
    rate,
    correction,
    beta1,
    beta2,
    tiny,
    ROUNDED: tl.constexpr,
    ALONG: tl.constexpr,
    EXTRA: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    f = tl.load(order + tl.program_id(0)).to(tl.int64)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        d = start + tl.arange(0, BLOCK)
        mask = d < width
        at = f * width + d
        w = tl.load(weights + at, mask=mask, other=0.0)
        m = tl.load(first_moment + at, mask=mask, other=0.0)
        v = tl.load(second_moment + at, mask=mask, other=0.0)
        g = _weighted_sum(starts, index, pair_weights, table, f, d, mask, width, BLOCK)
        if EXTRA:
            row = tl.load(extra_at + f).to(tl.int64)
            here = mask & (row >= 0)
            g += tl.load(extra + row * width + d, mask=here, other=0.0).to(tl.float32)
        if ALONG:
            g -= tl.load(along + f) * w
        m += (g - m) * (1 - beta1)
        v = v * beta2 + g * g * (1 - beta2)
        w -= rate * m / (tl.sqrt(v * correction) + tiny)
        tl.store(first_moment + at, m, mask=mask)
        tl.store(second_moment + at, v, mask=mask)
        tl.store(weights + at, w, mask=mask)
        if UNIT:
            squares += w * w
        elif ROUNDED:
            tl.store(rounded + at, w.to(tl.bfloat16), mask=mask)
    if UNIT:
        scale = 1.0 / tl.sqrt(tl.sum(squares))
        tl.debug_barrier()  # the stores above are visible to all threads of the program
        for start in range(0, width, BLOCK):
            d = start + tl.arange(0, BLOCK)
            mask = d < width
            at = f * width + d
            w = tl.load(weights + at, mask=mask, other=0.0) * scale
            tl.store(weights + at, w, mask=mask)
            if ROUNDED:
                tl.store(rounded + at, w.to(tl.bfloat16), mask=mask)


def weighted_rows(
    starts: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    groups, width = len(starts) - 1, table.shape[1]
    out = torch.empty(groups, width, device=table.device)
    block = min(TILE, power_of_two(width))
    if groups:
        _weighted_rows[(groups, -(-width // block))](
            starts, index, weights, table, out, width, BLOCK=block, num_warps=4
        )
    return out


def pair_dots(
    left: torch.Tensor, left_index: torch.Tensor, right: torch.Tensor, right_index: torch.Tensor
) -> torch.Tensor:
    out = torch.empty(len(left_index), device=left.device)
    width = left.shape[1]
    block = min(TILE, power_of_two(width))
    if len(out):
        _pair_dots[(len(out),)](left, left_index, right, right_index, out, width, BLOCK=block, num_warps=4)
    return out


def segment_sums(starts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    groups = len(starts) - 1
    out = torch.empty(groups, device=weights.device)
    block = min(32, power_of_two(groups))
    if groups:
        _segment_sums[(-(-groups // block),)](starts, weights, out, groups, GROUPS=block, num_warps=1)
    return out


def adam_rows(rows: RowParameters, gradient: RowGradient, step: AdamStep) -> None:
    weights = rows.weights
    count, width = weights.shape
    order = gradient.starts.diff().argsort(descending=True, stable=True)
    extra_at = extra = weights
    if gradient.extra is not None and gradient.extra_rows is not None:
        extra = gradient.extra
        extra_at = torch.full((count,), -1, device=weights.device)
        extra_at[gradient.extra_rows] = torch.arange(len(extra), device=weights.device)
    block = min(TILE, power_of_two(width))
    _adam_rows[(count,)](
        weights,
        rows.first,
        rows.second,
        weights if rows.rounded is None else rows.rounded,
        order,
        gradient.starts,
        gradient.index,
        gradient.weights,
        gradient.table,
        weights if gradient.along is None else gradient.along,
        extra_at,
        extra,
        width,
        step.scaled_rate,
        step.correction,
        *step.betas,
        TINY,
        ROUNDED=rows.rounded is not None,
        ALONG=gradient.along is not None,
        EXTRA=gradient.extra is not None,
        UNIT=rows.unit,
        BLOCK=block,
        num_warps=8 if block >= 2048 else 4,
    )
