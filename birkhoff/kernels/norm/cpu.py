"""RMSNorm as one compiled pass over the rows. Few rows have the bits of the native layers of a decode step."""

from __future__ import annotations

import numpy as np
import torch

from birkhoff.kernels.jit import compiled
from birkhoff.kernels.norm.reference import round_key
from birkhoff.kernels.packed import native
from birkhoff.kernels.quant.rounded_rows import Input
from birkhoff.kernels.rope.cpu import rotate
from birkhoff.kernels.rope.reference import Phases

NO_WEIGHT = np.ones(0, np.float32)
MAX_NATIVE_ROWS = 24


@compiled
def rms_norm_rows(x, weight, eps, out):
    count, width = x.shape
    for row in range(count):
        source = x[row]
        target = out[row]
        total = np.float32(0)
        for k in range(width):
            total += source[k] * source[k]
        rho = np.float32(1 / np.sqrt(total / width + eps))
        if weight.shape[0]:
            for k in range(width):
                target[k] = source[k] * rho * weight[k]
        else:
            for k in range(width):
                target[k] = source[k] * rho


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    fp32 = x if x.dtype is torch.float32 and x.dim() == 2 else x.float().reshape(-1, x.shape[-1])
    fp32 = fp32.contiguous()
    if len(fp32) <= MAX_NATIVE_ROWS and native.available():
        result = native.rms_norm(fp32, weight, eps)
    else:
        result = torch.empty_like(fp32)
        weights = NO_WEIGHT if weight is None else weight.numpy()
        rms_norm_rows(fp32.numpy(), weights, np.float32(eps), result.numpy())
    return result if fp32 is x else result.view(x.shape).to(x.dtype)


def norm_input(
    x: torch.Tensor, weight: torch.Tensor, eps: float, released: bool, inner: int | None = None
) -> Input:
    return rms_norm(x, weight, eps)


def norm_rotate(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, phases: Phases, keep: int | None = None
) -> torch.Tensor:
    return round_key(rotate(rms_norm(x, weight, eps), phases), keep)
