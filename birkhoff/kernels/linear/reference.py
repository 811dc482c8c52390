"""Matrix products in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from birkhoff.kernels.linear.packed import PackedWeight
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
