"""Rotation as one complex product, in place of a dozen small operations."""

from __future__ import annotations

import torch


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    dim = 2 * cos.shape[-1]
    turn = torch.complex(cos, -sin if inverse else sin)
    while turn.dim() < x.dim():
        turn = turn.unsqueeze(-2)
    if x.dtype is torch.float32:
        out = x.clone(memory_format=torch.contiguous_format)
        torch.view_as_complex(out[..., -dim:].unflatten(-1, (-1, 2))).mul_(turn)
        return out
    turned = torch.view_as_complex(x[..., -dim:].float().unflatten(-1, (-1, 2))) * turn
    out = x.clone(memory_format=torch.contiguous_format)
    out[..., -dim:] = torch.view_as_real(turned).flatten(-2)
    return out
