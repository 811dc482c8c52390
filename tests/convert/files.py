"""Compare checkpoints tensor by tensor; bytes are read with the safetensors library."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from birkhoff.convert.check import tensor_values
from birkhoff.weights.checkpoint import open_checkpoint
from birkhoff.weights.layout import model_tensors


def stored_tensors(path: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        out.update(load_file(file))
    return out


def same_bytes(first: Path, second: Path) -> list[str]:
    """Return the names of stored tensors whose bytes differ."""
    ours, theirs = stored_tensors(first), stored_tensors(second)
    assert ours.keys() == theirs.keys()
    return [
        name
        for name, tensor in ours.items()
        if tensor.dtype != theirs[name].dtype or not torch.equal(_bytes(tensor), _bytes(theirs[name]))
    ]


def same_numbers(first: Path, second: Path) -> list[str]:
    """Return the names of tensors whose values differ."""
    ours, theirs = open_checkpoint(first), open_checkpoint(second)
    out = []
    for tensor in model_tensors(ours.config):
        a, b = (
            tensor_values(ours, tensor, 0, tensor.shape[0]),
            tensor_values(theirs, tensor, 0, tensor.shape[0]),
        )
        if not torch.equal(a, b):
            out.append(tensor.name)
    return out


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
