"""Hyper-connections of the many rows of a prompt on a GPU: twins of `read` and `write`, bound by memory bandwidth.

Decode needs few launches (`decode.py`); thousands of tokens need launches at full bandwidth. Here the 24 dot
products of a read are a tensor-core product: 128 tokens times all of `fn`, split along the 4 * d columns into
`SPLITS` parts summed in a fixed order, with the sum of squares of the same tile. 16-bit streams are exact operands;
the float32 `fn` is split into two 16-bit tensors (high + low, prepared once so that tiles are plain copies) and
multiplied in two products with float32 sums: relative error 2^-17 in bfloat16, 2^-22 in float16; a single TF32
product would have 2^-11. float32 streams are multiplied in float32. `_coefficients_and_collapse` then runs Sinkhorn
with one token per thread and reads the streams once more. Programs start with the rows written last by the preceding
launch, which are still in L2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from birkhoff.kernels.gpu import HOPPER_SHARED, power_of_two, shared_memory
from birkhoff.kernels.mhc import decode
from birkhoff.kernels.mhc.decode import _normalise4, _sigmoid, softmax4
from birkhoff.kernels.norm.prefill import code_order, empty_rounded, norm_input
from birkhoff.kernels.quant.device import rounds_to_codes, store_codes

SPLITS = 8  # parts of a row for hundreds of rows
LONG_SPLITS = 2  # for thousands of rows, which fill a GPU by themselves
TILE = {"TOKENS": 128, "BLOCK": 128, "num_warps": 8, "num_stages": 4}
COUNT, PADDED = decode.COUNT, decode.padded(decode.COUNT)
MIN_ROWS = 256  # rows from which these kernels are used


@triton.jit
def _split_hi_lo(fn, high, low, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(fn + i, mask=i < count, other=0.0)
    high_part = value.to(high.dtype.element_ty)
    tl.store(high + i, high_part, mask=i < count)
    tl.store(low + i, (value - high_part.to(tl.float32)).to(high.dtype.element_ty), mask=i < count)


@triton.jit(do_not_specialize=["rows"])
def _mix(
    streams,
    high,
    low,
    parts,
    rows,
    columns,
    split_columns,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    FP32: tl.constexpr,
):
    t = (tl.num_programs(1) - 1 - tl.program_id(1)) * TOKENS + tl.arange(
        0, TOKENS
    )  # reverse order: rows written last are in L2
    split = tl.program_id(0)
    m = tl.arange(0, PADDED)
    at = streams + t.to(tl.int64)[:, None] * columns
    dots = tl.zeros([TOKENS, PADDED], tl.float32)
    squares = tl.zeros([TOKENS, BLOCK], tl.float32)
    for start in range(
        split * split_columns, tl.minimum(split * split_columns + split_columns, columns), BLOCK
    ):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(at + k[None, :], mask=(t < rows)[:, None] & (k < columns)[None, :], other=0.0)
        weight_at = m[None, :] * columns + k[:, None]
        valid = (m < COUNT)[None, :] & (k < columns)[:, None]
        high_part = tl.load(high + weight_at, mask=valid, other=0.0)
        if FP32:
            dots = tl.dot(x, high_part, dots, input_precision="ieee")
        else:  # the explicit add completes the products here: x must not be kept while the next tiles arrive
            dots += tl.dot(x, tl.load(low + weight_at, mask=valid, other=0.0), tl.dot(x, high_part))
        fp32 = x.to(tl.float32)
        squares += fp32 * fp32
    dots = tl.where((m == COUNT)[None, :], tl.sum(squares, axis=1)[:, None], dots)
    into = parts + (t[:, None] * SPLITS + split) * PADDED + m[None, :]
    tl.store(into, dots, mask=(t < rows)[:, None])


@triton.jit
def _logit(
    parts, t, valid_token, rho, gain, base, J: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr
):
    """Product J of every token: parts summed in order, scaled, plus base."""
    total = tl.zeros_like(rho)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + (t * SPLITS + split) * PADDED + J, mask=valid_token, other=0.0)
    return total * rho * gain + tl.load(base + J)


@triton.jit
def _mixer_row(
    parts,
    t,
    valid_token,
    rho,
    gain,
    base,
    eps,
    FROM: tl.constexpr,
    PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Row FROM of the mixer before Sinkhorn."""
    a = _logit(parts, t, valid_token, rho, gain, base, 8 + 4 * FROM, PADDED, SPLITS)
    b = _logit(parts, t, valid_token, rho, gain, base, 9 + 4 * FROM, PADDED, SPLITS)
    c = _logit(parts, t, valid_token, rho, gain, base, 10 + 4 * FROM, PADDED, SPLITS)
    d = _logit(parts, t, valid_token, rho, gain, base, 11 + 4 * FROM, PADDED, SPLITS)
    return softmax4(a, b, c, d, eps)


@triton.jit
def _rho(
    parts, t, valid_token, columns, rms_eps, COUNT: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr
):
    """Reciprocal RMS of the streams of every token."""
    squares = tl.load(parts + t * SPLITS * PADDED + COUNT, mask=valid_token, other=1.0)
    for split in tl.static_range(1, SPLITS):
        squares += tl.load(parts + (t * SPLITS + split) * PADDED + COUNT, mask=valid_token, other=1.0)
    return 1.0 / tl.sqrt(squares / columns + rms_eps)


@triton.jit
def _write_coefficients(
    parts,
    t,
    valid_token,
    columns,
    base,
    scale,
    post,
    mix,
    iters,
    eps,
    rms_eps,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Coefficients of the write, post and mix: Sinkhorn with one token per thread."""
    rho = _rho(parts, t, valid_token, columns, rms_eps, COUNT, PADDED, SPLITS)
    gain = tl.load(scale + 1)
    for k in tl.static_range(4):
        z = _logit(parts, t, valid_token, rho, gain, base, 4 + k, PADDED, SPLITS)
        tl.store(post + t * 4 + k, 2 * _sigmoid(z), mask=valid_token)
    gain = tl.load(scale + 2)
    a00, a01, a02, a03 = _mixer_row(parts, t, valid_token, rho, gain, base, eps, 0, PADDED, SPLITS)
    a10, a11, a12, a13 = _mixer_row(parts, t, valid_token, rho, gain, base, eps, 1, PADDED, SPLITS)
    a20, a21, a22, a23 = _mixer_row(parts, t, valid_token, rho, gain, base, eps, 2, PADDED, SPLITS)
    a30, a31, a32, a33 = _mixer_row(parts, t, valid_token, rho, gain, base, eps, 3, PADDED, SPLITS)
    for step in range(iters):
        if step > 0:
            a00, a01, a02, a03 = _normalise4(a00, a01, a02, a03, eps)
            a10, a11, a12, a13 = _normalise4(a10, a11, a12, a13, eps)
            a20, a21, a22, a23 = _normalise4(a20, a21, a22, a23, eps)
            a30, a31, a32, a33 = _normalise4(a30, a31, a32, a33, eps)
        a00, a10, a20, a30 = _normalise4(a00, a10, a20, a30, eps)
        a01, a11, a21, a31 = _normalise4(a01, a11, a21, a31, eps)
        a02, a12, a22, a32 = _normalise4(a02, a12, a22, a32, eps)
        a03, a13, a23, a33 = _normalise4(a03, a13, a23, a33, eps)
    c = mix + t * 16
    tl.store(c, a00, mask=valid_token)
    tl.store(c + 1, a01, mask=valid_token)
    tl.store(c + 2, a02, mask=valid_token)
    tl.store(c + 3, a03, mask=valid_token)
    tl.store(c + 4, a10, mask=valid_token)
    tl.store(c + 5, a11, mask=valid_token)
    tl.store(c + 6, a12, mask=valid_token)
    tl.store(c + 7, a13, mask=valid_token)
    tl.store(c + 8, a20, mask=valid_token)
    tl.store(c + 9, a21, mask=valid_token)
    tl.store(c + 10, a22, mask=valid_token)
    tl.store(c + 11, a23, mask=valid_token)
    tl.store(c + 12, a30, mask=valid_token)
    tl.store(c + 13, a31, mask=valid_token)
    tl.store(c + 14, a32, mask=valid_token)
    tl.store(c + 15, a33, mask=valid_token)


@triton.jit(do_not_specialize=["rows", "mixer_programs", "scale_stride"])
def _coefficients_and_collapse(
    parts,
    base,
    scale,
    streams,
    pre,
    post,
    mix,
    out,
    rows,
    width,
    columns,
    iters,
    eps,
    rms_eps,
    mixer_programs,
    norm,
    norm_eps,
    codes,
    ordered,
    scales,
    scale_stride,
    NORM: tl.constexpr,
    CODES: tl.constexpr,
    ORDER: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first programs run Sinkhorn for TOKENS tokens each; every other program collapses the streams of one
    token."""
    program = tl.program_id(0)
    if program < mixer_programs:
        t = program * TOKENS + tl.arange(0, TOKENS)
        _write_coefficients(
            parts, t, t < rows, columns, base, scale, post, mix, iters, eps, rms_eps, COUNT, PADDED, SPLITS
        )
    else:
        row = program - mixer_programs
        d = tl.arange(0, BLOCK)
        in_range = d < width
        at = streams + row.to(tl.int64) * columns + d
        x0 = tl.load(at, mask=in_range, other=0.0)  # in flight while their weights are computed
        x1 = tl.load(at + width, mask=in_range, other=0.0)
        x2 = tl.load(at + 2 * width, mask=in_range, other=0.0)
        x3 = tl.load(at + 3 * width, mask=in_range, other=0.0)
        rho = _rho(parts, row, True, columns, rms_eps, COUNT, PADDED, SPLITS)
        gain = tl.load(scale)
        p0 = _sigmoid(_logit(parts, row, True, rho, gain, base, 0, PADDED, SPLITS)) + eps
        p1 = _sigmoid(_logit(parts, row, True, rho, gain, base, 1, PADDED, SPLITS)) + eps
        p2 = _sigmoid(_logit(parts, row, True, rho, gain, base, 2, PADDED, SPLITS)) + eps
        p3 = _sigmoid(_logit(parts, row, True, rho, gain, base, 3, PADDED, SPLITS)) + eps
        tl.store(pre + row * 4, p0)
        tl.store(pre + row * 4 + 1, p1)
        tl.store(pre + row * 4 + 2, p2)
        tl.store(pre + row * 4 + 3, p3)
        u = _collapsed(x0, x1, x2, x3, p0, p1, p2, p3).to(out.dtype.element_ty)
        if NORM:
            fp32 = u.to(tl.float32)
            fp32 = fp32 * (1.0 / tl.sqrt(tl.sum(fp32 * fp32, axis=0) / width + norm_eps))
            u = (fp32 * tl.load(norm + d, mask=in_range, other=0.0)).to(out.dtype.element_ty)
        tl.store(out + row.to(tl.int64) * width + d, u, mask=in_range)
        if CODES:
            r = row + tl.zeros([1], tl.int64)
            tile = tl.reshape(u.to(tl.float32), [1, BLOCK])
            store_codes(tile, r, r >= 0, codes, ordered, scales, scale_stride, width, ORDER, 1, BLOCK)


@triton.jit
def _collapsed(x0, x1, x2, x3, p0, p1, p2, p3):
    return p0 * x0.to(tl.float32) + p1 * x1.to(tl.float32) + p2 * x2.to(tl.float32) + p3 * x3.to(tl.float32)


@triton.jit
def _collapse(streams, pre, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    p0, p1 = tl.load(pre + row * 4), tl.load(pre + row * 4 + 1)
    p2 = tl.load(pre + row * 4 + 2)
    p3 = tl.load(pre + row * 4 + 3)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_range = d < width
    at = streams + row * 4 * width + d
    x0 = tl.load(at, mask=in_range, other=0.0)
    x1 = tl.load(at + width, mask=in_range, other=0.0)
    x2 = tl.load(at + 2 * width, mask=in_range, other=0.0)
    x3 = tl.load(at + 3 * width, mask=in_range, other=0.0)
    u = _collapsed(x0, x1, x2, x3, p0, p1, p2, p3)
    tl.store(out + row * width + d, u.to(out.dtype.element_ty), mask=in_range)


class SplitFn(NamedTuple):
    """`fn`, and the same as the sum of two 16-bit tensors; for float32 streams all three are `fn`."""

    fp32: torch.Tensor
    high: torch.Tensor
    low: torch.Tensor


def prepare(fn: torch.Tensor, dtype: torch.dtype) -> SplitFn | torch.Tensor:
    if len(fn) != COUNT:
        return fn  # not four streams: reference only
    if dtype is torch.float32:
        return SplitFn(fn, fn, fn)
    high, low = (torch.empty(fn.shape, dtype=dtype, device=fn.device) for _ in range(2))
    _split_hi_lo[(-(-fn.numel() // 1024),)](fn, high, low, fn.numel(), BLOCK=1024, num_warps=4)
    return SplitFn(fn, high, low)


def read(streams, fn, base, scale, iters, eps, rms_eps):
    streams = streams.contiguous()
    if len(streams) < MIN_ROWS:
        return decode.read(
            streams, fn.fp32 if isinstance(fn, SplitFn) else fn, base, scale, iters, eps, rms_eps
        )
    return read_rows(streams, fn, base, scale, iters, eps, rms_eps)


def tile_config(fp32: bool, shared: int = HOPPER_SHARED) -> dict[str, int]:
    if fp32:
        return {"TOKENS": 32, "BLOCK": 32, "num_warps": 4, "num_stages": 2}
    return TILE if shared >= HOPPER_SHARED else TILE | {"num_stages": 2}


def read_input(streams, fn, base, scale, iters, eps, rms_eps, norm, norm_eps, released, inner=None):
    streams = streams.contiguous()
    n, _, width = streams.shape
    if n < MIN_ROWS:
        u, _, post, mix = read(streams, fn, base, scale, iters, eps, rms_eps)
        return norm_input(u, norm, norm_eps, released, inner), post, mix
    rounded = None
    if released and width == power_of_two(width) and rounds_to_codes(streams, width):
        rounded = empty_rounded(streams, width, inner)
    settings = (base, scale, iters, eps, rms_eps)
    u, _, post, mix = read_rows(streams, fn, *settings, norm, norm_eps, rounded, inner)
    return u if rounded is None else rounded, post, mix


def read_rows(
    streams, fn, base, scale, iters, eps, rms_eps, norm=None, norm_eps=0.0, rounded=None, inner=None
):
    """`read` with these kernels for any number of rows; with a `norm` the input is normalised."""
    n, m, width = streams.shape
    split_fn = fn if isinstance(fn, SplitFn) else prepare(fn, streams.dtype)
    assert isinstance(split_fn, SplitFn)
    columns, fp32 = m * width, streams.dtype is torch.float32
    options = {"dtype": torch.float32, "device": streams.device}
    splits = SPLITS if n < 4096 else LONG_SPLITS
    parts = torch.empty(n, splits, PADDED, **options)
    pre = torch.empty(n, m, **options)
    post = torch.empty(n, m, **options)
    mix = torch.empty(n, m, m, **options)
    config = tile_config(fp32, shared_memory(streams.device))
    tokens, block = config["TOKENS"], config["BLOCK"]
    split_columns = -(-columns // (splits * block)) * block
    _mix[(splits, -(-n // tokens))](
        streams,
        split_fn.high,
        split_fn.low,
        parts,
        n,
        columns,
        split_columns,
        COUNT=COUNT,
        PADDED=PADDED,
        SPLITS=splits,
        FP32=fp32,
        **config,
    )
    if rounded is None:
        u = torch.empty(n, width, dtype=streams.dtype, device=streams.device)
    else:
        u = rounded.rows
    mixer_programs, row_block = -(-n // 32), power_of_two(width)
    _coefficients_and_collapse[(mixer_programs + n,)](
        parts,
        base,
        scale,
        streams,
        pre,
        post,
        mix,
        u,
        n,
        width,
        columns,
        iters,
        eps,
        rms_eps,
        mixer_programs,
        base if norm is None else norm,
        norm_eps,
        u if rounded is None else rounded.codes,
        u if rounded is None or rounded.ordered is None else rounded.ordered,
        pre if rounded is None else rounded.scales,
        0 if rounded is None else rounded.scales.stride(0),
        NORM=norm is not None,
        CODES=rounded is not None,
        ORDER=0 if rounded is None else code_order(rounded, inner),
        COUNT=COUNT,
        PADDED=PADDED,
        SPLITS=splits,
        TOKENS=32,
        BLOCK=row_block,
        num_warps=min(max(row_block // 1024, 1), 16),
    )
    return u, pre, post, mix


def collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """sum_s pre[s] streams[s], [n, d] in the streams' dtype."""
    n, _, width = streams.shape
    u = torch.empty(n, width, dtype=streams.dtype, device=streams.device)
    block = min(2048, power_of_two(width))
    _collapse[(n, -(-width // block))](streams, pre, u, width, BLOCK=block, num_warps=4)
    return u
