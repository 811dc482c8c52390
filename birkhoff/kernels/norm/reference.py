"""RMSNorm in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    wide = x.float()
    out = F.rms_norm(wide, wide.shape[-1:], None if weight is None else weight.float(), eps)
    return out.to(x.dtype)
