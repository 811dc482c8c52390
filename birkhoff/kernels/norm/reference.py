"""RMSNorm in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    fp32 = x.float()
    out = F.rms_norm(fp32, fp32.shape[-1:], None if weight is None else weight.float(), eps)
    return out.to(x.dtype)
