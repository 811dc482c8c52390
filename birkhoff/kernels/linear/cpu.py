"""Matrix products on a CPU: native or compiled loops for the few rows of a decode step, BLAS or oneDNN for many rows.

Measured on one core of a Zen 4 server with weights larger than its caches, one row of 384 times 1024: the BLAS that
PyTorch links reads 10 GB/s (150 us), these loops 36 GB/s (43 us).

For many rows oneDNN is 1.2 to 1.9 times as fast as BLAS if the weight is large, and no faster if it is small. But it
compiles and keeps a program for every row count (0.5 ms and about 400 kB each), and the row count of an expert changes
every step. Therefore small weights use BLAS, and rows for oneDNN are padded to one of a few counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from birkhoff.kernels import quant
from birkhoff.kernels.jit import compiled
from birkhoff.kernels.linear import reference
from birkhoff.kernels.linear.packed import BLOCK
from birkhoff.kernels.packed import PackedMatrix, native

MAX_LOOP_ROWS = 12  # rows up to which the loops are faster
MAX_BLAS_WEIGHT = 2**19  # elements of a weight up to which BLAS is as fast as oneDNN


@compiled
def matmul(x, weight, out):
    """out[n, o] = sum_k x[n, k] weight[o, k], two rows at a time so that a weight is read once for both.

    Sums start from a float32 zero: a wider start value would make the compiler accumulate wider, at half the speed."""
    count, width = x.shape
    zero = np.float32(0)
    for o in range(weight.shape[0]):
        w = weight[o]
        row = 0
        while row + 2 <= count:
            x0, x1 = x[row], x[row + 1]
            s0 = s1 = zero
            for k in range(width):
                s0 += w[k] * x0[k]
                s1 += w[k] * x1[k]
            out[row, o], out[row + 1, o] = s0, s1
            row += 2
        if row < count:
            x0, s0 = x[row], zero
            for k in range(width):
                s0 += w[k] * x0[k]
            out[row, o] = s0


@compiled
def add_matmul(x, weight, out_rows, out):
    """out[out_rows[g]] += sum_i x[g, i] weight[i], four rows of `weight` at a time."""
    inner, width = weight.shape
    i = 0
    while i + 4 <= inner:
        w0 = weight[i]
        w1 = weight[i + 1]
        w2 = weight[i + 2]
        w3 = weight[i + 3]
        for g in range(x.shape[0]):
            target = out[out_rows[g]]
            x0 = x[g, i]
            x1 = x[g, i + 1]
            x2 = x[g, i + 2]
            x3 = x[g, i + 3]
            for c in range(width):
                target[c] += x0 * w0[c] + x1 * w1[c] + x2 * w2[c] + x3 * w3[c]
        i += 4
    while i < inner:
        for g in range(x.shape[0]):
            target = out[out_rows[g]]
            x0 = x[g, i]
            w0 = weight[i]
            for c in range(width):
                target[c] += x0 * w0[c]
        i += 1


def arrange(matrices: Sequence[PackedMatrix]) -> native.Product:
    """Packed matrices with a common input as `packed_linear` takes them; codes are not copied."""
    return native.Product(matrices)


def packed_linear(
    x: torch.Tensor, weight: native.Product, group: int | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    y = weight(x.float()) if group is None else weight.grouped(x.float(), group)
    return y.to(dtype or x.dtype)


def rounded_linear(x: torch.Tensor, weight: native.Product, dtype: torch.dtype | None = None) -> torch.Tensor:
    return packed_linear(quant.fp8_round(x, BLOCK), weight, None, dtype or x.dtype)


def dequantise(matrix: PackedMatrix) -> torch.Tensor:
    """The values of a packed matrix, float32."""
    return native.dequantise(matrix) if native.available() else matrix.dense()


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if weight.dtype is not torch.float32:
        return F.linear(x, weight)
    width = x.shape[-1]
    if x.numel() <= MAX_LOOP_ROWS * width:
        flat = x.reshape(-1, width)
        if native.available():
            out = native.multiply(flat, weight)
        else:
            out = torch.empty(len(flat), weight.shape[0])
            matmul(flat.numpy(), weight.numpy(), out.numpy())
        return out.view(*x.shape[:-1], weight.shape[0])
    if ONEDNN is None or weight.numel() <= MAX_BLAS_WEIGHT:
        return F.linear(x, weight)
    rows = x.numel() // width
    padded = F.pad(x.reshape(rows, width), (0, 0, 0, padded_rows(rows) - rows))
    return ONEDNN(padded, weight, None, "none", [], "")[:rows].view(*x.shape[:-1], -1)


def padded_rows(rows: int) -> int:
    """`rows` rounded up to one of about fifty counts (up to 2,048): at most an eighth more, or seven."""
    step = max(8, 1 << max(rows.bit_length() - 4, 0))
    return -(-rows // step) * step


def _find_onednn():
    """The linear op of oneDNN if this build has it and it agrees with the reference."""
    try:
        op = torch.ops.mkldnn._linear_pointwise
        x = torch.linspace(-1, 1, 12).view(2, 6)
        weight = torch.linspace(-2, 1, 30).view(5, 6)
        agrees = torch.allclose(op(x, weight, None, "none", [], ""), reference.linear(x, weight), atol=1e-5)
    except (AttributeError, RuntimeError):
        return None
    return op if agrees else None


ONEDNN = _find_onednn()
