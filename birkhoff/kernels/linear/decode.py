"""The product of few rows with a large weight on a GPU, portable form: any format, any width.

`gemv(weights, x [n, in], out [n, total])` multiplies with every `PackedWeight` of the list and puts the results side by
side. With `group` the weight's rows fall into groups of that many, and group g reads columns `g * in ..` of x. Weights
are the tall side of the dot; each is decoded exactly to the dtype of x (or to float32) and sums are float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from birkhoff.kernels.gpu import power_of_two
from birkhoff.kernels.linear.packed import PackedWeight


@triton.jit
def decode_e4m3(codes):
    """uint8 codes to float32: the bits moved to a float's places are the value times 2^-120."""
    wide = codes.to(tl.int32)
    bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def decode_e8m0(codes):
    """uint8 scales to float32; 2^-127, which has no normal float, is not used by any checkpoint."""
    return (codes.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _gemv(
    x,
    weight,
    scale,
    out,
    n,
    rows,
    inner,
    x_stride,
    out_stride,
    group,
    FP8: tl.constexpr,
    WIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    r = first + tl.arange(0, ROWS)
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    x += (first // group).to(tl.int64) * inner
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in range(0, inner, INNER):
        k = start + tl.arange(0, INNER)
        at = x + t.to(tl.int64)[None, :] * x_stride + k[:, None]
        entering = tl.load(at, mask=(t < n)[None, :] & (k < inner)[:, None], other=0.0)
        tile = (r < rows)[:, None] & (k < inner)[None, :]
        w = tl.load(weight + r.to(tl.int64)[:, None] * inner + k[None, :], mask=tile, other=0.0)
        if FP8:
            s = tl.load(scale + (start // 128) * rows + r, mask=r < rows, other=127)
            w = decode_e4m3(w) * decode_e8m0(s)[:, None]
        if WIDE:
            total = tl.dot(w.to(tl.float32), entering.to(tl.float32), total, input_precision="ieee")
        else:
            total = tl.dot(w.to(entering.dtype), entering, total)
    into = out + t.to(tl.int64)[None, :] * out_stride + r[:, None]
    tl.store(into, total.to(out.dtype.element_ty), mask=(t < n)[None, :] & (r < rows)[:, None])


def gemv(
    weights: Sequence[PackedWeight], x: torch.Tensor, out: torch.Tensor, group: int | None = None
) -> None:
    n, at = x.shape[0], 0
    for rows in weights:
        wide = x.dtype is torch.float32 or rows.weight.dtype is torch.float32
        tall = min(64, power_of_two(group or rows.out, 16))
        assert group is None or group % tall == 0, f"groups of {group} rows"
        _gemv[(-(-rows.out // tall), -(-n // 16))](
            x,
            rows.weight,
            rows.weight if rows.scale is None else rows.scale,
            out[:, at:],
            n,
            rows.out,
            rows.inner,
            x.stride(0),
            out.stride(0),
            group or rows.out,
            FP8=rows.scale is not None,
            WIDE=wide,
            TOKENS=16,
            ROWS=tall,
            INNER=64 if wide else 128,
            num_warps=4,
        )
        at += rows.out
