"""Rotation as one compiled pass that copies the still channels and turns the others."""

from __future__ import annotations

import torch

from birkhoff.kernels.jit import compiled
from birkhoff.kernels.rope.reference import Phases


@compiled
def turn(x, cos, sin, sign, out):
    """x [p, h, c] by phases [p, r]."""
    positions, heads, width = x.shape
    pairs = cos.shape[1]
    still = width - 2 * pairs
    for p in range(positions):
        for h in range(heads):
            source, target = x[p, h], out[p, h]
            for k in range(still):
                target[k] = source[k]
            for i in range(pairs):
                a, b = source[still + 2 * i], source[still + 2 * i + 1]
                c, s = cos[p, i], sin[p, i] * sign
                target[still + 2 * i] = a * c - b * s
                target[still + 2 * i + 1] = a * s + b * c


def rotate(x: torch.Tensor, phases: Phases, inverse: bool = False, own: bool = False) -> torch.Tensor:
    pairs = phases.cos.shape[-1]
    cos = phases.cos.reshape(-1, pairs)
    sin = phases.sin.reshape(-1, pairs)
    wide = x.float().reshape(cos.shape[0], -1, x.shape[-1])
    out = torch.empty_like(wide)
    turn(wide.numpy(), cos.numpy(), sin.numpy(), -1 if inverse else 1, out.numpy())
    return out.view(x.shape).to(x.dtype)
