"""The product in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from birkhoff.kernels.linear.packed import PackedWeight


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight)


def packed_linear(
    x: torch.Tensor, rows: PackedWeight, group: int | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    dtype = dtype or x.dtype
    weight = rows.dense().to(torch.promote_types(x.dtype, dtype))
    if group is None:
        return F.linear(x.to(weight.dtype), weight).to(dtype)
    parts = x.to(weight.dtype).unflatten(-1, (-1, rows.inner))
    return torch.einsum("...gk,grk->...gr", parts, weight.unflatten(0, (-1, group))).flatten(-2).to(dtype)
