"""Writing a checkpoint in the released layout: names, number formats, shards, index and config.json.

Tensors come either as (name, tensor) pairs in any order or from a function asked for rows, and leave quantised strip
by strip; the shards are laid out beforehand from the config alone. A name too few, too many or twice, a wrong shape
and a number that is not finite are refused, and a failed run leaves no file behind. config.json is written last, so
a directory that has one is complete.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from birkhoff.config import V4Config
from birkhoff.errors import OptionError, TensorMissing, TensorShape, TensorUnexpected
from birkhoff.kernels import quant
from birkhoff.weights.layout import (
    FP8_BLOCK,
    ModelTensor,
    check_formats,
    model_tensors,
    scale_name,
    stored_as,
)
from birkhoff.weights.safetensors import SafetensorsWriter, item_bytes, write_text
from birkhoff.weights.shard_index import some
from birkhoff.weights.tensor_ref import check_experts, check_finite, strips


class Packed(NamedTuple):
    """Rows that are already quantised: codes and E8M0 bytes as they will lie in the file."""

    codes: torch.Tensor
    scale: torch.Tensor


Rows = Callable[[str, int, int], "torch.Tensor | Packed"]
SHARD_BYTES = 4 << 30


def write_released(
    path: str | Path,
    config: V4Config,
    tensors: Iterable[tuple[str, torch.Tensor]] | Rows,
    dense: str = "fp8",
    experts: str = "fp4",
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Write a checkpoint and return its files. `tensors` are pairs, or `rows(name, start, stop)` for strips of each.

    `progress` is called with (bytes written, bytes in all) after each tensor.
    """
    check_formats(dense, experts)
    if type(shard_bytes) is not int or shard_bytes < 1:
        raise OptionError(f"shard_bytes is {shard_bytes!r}, expected a positive number of bytes.")
    path = Path(path)
    if path.is_file() or (path.is_dir() and any(path.glob("*.safetensors"))):
        raise OptionError(f"{path} already holds a checkpoint. Choose another directory or remove it first.")
    shards = _ShardLayout(path, config, dense, experts, shard_bytes)
    path.mkdir(parents=True, exist_ok=True)
    try:
        source = (
            _from_rows(shards.tensors, tensors) if callable(tensors) else _from_pairs(shards.tensors, tensors)
        )
        for tensor, start, rows in source:
            shards.write(tensor, start, rows)
            if progress is not None:
                progress(shards.written_bytes, shards.total_bytes)
        shards.close()
    except BaseException:
        shards.discard()
        raise
    write_text(path / "model.safetensors.index.json", _json(shards.index()))
    write_text(path / "config.json", _json(released_config(config, dense, experts)))
    return [*shards.files, path / "model.safetensors.index.json", path / "config.json"]


def released_config(config: V4Config, dense: str = "fp8", experts: str = "fp4") -> dict[str, Any]:
    """config.json in the released spelling, saying how the weights are stored."""
    fp8 = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    }
    quantised = "fp8" in (dense, experts)
    out = replace(
        config,
        quantization_config=fp8 if quantised else None,
        expert_dtype=experts if experts in ("fp4", "fp8") else None,
    ).to_dict()
    return {**out, "torch_dtype": "float32" if dense == "f32" else "bfloat16"}


class _ShardLayout:
    """Where every tensor will lie, and the files being written."""

    def __init__(self, path: Path, config: V4Config, dense: str, experts: str, shard_bytes: int):
        self.path = path
        self.experts = config.n_routed_experts
        self.tensors = {tensor.name: tensor for tensor in model_tensors(config)}
        self.total_bytes = 0
        self.written_bytes = 0
        layout: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
        self._shard_of: dict[str, int] = {}
        filled = 0
        for tensor in self.tensors.values():
            stored = stored_as(tensor, dense, experts)
            size = sum(math.prod(shape) * item_bytes(dtype) for _, (shape, dtype, _) in stored)
            if layout[-1] and filled + size > shard_bytes:
                layout.append({})
                filled = 0
            filled += size
            self.total_bytes += size
            for name, (shape, dtype, _) in stored:
                layout[-1][name] = (dtype, shape)
                self._shard_of[name] = len(layout) - 1
        self._layout = layout
        self.files = [
            path / f"model-{i:05}-of-{len(layout):05}.safetensors" for i in range(1, len(layout) + 1)
        ]
        self._writers: dict[int, SafetensorsWriter] = {}
        self._left = [
            sum(math.prod(shape) * item_bytes(dtype) for dtype, shape in shard.values()) for shard in layout
        ]

    def write(self, tensor: ModelTensor, start: int, rows: torch.Tensor | Packed) -> None:
        """Quantise and store some rows of one tensor."""
        name = tensor.name
        number = self._shard_of[name]
        dtype = self._layout[number][name][0]
        if number not in self._writers:
            self._writers[number] = SafetensorsWriter(
                self.files[number], self._layout[number], {"format": "pt"}
            )
        before = self._left[number]
        if isinstance(rows, Packed) or dtype in ("F8_E4M3", "I8"):
            block = FP8_BLOCK if dtype == "F8_E4M3" else 1
            codes, scale = rows if isinstance(rows, Packed) else self._quantise(name, start, rows, dtype)
            self._store(number, name, codes, start)
            self._store(number, scale_name(name), scale, start // block)
        elif tensor.storage == "ids":
            check_experts(name, rows, self.experts, start)
            self._store(number, name, rows.to(torch.int64), start)
        else:
            values = rows.to(torch.bfloat16 if dtype == "BF16" else torch.float32)
            check_finite(name, values, start)
            self._store(number, name, values, start)
        self.written_bytes += before - self._left[number]
        if not self._left[number]:
            self._writers[number].close()

    @staticmethod
    def _quantise(name: str, start: int, rows: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
        check_finite(name, rows, start)
        if dtype == "F8_E4M3":
            return quant.quant_fp8(rows)
        codes, scale = quant.quant_fp4(rows)
        return codes.view(torch.int8), scale

    def _store(self, number: int, name: str, rows: torch.Tensor, start: int) -> None:
        self._writers[number].write(name, rows, start)
        self._left[number] -= rows.nbytes

    def close(self) -> None:
        assert not any(self._left), "every shard closes with its last tensor"

    def discard(self) -> None:
        for number, writer in self._writers.items():
            if self._left[number]:
                writer.discard()
            self.files[number].unlink(missing_ok=True)

    def index(self) -> dict[str, Any]:
        where = {name: self.files[number].name for name, number in sorted(self._shard_of.items())}
        return {"metadata": {"total_size": self.total_bytes}, "weight_map": where}


def _from_rows(
    tensors: dict[str, ModelTensor], rows: Rows
) -> Iterator[tuple[ModelTensor, int, torch.Tensor | Packed]]:
    for tensor in tensors.values():
        for start, stop in strips(tensor.shape):
            yield tensor, start, rows(tensor.name, start, stop)


def _from_pairs(
    tensors: dict[str, ModelTensor], pairs: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[ModelTensor, int, torch.Tensor]]:
    left = dict(tensors)
    for name, values in pairs:
        tensor = left.pop(name, None)
        if tensor is None:
            again = "was given twice" if name in tensors else "is not a tensor of this model"
            raise TensorUnexpected(f"{name} {again}. Give every tensor of the config once, without scales.")
        if tuple(values.shape) != tensor.shape:
            raise TensorShape(f"{name} is {tuple(values.shape)}, expected {tensor.shape} from the config.")
        for start, stop in strips(tensor.shape):
            yield tensor, start, values[start:stop].detach()
    if left:
        raise TensorMissing(
            f"{len(left)} tensors of the config were not given: {some(list(left))}. Nothing was kept."
        )


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
