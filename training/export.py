"""Write the shipped directory: released layout, tokenizer, generation defaults, measurements.

Weights are written by `birkhoff.weights.write_released`: routed experts FP4, dense matrices FP8, the rest bf16 or
float32, in shards under 16 MiB. `load_named` reads such a directory back under the names of the training forward,
exactly dequantised, so that evaluation uses what is on disk.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from birkhoff.config import V4Config
from birkhoff.weights import load_into, open_checkpoint, write_released
from birkhoff.weights.layout import model_tensors
from training.parameters import Store

SHARD_BYTES = 15 << 20  # of tensor data; the header of a shard with a thousand tensors adds about 150 kB
GENERATION = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "do_sample": True,
    "temperature": 0.8,
    "top_k": 40,
    "max_new_tokens": 400,
}


def released_pairs(tensors: dict[str, Tensor], config: V4Config) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the model once, by released name, with experts unstacked."""
    for tensor in model_tensors(config):
        yield tensor.name, _pick(tensors, tensor.name).cpu()


def _pick(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Return a tensor by released name; a routed expert is one slice of its stack."""
    if name in tensors:
        return tensors[name]
    head, expert, part, _ = name.rsplit(".", 3)
    return tensors[f"{head}.{part}"][int(expert)]


def export(
    folder: str | Path,
    config: V4Config,
    tensors: dict[str, Tensor],
    tokenizer: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Write a checkpoint from `Store.export()` tensors; return the files written."""
    folder = Path(folder)
    files = list(write_released(folder, config, released_pairs(tensors, config), shard_bytes=shard_bytes))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if tokenizer is not None:
            files.append(Path(shutil.copy(Path(tokenizer) / name, folder / name)))
    defaults = folder / "generation_config.json"
    defaults.write_text(json.dumps(GENERATION, indent=2) + "\n", encoding="utf-8")
    return [*files, defaults]


class _Target(NamedTuple):
    """A destination of `load_into`: a tensor, or one expert of a stack."""

    name: str
    tensor: Tensor
    kind: str


def load_named(folder: str | Path) -> tuple[V4Config, dict[str, Tensor]]:
    """Read a released directory as float32 tensors under training names, exactly dequantised."""
    checkpoint = open_checkpoint(Path(folder))
    out = Store(checkpoint.config).export()

    def targets() -> Iterator[_Target]:
        for tensor in model_tensors(checkpoint.config):
            yield _Target(tensor.name, _pick(out, tensor.name), "ids" if tensor.storage == "ids" else "value")

    load_into(targets(), checkpoint)
    return checkpoint.config, out
