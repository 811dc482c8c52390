"""RMSNorm with fewer, cheaper operations than the composite PyTorch runs on a CPU."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    wide = x if x.dtype is torch.float32 else x.float()
    rho = torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
    out = wide * rho
    if weight is not None:
        out.mul_(weight)
    return out if x.dtype is torch.float32 else out.to(x.dtype)
