"""Rotary embedding in one compiled pass that copies the fixed channels and rotates the others."""

from __future__ import annotations

import torch

from birkhoff.kernels.jit import compiled
from birkhoff.kernels.rope.reference import Phases


@compiled
def rope_rows(x, cos, sin, sign, out):
    """Rotate x [p, h, c] by phases [p, r]; `sign` -1 inverts."""
    positions, heads, width = x.shape
    pairs = cos.shape[1]
    fixed = width - 2 * pairs
    for p in range(positions):
        for h in range(heads):
            source, target = x[p, h], out[p, h]
            for k in range(fixed):
                target[k] = source[k]
            for i in range(pairs):
                a, b = source[fixed + 2 * i], source[fixed + 2 * i + 1]
                c, s = cos[p, i], sin[p, i] * sign
                target[fixed + 2 * i] = a * c - b * s
                target[fixed + 2 * i + 1] = a * s + b * c


def rotate(x: torch.Tensor, phases: Phases, inverse: bool = False, own: bool = False) -> torch.Tensor:
    pairs = phases.cos.shape[-1]
    cos = phases.cos.reshape(-1, pairs)
    sin = phases.sin.reshape(-1, pairs)
    fp32 = x.float().reshape(cos.shape[0], -1, x.shape[-1])
    out = torch.empty_like(fp32)
    rope_rows(fp32.numpy(), cos.numpy(), sin.numpy(), -1 if inverse else 1, out.numpy())
    return out.view(x.shape).to(x.dtype)
