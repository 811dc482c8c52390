"""Rotary embedding in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch


class Phases:
    """Rotation angle of each pair of channels at each position, as cos and sin."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor):
        self.cos = cos
        self.sin = sin

    def view(self, arrange: Callable[[torch.Tensor], torch.Tensor]) -> Phases:
        """The same phases with `arrange` applied to cos and sin (leading axes only)."""
        return Phases(arrange(self.cos), arrange(self.sin))


def frequencies(
    dim: int, theta: float, factor: float = 1.0, original: int = 0, fast: float = 32.0, slow: float = 1.0
) -> torch.Tensor:
    """Base frequencies; with `original > 0` YaRN divides the low frequencies by `factor` (section 5)."""
    omega = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
    if original > 0:

        def channel_of(beta: float) -> float:
            """The channel whose wave completes `beta` turns within the original length."""
            return dim * math.log(original / (2 * math.pi * beta)) / (2 * math.log(theta))

        low = max(math.floor(channel_of(fast)), 0)
        high = min(math.ceil(channel_of(slow)), dim - 1)
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
    fixed, rotating = x[..., :-dim], x[..., -dim:].float()
    a, b = rotating[..., 0::2], rotating[..., 1::2]
    rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    return torch.cat((fixed, rotated.to(x.dtype)), dim=-1)
