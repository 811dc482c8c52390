"""Edit copies of a small random checkpoint through the safetensors library."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from birkhoff.config import V4Config
from birkhoff.weights.layout import model_tensors

SHARD_BYTES = 300_000


def all_tensors(path: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        out.update(load_file(file))
    return out


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], object], index: bool = True) -> Path:
    """Rewrite a checkpoint as one shard after `change` edits its tensors."""
    tensors = all_tensors(path)
    for file in (*path.glob("*.safetensors"), path / "model.safetensors.index.json"):
        file.unlink(missing_ok=True)
    change(tensors)
    shard = "model-00001-of-00001.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / shard)
    if index:
        weight_map = dict.fromkeys(tensors, shard)
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def edit_config(path: Path, **changes: object) -> Path:
    raw = json.loads((path / "config.json").read_text())
    raw.update(changes)
    (path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))
    return path


def random_weights(config: V4Config, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random float32 values for every tensor of a config, and random token tables."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape, storage in model_tensors(config):
        if storage == "ids":
            order = torch.rand(shape[0], config.n_routed_experts, generator=generator)
            out[name] = order.argsort(1)[:, : shape[1]]
        else:
            out[name] = torch.randn(shape, generator=generator) * 10 ** float(
                torch.randn((), generator=generator)
            )
    return out
