"""Rotary phases of a step: one table for sliding layers, one for compressed layers (spec 5)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from birkhoff.config import V4Config
from birkhoff.kernels import rope
from birkhoff.kernels.rope import Phases

NUMPY_POSITIONS = 64  # up to this many positions of a CPU step are computed with NumPy


@dataclass(frozen=True)
class StepPhases:
    """Phases of the positions of a step, for both families of layers."""

    sliding: Phases
    compressed: Phases


class Rope:
    """Frequencies of both families; plain data, rebuilt from the config on any device."""

    def __init__(self, config: V4Config):
        dim, scaling = config.qk_rope_head_dim, config.rope_scaling
        yarn = (
            ()
            if scaling is None
            else (
                scaling.factor,
                scaling.original_max_position_embeddings,
                scaling.beta_fast,
                scaling.beta_slow,
            )
        )
        self.sliding = rope.frequencies(dim, config.rope_theta)
        self.compressed = rope.frequencies(dim, config.compress_rope_theta, *yarn)
        self._both = torch.stack((self.sliding, self.compressed)).unsqueeze(1)  # [2, 1, r]
        self._on_device: dict[torch.device, torch.Tensor] = {self._both.device: self._both}

    def step(self, positions: torch.Tensor) -> StepPhases:
        """Phases of the positions [n] of a step."""
        if positions.device.type == "cpu" and len(positions) <= NUMPY_POSITIONS:
            # PyTorch starts its threads for 128 numbers, which costs more than a decode step if other cores are busy.
            angle = positions.numpy().astype(np.float32)[:, None] * self._both.numpy()
            both = Phases(torch.from_numpy(np.cos(angle)), torch.from_numpy(np.sin(angle)))
        else:
            both = rope.phases(positions, self._frequencies(positions.device))
        return StepPhases(*(Phases(cos, sin) for cos, sin in zip(both.cos, both.sin)))

    def at(self, positions: torch.Tensor, compressed: bool) -> Phases:
        """Phases of any positions, in one family."""
        return rope.phases(positions, self._frequencies(positions.device)[int(compressed), 0])

    def _frequencies(self, device: torch.device) -> torch.Tensor:
        """Both families [2, 1, r]; copied to a device once, since a copy waits for the work queued there."""
        if device not in self._on_device:
            self._on_device[device] = self._both.to(device)
        return self._on_device[device]
