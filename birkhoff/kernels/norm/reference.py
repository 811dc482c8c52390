"""RMSNorm in plain PyTorch, alone and with what follows it for queries and keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from birkhoff.kernels import quant
from birkhoff.kernels.quant.rounded_rows import Input
from birkhoff.kernels.rope.reference import Phases, rotate

KEY_GROUP = 64  # columns of a key that share a scale


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    fp32 = x.float()
    out = F.rms_norm(fp32, fp32.shape[-1:], None if weight is None else weight.float(), eps)
    return out.to(x.dtype)


def norm_input(
    x: torch.Tensor, weight: torch.Tensor, eps: float, released: bool, inner: int | None = None
) -> Input:
    return rms_norm(x, weight, eps)


def norm_rotate(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, phases: Phases, keep: int | None = None
) -> torch.Tensor:
    return round_key(rotate(rms_norm(x, weight, eps), phases), keep)


def round_key(rotated: torch.Tensor, keep: int | None) -> torch.Tensor:
    """A key as it is cached: rounded to FP8 except its last `keep` columns; as it is if `keep` is None."""
    return rotated if keep is None else quant.fp8_round(rotated, KEY_GROUP, keep)
