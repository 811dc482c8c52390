"""Rotary embedding in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch


class Phases:
    """How far each position turns each pair of channels."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor):
        self.cos = cos
        self.sin = sin

    def view(self, arrange: Callable[[torch.Tensor], torch.Tensor]) -> Phases:
        """The same phases with their leading axes rearranged."""
        return Phases(arrange(self.cos), arrange(self.sin))


def frequencies(
    dim: int, theta: float, factor: float = 1.0, original: int = 0, fast: float = 32.0, slow: float = 1.0
) -> torch.Tensor:
    """Base frequencies; with `original > 0` YaRN slows the long wavelengths by `factor` (section 5)."""
    omega = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
    if original > 0:

        def turns(
            beta: float,
        ) -> float:  # the channel whose wave turns `beta` times within the original length
            return dim * math.log(original / (2 * math.pi * beta)) / (2 * math.log(theta))

        low = max(math.floor(turns(fast)), 0)
        high = min(math.ceil(turns(slow)), dim - 1)
        span = high - low if high != low else 0.001
        blend = ((torch.arange(dim // 2, dtype=torch.float64, device="cpu") - low) / span).clamp(0, 1)
        omega = omega * (1 - blend) + omega / factor * blend
    return omega.float()


def phases(positions: torch.Tensor, omega: torch.Tensor) -> Phases:
    angle = positions.unsqueeze(-1).float() * omega
    return Phases(angle.cos(), angle.sin())


def rotate(x: torch.Tensor, phases: Phases, inverse: bool = False, own: bool = False) -> torch.Tensor:
    cos, sin = phases.cos, phases.sin
    dim = 2 * cos.shape[-1]
    while cos.dim() < x.dim():
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    if inverse:
        sin = -sin
    still, turning = x[..., :-dim], x[..., -dim:].float()
    a, b = turning[..., 0::2], turning[..., 1::2]
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    return torch.cat((still, turned.to(x.dtype)), dim=-1)
