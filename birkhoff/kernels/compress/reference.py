"""Gated pooling in plain PyTorch."""

from __future__ import annotations

import torch


def pool(values: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    return (gates.softmax(dim=-2) * values).sum(dim=-2)
