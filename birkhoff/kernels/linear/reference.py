"""Matrix products in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from birkhoff.kernels import quant
from birkhoff.kernels.linear.packed import BLOCK, PackedWeight
from birkhoff.kernels.packed import PackedMatrix


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight)


def dequantise(matrix: PackedMatrix) -> torch.Tensor:
    """The values of a packed matrix, float32."""
    return matrix.dense()


def packed_linear(
    x: torch.Tensor, weight: PackedWeight, group: int | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    dtype = dtype or x.dtype
    dense = weight.dense().to(torch.promote_types(x.dtype, dtype))
    if group is None:
        return F.linear(x.to(dense.dtype), dense).to(dtype)
    grouped = x.to(dense.dtype).unflatten(-1, (-1, weight.inner))
    return torch.einsum("...gk,grk->...gr", grouped, dense.unflatten(0, (-1, group))).flatten(-2).to(dtype)


def rounded_linear(x: torch.Tensor, weight: PackedWeight, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`packed_linear` of x rounded to FP8 in groups of 128, as the released numerics do."""
    return packed_linear(quant.fp8_round(x, BLOCK), weight, None, dtype)
