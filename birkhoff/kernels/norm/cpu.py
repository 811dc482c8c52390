"""RMSNorm as one compiled pass over the rows."""

from __future__ import annotations

import numpy as np
import torch

from birkhoff.kernels.jit import compiled

NO_WEIGHT = np.ones(0, np.float32)


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
    out = np.empty(fp32.shape, np.float32)
    rms_norm_rows(
        fp32.contiguous().numpy(), NO_WEIGHT if weight is None else weight.numpy(), np.float32(eps), out
    )
    result = torch.from_numpy(out)
    return result if fp32 is x else result.view(x.shape).to(x.dtype)
