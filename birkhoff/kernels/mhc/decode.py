"""Hyper-connections of a decode step on a GPU: the boundary between two sublayers in two launches.

`write_and_mix` writes the output of a sublayer into the four streams and, while a slice of them is in registers,
computes its part of the next sublayer's 24 dot products and of the sum of squares; parts are stored side by side, so
the order of summation is fixed. `read_streams` sums the parts; one program per token collapses and normalises the
streams, a second one runs Sinkhorn with all sixteen values in every thread, which needs no synchronisation. `read`
and `write` are the twins of `reference.py`, built from the same kernels. Four streams only, as in V4.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from birkhoff.kernels.gpu import power_of_two

STREAMS = 4
COUNT = (2 + STREAMS) * STREAMS  # dot products of a sublayer; the head has one per stream
# Modes of `write_and_mix`: add an output, initialise with embeddings, or leave the streams unchanged.
KEEP = 0
EMBED = 1
MIX_ONLY = 2


def padded(count: int) -> int:
    """Padded size of `count` products and the sum of squares."""
    return power_of_two(count + 1)


@triton.jit
def _write_and_mix(
    streams,
    y,
    post,
    mix,
    fn,
    parts,
    embed,
    tokens,
    rows,
    width,
    y_parts,
    splits,
    MODE: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    slice_index = tl.program_id(0)
    d = slice_index * BLOCK + tl.arange(0, BLOCK)
    m = tl.arange(0, PADDED)
    in_range = d < width
    tile = (m < COUNT)[:, None] & in_range[None, :]
    at = fn + m[:, None] * (4 * width) + d[None, :]
    f0 = tl.load(at, mask=tile, other=0.0)
    f1 = tl.load(at + width, mask=tile, other=0.0)
    f2 = tl.load(at + 2 * width, mask=tile, other=0.0)
    f3 = tl.load(at + 3 * width, mask=tile, other=0.0)
    stream_type = streams.dtype.element_ty
    first = tl.program_id(1).to(tl.int64) * ROWS
    for i in range(ROWS):
        row = first + i
        in_range = (d < width) & (row < rows)
        base = streams + row * 4 * width + d
        if MODE == 1:
            token = tl.load(tokens + row, mask=row < rows, other=0)
            x0 = tl.load(embed + token * width + d, mask=in_range, other=0.0).to(stream_type)
            x1 = x0
            x2 = x0
            x3 = x0
        else:
            x0 = tl.load(base, mask=in_range, other=0.0)
            x1 = tl.load(base + width, mask=in_range, other=0.0)
            x2 = tl.load(base + 2 * width, mask=in_range, other=0.0)
            x3 = tl.load(base + 3 * width, mask=in_range, other=0.0)
        if MODE == 0:
            total = tl.zeros([BLOCK], tl.float32)
            for part in range(y_parts):
                total += tl.load(y + (row * y_parts + part) * width + d, mask=in_range, other=0.0).to(
                    tl.float32
                )
            total = total.to(stream_type).to(tl.float32)
            a0 = x0.to(tl.float32)
            a1 = x1.to(tl.float32)
            a2 = x2.to(tl.float32)
            a3 = x3.to(tl.float32)
            safe_row = tl.minimum(row, rows - 1)
            w = post + safe_row * 4
            c = mix + safe_row * 16
            x0 = _mixed_stream(a0, a1, a2, a3, total, w, c, 0).to(stream_type)
            x1 = _mixed_stream(a0, a1, a2, a3, total, w, c, 1).to(stream_type)
            x2 = _mixed_stream(a0, a1, a2, a3, total, w, c, 2).to(stream_type)
            x3 = _mixed_stream(a0, a1, a2, a3, total, w, c, 3).to(stream_type)
        if MODE < 2:
            tl.store(base, x0, mask=in_range)
            tl.store(base + width, x1, mask=in_range)
            tl.store(base + 2 * width, x2, mask=in_range)
            tl.store(base + 3 * width, x3, mask=in_range)
        g0 = x0.to(tl.float32)
        g1 = x1.to(tl.float32)
        g2 = x2.to(tl.float32)
        g3 = x3.to(tl.float32)
        dots = tl.sum(f0 * g0[None, :] + f1 * g1[None, :] + f2 * g2[None, :] + f3 * g3[None, :], axis=1)
        squares = tl.sum(g0 * g0 + g1 * g1 + g2 * g2 + g3 * g3, axis=0)
        into = parts + (row * splits + slice_index) * PADDED + m
        tl.store(into, tl.where(m == COUNT, squares, dots), mask=row < rows)


@triton.jit
def _mixed_stream(a0, a1, a2, a3, y, post, mix, TO: tl.constexpr):
    """Stream TO after the write: the mixer's column times the streams, plus `post[TO]` times the output."""
    carried = tl.load(mix + TO) * a0 + tl.load(mix + 4 + TO) * a1
    carried += tl.load(mix + 8 + TO) * a2 + tl.load(mix + 12 + TO) * a3
    return carried + tl.load(post + TO) * y


@triton.jit
def _element(values, m, i):
    return tl.sum(tl.where(m == i, values, 0.0), axis=0)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _read_streams(
    parts,
    streams,
    base,
    scale,
    norm,
    out,
    out_fp16,
    out_fp4_order,
    pre,
    post,
    mix,
    width,
    splits,
    iters,
    eps,
    rms_eps,
    norm_eps,
    HEAD: tl.constexpr,
    NORM: tl.constexpr,
    FP16: tl.constexpr,
    FP4_ORDER: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPLITS)
    m = tl.arange(0, PADDED)
    tile = tl.load(
        parts + (row * splits + s[:, None]) * PADDED + m[None, :], mask=(s < splits)[:, None], other=0.0
    )
    total = tl.sum(tile, axis=0)
    squares = _element(total, m, COUNT)
    logits = total * (1.0 / tl.sqrt(squares / (4 * width) + rms_eps))
    if tl.program_id(1) == 0:
        gain = tl.load(scale)
        w0 = _sigmoid(_element(logits, m, 0) * gain + tl.load(base)) + eps
        w1 = _sigmoid(_element(logits, m, 1) * gain + tl.load(base + 1)) + eps
        w2 = _sigmoid(_element(logits, m, 2) * gain + tl.load(base + 2)) + eps
        w3 = _sigmoid(_element(logits, m, 3) * gain + tl.load(base + 3)) + eps
        tl.store(pre + row * 4, w0)
        tl.store(pre + row * 4 + 1, w1)
        tl.store(pre + row * 4 + 2, w2)
        tl.store(pre + row * 4 + 3, w3)
        d = tl.arange(0, BLOCK)
        in_range = d < width
        at = streams + row * 4 * width + d
        u = w0 * tl.load(at, mask=in_range, other=0.0).to(tl.float32)
        u += w1 * tl.load(at + width, mask=in_range, other=0.0).to(tl.float32)
        u += w2 * tl.load(at + 2 * width, mask=in_range, other=0.0).to(tl.float32)
        u += w3 * tl.load(at + 3 * width, mask=in_range, other=0.0).to(tl.float32)
        u = u.to(streams.dtype.element_ty)
        if NORM:
            fp32 = u.to(tl.float32)
            rho = 1.0 / tl.sqrt(tl.sum(fp32 * fp32, axis=0) / width + norm_eps)
            u = (fp32 * rho * tl.load(norm + d, mask=in_range, other=0.0)).to(streams.dtype.element_ty)
        tl.store(out + row * width + d, u, mask=in_range)
        if FP16:
            tl.store(out_fp16 + row * width + d, u.to(tl.float16), mask=in_range)
        if FP4_ORDER:  # the order in which FP4 codes unpack from 32-bit words: 0 2 4 6 1 3 5 7
            permuted = (d // 8) * 8 + (d % 8) // 2 + 4 * (d % 2)
            tl.store(out_fp4_order + row * width + permuted, u.to(tl.float16), mask=in_range)
    elif not HEAD:
        gain = tl.load(scale + 1)
        for k in tl.static_range(4):
            logit = _element(logits, m, 4 + k) * gain + tl.load(base + 4 + k)
            tl.store(post + row * 4 + k, 2 * _sigmoid(logit))
        z = logits * tl.load(scale + 2)
        a00, a01, a02, a03 = _softmax_row(z, base, m, 0, eps)
        a10, a11, a12, a13 = _softmax_row(z, base, m, 1, eps)
        a20, a21, a22, a23 = _softmax_row(z, base, m, 2, eps)
        a30, a31, a32, a33 = _softmax_row(z, base, m, 3, eps)
        a00, a10, a20, a30 = _normalise4(a00, a10, a20, a30, eps)
        a01, a11, a21, a31 = _normalise4(a01, a11, a21, a31, eps)
        a02, a12, a22, a32 = _normalise4(a02, a12, a22, a32, eps)
        a03, a13, a23, a33 = _normalise4(a03, a13, a23, a33, eps)
        for _ in range(iters - 1):
            a00, a01, a02, a03 = _normalise4(a00, a01, a02, a03, eps)
            a10, a11, a12, a13 = _normalise4(a10, a11, a12, a13, eps)
            a20, a21, a22, a23 = _normalise4(a20, a21, a22, a23, eps)
            a30, a31, a32, a33 = _normalise4(a30, a31, a32, a33, eps)
            a00, a10, a20, a30 = _normalise4(a00, a10, a20, a30, eps)
            a01, a11, a21, a31 = _normalise4(a01, a11, a21, a31, eps)
            a02, a12, a22, a32 = _normalise4(a02, a12, a22, a32, eps)
            a03, a13, a23, a33 = _normalise4(a03, a13, a23, a33, eps)
        c = mix + row * 16
        tl.store(c, a00)
        tl.store(c + 1, a01)
        tl.store(c + 2, a02)
        tl.store(c + 3, a03)
        tl.store(c + 4, a10)
        tl.store(c + 5, a11)
        tl.store(c + 6, a12)
        tl.store(c + 7, a13)
        tl.store(c + 8, a20)
        tl.store(c + 9, a21)
        tl.store(c + 10, a22)
        tl.store(c + 11, a23)
        tl.store(c + 12, a30)
        tl.store(c + 13, a31)
        tl.store(c + 14, a32)
        tl.store(c + 15, a33)


@triton.jit
def softmax4(a, b, c, d, eps):
    """The softmax of four logits, plus eps."""
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a = tl.exp(a - top)
    b = tl.exp(b - top)
    c = tl.exp(c - top)
    d = tl.exp(d - top)
    factor = 1.0 / (a + b + c + d)
    return a * factor + eps, b * factor + eps, c * factor + eps, d * factor + eps


@triton.jit
def _softmax_row(z, base, m, FROM: tl.constexpr, eps):
    """Row FROM of the mixer before Sinkhorn; `z` are the scaled products without `base`."""
    first: tl.constexpr = 8 + 4 * FROM
    a = _element(z, m, first) + tl.load(base + first)
    b = _element(z, m, first + 1) + tl.load(base + first + 1)
    c = _element(z, m, first + 2) + tl.load(base + first + 2)
    d = _element(z, m, first + 3) + tl.load(base + first + 3)
    return softmax4(a, b, c, d, eps)


@triton.jit
def _normalise4(a, b, c, d, eps):
    factor = 1.0 / ((a + b) + (c + d) + eps)
    return a * factor, b * factor, c * factor, d * factor


def slices(rows: int, width: int) -> tuple[int, int, int]:
    """Slicing of the streams in `write_and_mix`: elements per slice, slices, tokens per program."""
    tokens = 1 if rows <= 8 else 4 if rows <= 32 else 8
    block = 64 if rows <= 8 else 128
    block = min(block, power_of_two(width))
    return block, -(-width // block), tokens


def write_and_mix(streams, y, post, mix, fn, parts, mode=KEEP, embed=None, tokens=None, pdl=False) -> None:
    """Update streams [n, 4, d] in place with y [n, p, d] summed over p (or [n, d]), and write parts [n, slices, padded]
    for the next `read_streams`."""
    n, _, width = streams.shape
    block, splits, rows = slices(n, width)
    count = fn.shape[0]
    placeholder = streams  # for arguments that the mode does not read
    _write_and_mix[(splits, -(-n // rows))](
        streams,
        placeholder if y is None else y,
        fn if post is None else post,
        fn if mix is None else mix,
        fn,
        parts,
        placeholder if embed is None else embed,
        placeholder if tokens is None else tokens,
        n,
        width,
        1 if y is None or y.dim() == 2 else y.shape[1],
        splits,
        MODE=mode,
        COUNT=count,
        PADDED=padded(count),
        ROWS=rows,
        BLOCK=block,
        num_warps=4,
        PDL=pdl,
    )


def read_streams(
    parts,
    streams,
    base,
    scale,
    norm,
    iters,
    eps,
    rms_eps,
    norm_eps,
    out,
    pre,
    post=None,
    mix=None,
    out_fp16=None,
    out_fp4_order=None,
) -> None:
    """out [n, d], normalised if `norm` is given; pre [n, 4]; post and mix except for the head (`post=None`)."""
    n, _, width = streams.shape
    _, splits, _ = slices(n, width)
    head = post is None
    count = 4 if head else COUNT
    _read_streams[(n, 1 if head else 2)](
        parts,
        streams,
        base,
        scale,
        base if norm is None else norm,
        out,
        out if out_fp16 is None else out_fp16,
        out if out_fp4_order is None else out_fp4_order,
        pre,
        pre if head else post,
        pre if head else mix,
        width,
        splits,
        iters,
        eps,
        rms_eps,
        norm_eps,
        HEAD=head,
        NORM=norm is not None,
        FP16=out_fp16 is not None,
        FP4_ORDER=out_fp4_order is not None,
        COUNT=count,
        PADDED=padded(count),
        SPLITS=power_of_two(splits),
        BLOCK=power_of_two(width),
        num_warps=8 if width >= 2048 else 4,
    )


def read(streams, fn, base, scale, iters, eps, rms_eps):
    streams = streams.contiguous()
    n, m, width = streams.shape
    assert m == STREAMS
    options = {"dtype": torch.float32, "device": streams.device}
    parts = torch.empty(n, slices(n, width)[1], padded(COUNT), **options)
    u = torch.empty(n, width, dtype=streams.dtype, device=streams.device)
    pre = torch.empty(n, m, **options)
    post = torch.empty(n, m, **options)
    mix = torch.empty(n, m, m, **options)
    write_and_mix(streams, None, None, None, fn, parts, MIX_ONLY)
    read_streams(parts, streams, base, scale, None, iters, eps, rms_eps, 0.0, u, pre, post, mix)
    return u, pre, post, mix


@triton.jit
def _write(streams, y, post, mix, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_range = d < width
    at = row * 4 * width + d
    a0 = tl.load(streams + at, mask=in_range, other=0.0).to(tl.float32)
    a1 = tl.load(streams + at + width, mask=in_range, other=0.0).to(tl.float32)
    a2 = tl.load(streams + at + 2 * width, mask=in_range, other=0.0).to(tl.float32)
    a3 = tl.load(streams + at + 3 * width, mask=in_range, other=0.0).to(tl.float32)
    total = tl.load(y + row * width + d, mask=in_range, other=0.0).to(tl.float32)
    stream_type = out.dtype.element_ty
    for k in tl.static_range(4):
        x = _mixed_stream(a0, a1, a2, a3, total, post + row * 4, mix + row * 16, k)
        tl.store(out + at + k * width, x.to(stream_type), mask=in_range)


def write(streams, y, post, mix):
    streams = streams.contiguous()
    y = y.contiguous()
    post = post.contiguous()
    mix = mix.contiguous()
    n, m, width = streams.shape
    assert m == STREAMS
    out = torch.empty_like(streams)
    block = min(4096, power_of_two(width))  # fastest for thousands of rows
    _write[(n, -(-width // block))](
        streams, y, post, mix, out, width, BLOCK=block, num_warps=max(1, block // 256)
    )
    return out
