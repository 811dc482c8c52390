"""The input of a sublayer read from the streams and normalised, in plain PyTorch.

Beside `reference`, which imports no other operation, so that the layer alone (`birkhoff/mhc.py`) needs nothing else.
"""

from __future__ import annotations

import torch

from birkhoff.kernels.mhc.reference import read
from birkhoff.kernels.norm.reference import norm_input
from birkhoff.kernels.quant.rounded_rows import Input


def read_input(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    iters: int,
    eps: float,
    rms_eps: float,
    norm: torch.Tensor,
    norm_eps: float,
    released: bool,
    inner: int | None = None,
) -> tuple[Input, torch.Tensor, torch.Tensor]:
    u, _, post, mix = read(streams, fn, base, scale, iters, eps, rms_eps)
    return norm_input(u, norm, norm_eps, released, inner), post, mix
