"""Hyper-connections for the many rows of a prompt on a GPU: twins of `read` and `write`, bound by memory alone.

Few tokens want few launches (`triton.py`); thousands want each launch to stream. Here the 24 dot products of a read are
a tensor-core product: 128 tokens against all of `fn`, cut along the 4 * d columns into `SPLITS` parts whose order of
addition is fixed, with the square sum of the same tile beside it. Streams of 16 bits are exact there; `fn` is float32
and is taken as two 16-bit halves (high + low, cut before so that tiles are copied as they are) in two products with
float32 sums: relative error 2^-17 in bfloat16, 2^-22 in float16, where one TF32 product would have 2^-11. float32
streams are multiplied as float32. `_coefficients` then walks Sinkhorn's way with one token a thread, and `_collapse`
reads the streams once more. A launch begins where the one before it ended: what was touched last is still in L2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from birkhoff.kernels.gpu import power_of_two
from birkhoff.kernels.mhc import decode as few
from birkhoff.kernels.mhc.decode import _share, _sigmoid

SPLITS, LONG_SPLITS = (
    8,
    2,
)  # parts of a row: for some hundreds of rows, and for thousands, which keep a GPU busy
TILE = {"TOKENS": 128, "BLOCK": 128, "num_warps": 8, "num_stages": 4}
COUNT, PADDED = few.COUNT, few.padded(few.COUNT)
MANY = 256  # rows from which this form is used


@triton.jit
def _halves(fn, high, low, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(fn + i, mask=i < count, other=0.0)
    first = value.to(high.dtype.element_ty)
    tl.store(high + i, first, mask=i < count)
    tl.store(low + i, (value - first.to(tl.float32)).to(high.dtype.element_ty), mask=i < count)


@triton.jit
def _mix(
    streams,
    high,
    low,
    parts,
    rows,
    columns,
    share,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    t = (tl.num_programs(1) - 1 - tl.program_id(1)) * TOKENS + tl.arange(
        0, TOKENS
    )  # what was written last, first
    piece = tl.program_id(0)
    m = tl.arange(0, PADDED)
    at = streams + t.to(tl.int64)[:, None] * columns
    dots = tl.zeros([TOKENS, PADDED], tl.float32)
    squares = tl.zeros([TOKENS, BLOCK], tl.float32)
    for start in range(piece * share, tl.minimum(piece * share + share, columns), BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(at + k[None, :], mask=(t < rows)[:, None] & (k < columns)[None, :], other=0.0)
        of = m[None, :] * columns + k[:, None]
        known = (m < COUNT)[None, :] & (k < columns)[:, None]
        first = tl.load(high + of, mask=known, other=0.0)
        if WIDE:
            dots = tl.dot(x, first, dots, input_precision="ieee")
        else:  # adding here ends the products here: x has no place of its own to stay in while the next tiles arrive
            dots += tl.dot(x, tl.load(low + of, mask=known, other=0.0), tl.dot(x, first))
        wide = x.to(tl.float32)
        squares += wide * wide
    dots = tl.where((m == COUNT)[None, :], tl.sum(squares, axis=1)[:, None], dots)
    into = parts + (t[:, None] * SPLITS + piece) * PADDED + m[None, :]
    tl.store(into, dots, mask=(t < rows)[:, None])


@triton.jit
def _logit(parts, t, alive, rho, gain, base, J: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr):
    """Product J of every token, its parts added in order, scaled and moved."""
    total = tl.zeros_like(rho)
    for piece in tl.static_range(SPLITS):
        total += tl.load(parts + (t * SPLITS + piece) * PADDED + J, mask=alive, other=0.0)
    return total * rho * gain + tl.load(base + J)


@triton.jit
def _mixer_row(
    parts, t, alive, rho, gain, base, eps, FROM: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr
):
    """Row FROM of the mixer before its columns are normalised."""
    a = _logit(parts, t, alive, rho, gain, base, 8 + 4 * FROM, PADDED, SPLITS)
    b = _logit(parts, t, alive, rho, gain, base, 9 + 4 * FROM, PADDED, SPLITS)
    c = _logit(parts, t, alive, rho, gain, base, 10 + 4 * FROM, PADDED, SPLITS)
    d = _logit(parts, t, alive, rho, gain, base, 11 + 4 * FROM, PADDED, SPLITS)
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a = tl.exp(a - top)
    b = tl.exp(b - top)
    c = tl.exp(c - top)
    d = tl.exp(d - top)
    over = 1.0 / (a + b + c + d)
    return a * over + eps, b * over + eps, c * over + eps, d * over + eps


@triton.jit
def _rho(parts, t, alive, columns, rms_eps, COUNT: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr):
    """What every product of a token is divided by, turned over."""
    squares = tl.load(parts + t * SPLITS * PADDED + COUNT, mask=alive, other=1.0)
    for piece in tl.static_range(1, SPLITS):
        squares += tl.load(parts + (t * SPLITS + piece) * PADDED + COUNT, mask=alive, other=1.0)
    return 1.0 / tl.sqrt(squares / columns + rms_eps)


@triton.jit
def _spread(
    parts,
    t,
    alive,
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
    """How a token's output is spread and its streams are mixed: Sinkhorn's way, one token a thread."""
    rho = _rho(parts, t, alive, columns, rms_eps, COUNT, PADDED, SPLITS)
    gain = tl.load(scale + 1)
    for k in tl.static_range(4):
        z = _logit(parts, t, alive, rho, gain, base, 4 + k, PADDED, SPLITS)
        tl.store(post + t * 4 + k, 2 * _sigmoid(z), mask=alive)
    gain = tl.load(scale + 2)
    a00, a01, a02, a03 = _mixer_row(parts, t, alive, rho, gain, base, eps, 0, PADDED, SPLITS)
    a10, a11, a12, a13 = _mixer_row(parts, t, alive, rho, gain, base, eps, 1, PADDED, SPLITS)
    a20, a21, a22, a23 = _mixer_row(parts, t, alive, rho, gain, base, eps, 2, PADDED, SPLITS)
    a30, a31, a32, a33 = _mixer_row(parts, t, alive, rho, gain, base, eps, 3, PADDED, SPLITS)
    for step in range(iters):
        if step > 0:
            a00, a01, a02, a03 = _share(a00, a01, a02, a03, eps)
            a10, a11, a12, a13 = _share(a10, a11, a12, a13, eps)
            a20, a21, a22, a23 = _share(a20, a21, a22, a23, eps)
            a30, a31, a32, a33 = _share(a30, a31, a32, a33, eps)
        a00, a10, a20, a30 = _share(a00, a10, a20, a30, eps)
        a01, a11, a21, a31 = _share(a01, a11, a21, a31, eps)
        a02, a12, a22, a32 = _share(a02, a12, a22, a32, eps)
        a03, a13, a23, a33 = _share(a03, a13, a23, a33, eps)
    c = mix + t * 16
    tl.store(c, a00, mask=alive)
    tl.store(c + 1, a01, mask=alive)
    tl.store(c + 2, a02, mask=alive)
    tl.store(c + 3, a03, mask=alive)
    tl.store(c + 4, a10, mask=alive)
    tl.store(c + 5, a11, mask=alive)
    tl.store(c + 6, a12, mask=alive)
    tl.store(c + 7, a13, mask=alive)
    tl.store(c + 8, a20, mask=alive)
    tl.store(c + 9, a21, mask=alive)
    tl.store(c + 10, a22, mask=alive)
    tl.store(c + 11, a23, mask=alive)
    tl.store(c + 12, a30, mask=alive)
    tl.store(c + 13, a31, mask=alive)
    tl.store(c + 14, a32, mask=alive)
    tl.store(c + 15, a33, mask=alive)


@triton.jit
def _settle(
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
    mixers,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first programs walk Sinkhorn's way for some tokens each; all others collapse one token's streams."""
    program = tl.program_id(0)
    if program < mixers:
        t = program * TOKENS + tl.arange(0, TOKENS)
        _spread(
            parts, t, t < rows, columns, base, scale, post, mix, iters, eps, rms_eps, COUNT, PADDED, SPLITS
        )
    else:
        row = program - mixers
        d = tl.arange(0, BLOCK)
        inside = d < width
        at = streams + row.to(tl.int64) * columns + d
        x0 = tl.load(at, mask=inside, other=0.0)  # on their way while their weights are worked out
        x1 = tl.load(at + width, mask=inside, other=0.0)
        x2 = tl.load(at + 2 * width, mask=inside, other=0.0)
        x3 = tl.load(at + 3 * width, mask=inside, other=0.0)
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
        u = _collapsed(x0, x1, x2, x3, p0, p1, p2, p3)
        tl.store(out + row.to(tl.int64) * width + d, u.to(out.dtype.element_ty), mask=inside)


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
    inside = d < width
    at = streams + row * 4 * width + d
    x0 = tl.load(at, mask=inside, other=0.0)
    x1 = tl.load(at + width, mask=inside, other=0.0)
    x2 = tl.load(at + 2 * width, mask=inside, other=0.0)
    x3 = tl.load(at + 3 * width, mask=inside, other=0.0)
    u = _collapsed(x0, x1, x2, x3, p0, p1, p2, p3)
    tl.store(out + row * width + d, u.to(out.dtype.element_ty), mask=inside)


class Fn(NamedTuple):
    """`fn`, and the same as the sum of two tensors of 16 bits; float32 is left whole."""

    whole: torch.Tensor
    high: torch.Tensor
    low: torch.Tensor


def prepare(fn: torch.Tensor, dtype: torch.dtype) -> Fn | torch.Tensor:
    if len(fn) != COUNT:
        return fn  # not four streams, which only the plain twin knows
    if dtype is torch.float32:
        return Fn(fn, fn, fn)
    high, low = (torch.empty(fn.shape, dtype=dtype, device=fn.device) for _ in range(2))
    _halves[(-(-fn.numel() // 1024),)](fn, high, low, fn.numel(), BLOCK=1024, num_warps=4)
    return Fn(fn, high, low)


def read(streams, fn, base, scale, iters, eps, rms_eps):
    streams = streams.contiguous()
    if len(streams) < MANY:
        return few.read(streams, fn.whole if isinstance(fn, Fn) else fn, base, scale, iters, eps, rms_eps)
    return read_many(streams, fn, base, scale, iters, eps, rms_eps)


def shape_of(wide: bool) -> dict[str, int]:
    if wide:
        return {"TOKENS": 32, "BLOCK": 32, "num_warps": 4, "num_stages": 2}
    return dict(TILE)


def read_many(streams, fn, base, scale, iters, eps, rms_eps):
    """`read` in this form whatever the number of rows."""
    n, m, width = streams.shape
    made = fn if isinstance(fn, Fn) else prepare(fn, streams.dtype)
    assert isinstance(made, Fn)
    columns, wide = m * width, streams.dtype is torch.float32
    numbers = {"dtype": torch.float32, "device": streams.device}
    splits = SPLITS if n < 4096 else LONG_SPLITS
    parts = torch.empty(n, splits, PADDED, **numbers)
    pre = torch.empty(n, m, **numbers)
    post = torch.empty(n, m, **numbers)
    mix = torch.empty(n, m, m, **numbers)
    shape = shape_of(wide)
    tokens, block = shape["TOKENS"], shape["BLOCK"]
    share = -(-columns // (splits * block)) * block
    _mix[(splits, -(-n // tokens))](
        streams,
        made.high,
        made.low,
        parts,
        n,
        columns,
        share,
        COUNT=COUNT,
        PADDED=PADDED,
        SPLITS=splits,
        WIDE=wide,
        **shape,
    )
    u = torch.empty(n, width, dtype=streams.dtype, device=streams.device)
    mixers, row_block = -(-n // 32), power_of_two(width)
    _settle[(mixers + n,)](
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
        mixers,
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
