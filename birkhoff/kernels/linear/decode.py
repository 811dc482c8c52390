"""Products of the few rows of a decode step with packed weights on a GPU, in Triton: any format, any width.

`gemv(weights, x [n, in], out [n, total])` multiplies x with every `PackedWeight` of the list and stores the results
side by side. With `group` the rows of a weight form groups of that many rows, and group g reads columns `g * in ..`
of x. Weights are the left operand of the dot; they are decoded to the dtype of x (or to float32), sums are float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from birkhoff.kernels.gpu import interpreted, power_of_two
from birkhoff.kernels.linear.packed import PackedWeight
from birkhoff.kernels.packed.unpack import decode_e4m3, decode_e8m0, lookup_table, unpack


@triton.jit
def _gemv(
    x,
    weight,
    scale,
    grid,
    out,
    n,
    rows,
    inner,
    x_stride,
    out_stride,
    group,
    TYPE: tl.constexpr,
    FP32: tl.constexpr,
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
        inputs = tl.load(at, mask=(t < n)[None, :] & (k < inner)[:, None], other=0.0)
        if TYPE == "numbers" or TYPE == "rows of FP8":
            tile = (r < rows)[:, None] & (k < inner)[None, :]
            w = tl.load(weight + r.to(tl.int64)[:, None] * inner + k[None, :], mask=tile, other=0.0)
            if TYPE == "rows of FP8":
                s = tl.load(scale + (start // 128) * rows + r, mask=r < rows, other=127)
                w = decode_e4m3(w) * decode_e8m0(s)[:, None]
            elif w.dtype == tl.float16 and not FP32:
                inputs = inputs.to(tl.float16)  # of bfloat16, not rounded: inputs are normalised or gated
        else:
            w = unpack(weight, scale, grid, r, r < rows, start, inner, TYPE, INNER)
        if FP32:
            total = tl.dot(w.to(tl.float32), inputs.to(tl.float32), total, input_precision="ieee")
        else:
            total = tl.dot(w.to(inputs.dtype), inputs, total)
    into = out + t.to(tl.int64)[None, :] * out_stride + r[:, None]
    tl.store(into, total.to(out.dtype.element_ty), mask=(t < n)[None, :] & (r < rows)[:, None])


def gemv(
    weights: Sequence[PackedWeight], x: torch.Tensor, out: torch.Tensor, group: int | None = None
) -> None:
    n, column = x.shape[0], 0
    for weight in weights:
        fp32 = x.dtype is torch.float32 or weight.weight.dtype is torch.float32
        row_tile = min(256 if interpreted() else 64, power_of_two(group or weight.out, 16))
        assert group is None or group % row_tile == 0, f"groups of {group} rows"
        table = None if weight.type is None else lookup_table(weight.type.name, x.device)
        _gemv[(-(-weight.out // row_tile), -(-n // 16))](
            x,
            weight.weight,
            weight.weight if weight.scale is None else weight.scale,
            weight.weight if table is None else table,
            out[:, column:],
            n,
            weight.out,
            weight.inner,
            x.stride(0),
            out.stride(0),
            group or weight.out,
            TYPE=weight.kernel_type,
            FP32=fp32,
            TOKENS=16,
            ROWS=row_tile,
            INNER=256 if weight.type and interpreted() else 64 if fp32 else 128,
            num_warps=4,
        )
        column += weight.out
