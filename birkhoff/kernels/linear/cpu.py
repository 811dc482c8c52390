"""The product on a CPU: oneDNN for large float32 weights, PyTorch's own choice for the rest.

Measured on two cores of a Zen 4 server, weights not in cache, one row: 1024 x 384 takes 150 us through BLAS (one
core, 10 GB/s) and 70 us through oneDNN; 4096 x 384 takes 570 us and 180 us. Its call costs 15 us more, so small
weights stay with BLAS.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from birkhoff.kernels.linear import reference

LARGE = 98_304  # elements of a weight from which oneDNN's call pays


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if weight.dtype is torch.float32 and weight.numel() >= LARGE and ONEDNN is not None:
        return ONEDNN(x, weight, None, "none", [], "")
    return F.linear(x, weight)


def _find_onednn():
    """oneDNN's linear op, if this build has it and it agrees with the plain product."""
    try:
        op = torch.ops.mkldnn._linear_pointwise
        x, weight = torch.linspace(-1, 1, 12).view(2, 6), torch.linspace(-2, 1, 30).view(5, 6)
        same = torch.allclose(op(x, weight, None, "none", [], ""), reference.linear(x, weight), atol=1e-5)
    except (AttributeError, RuntimeError):
        return None
    return op if same else None


ONEDNN = _find_onednn()
