"""Write a checkpoint in the released layout: names, number formats, shards, index and config.json.

Tensors are given as (name, tensor) pairs in any order, or as a function that returns rows; they are quantised strip by
strip. The shard layout follows from the config alone. Missing, unknown or repeated names, wrong shapes and non-finite
values raise, and a failed run leaves no file behind. config.json is written last, so a directory that has one is
complete; a killed run leaves a list of its shards (`.unfinished.json`), which the next run removes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from birkhoff.atomic_file import write_atomic
from birkhoff.config import V4Config
from birkhoff.errors import OptionError, TensorMissing, TensorShape, TensorUnexpected
from birkhoff.kernels import quant
from birkhoff.option_checks import check_int
from birkhoff.small_file import read_json
from birkhoff.weights.layout import (
    FP8_BLOCK,
    ModelTensor,
    check_formats,
    model_tensors,
    scale_name,
    stored_tensors,
)
from birkhoff.weights.safetensors import SafetensorsWriter
from birkhoff.weights.shard_index import join_names
from birkhoff.weights.tensor_ref import check_experts, check_finite, strips


class Packed(NamedTuple):
    """Rows that are already quantised: codes and E8M0 bytes as stored."""

    codes: torch.Tensor
    scale: torch.Tensor


RowSource = Callable[[str, int, int], "torch.Tensor | Packed"]
SHARD_BYTES = 4 << 30
UNFINISHED = ".unfinished.json"


def write_released(
    path: str | Path,
    config: V4Config,
    tensors: Iterable[tuple[str, torch.Tensor]] | RowSource,
    dense: str = "fp8",
    experts: str = "fp4",
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
    texts: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write a checkpoint and return its files. `tensors` is pairs, or a function `rows(name, start, stop)`.

    `progress` is called with (bytes written, total bytes) after each strip. `texts` are small files by name.
    """
    check_formats(dense, experts)
    check_int("shard_bytes", shard_bytes)
    path = Path(path)
    _remove_unfinished(path)
    if path.is_file() or (path.is_dir() and any(path.glob("*.safetensors"))):
        raise OptionError(f"{path} already holds a checkpoint. Choose another directory or remove it first.")
    shards = _CheckpointWriter(path, config, dense, experts, shard_bytes)
    small: dict[str, str] = {}
    path.mkdir(parents=True, exist_ok=True)
    try:
        write_atomic(path / UNFINISHED, json.dumps([file.name for file in shards.files]))
        source = (
            _from_rows(shards.tensors, tensors) if callable(tensors) else _from_pairs(shards.tensors, tensors)
        )
        for tensor, start, rows in source:
            shards.write(tensor, start, rows)
            if progress is not None:
                progress(shards.written_bytes, shards.total_bytes)
        small = {
            **(texts or {}),
            "model.safetensors.index.json": json_text(shards.index()),
            "config.json": json_text(released_config(config, dense, experts)),
        }
        for name, text in small.items():
            write_atomic(path / name, text)
    except BaseException:
        shards.discard()
        for name in (UNFINISHED, *small):
            (path / name).unlink(missing_ok=True)
        raise
    (path / UNFINISHED).unlink()
    return [*shards.files, *(path / name for name in small)]


def _remove_unfinished(path: Path) -> None:
    """Delete the shards that a killed run left in a directory that is no checkpoint yet."""
    if not (path / UNFINISHED).is_file():
        return
    if not (path / "config.json").exists():  # written last
        try:
            names = read_json(path / UNFINISHED)
        except (OSError, ValueError, RecursionError):
            names = []
        for name in names if isinstance(names, list) else []:
            if isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors"):
                for file in (path / name, path / f"{name}.partial"):
                    file.unlink(missing_ok=True)
    (path / UNFINISHED).unlink()


def released_config(config: V4Config, dense: str = "fp8", experts: str = "fp4") -> dict[str, Any]:
    """Return config.json as the release spells it, including how the weights are stored."""
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


def pack_shards(config: V4Config, dense: str, experts: str, shard_bytes: int) -> list[list[ModelTensor]]:
    """Split a model's tensors, in reading order, into shards; a matrix and its scale share a shard."""
    shards: list[list[ModelTensor]] = [[]]
    filled = 0
    for tensor in model_tensors(config):
        size = sum(stored.nbytes for _, stored in stored_tensors(tensor, dense, experts))
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
    return shards


def shard_path(path: Path, index: int, count: int) -> Path:
    """Return the file of shard `index`, counted from 0, of `count`."""
    return path / f"model-{index + 1:05}-of-{count:05}.safetensors"


def index_json(weight_map: dict[str, str], total_bytes: int) -> dict[str, Any]:
    """Return model.safetensors.index.json: the shard of each stored tensor, and their total size."""
    return {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}


def json_text(value: dict[str, Any]) -> str:
    """Format a JSON file as the release does."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


class _CheckpointWriter:
    """The shard of every tensor, and the files being written."""

    def __init__(self, path: Path, config: V4Config, dense: str, experts: str, shard_bytes: int):
        self.experts = config.n_routed_experts
        shards = pack_shards(config, dense, experts, shard_bytes)
        self.tensors = {tensor.name: tensor for shard in shards for tensor in shard}
        self.files = [shard_path(path, index, len(shards)) for index in range(len(shards))]
        self._headers: list[dict[str, tuple[str, tuple[int, ...]]]] = []  # name -> (dtype, shape), per shard
        self._left: list[int] = []  # bytes not yet written, per shard
        self._shard_of: dict[str, int] = {}
        for index, shard in enumerate(shards):
            stored = [pair for tensor in shard for pair in stored_tensors(tensor, dense, experts)]
            self._headers.append({name: (tensor.dtype, tensor.shape) for name, tensor in stored})
            self._left.append(sum(tensor.nbytes for _, tensor in stored))
            self._shard_of |= {name: index for name, _ in stored}
        self._writers: dict[int, SafetensorsWriter] = {}
        self.total_bytes = sum(self._left)

    @property
    def written_bytes(self) -> int:
        return self.total_bytes - sum(self._left)

    def write(self, tensor: ModelTensor, start: int, rows: torch.Tensor | Packed) -> None:
        """Quantise and store rows of one tensor, from row `start`."""
        name = tensor.name
        shard = self._shard_of[name]
        dtype = self._headers[shard][name][0]
        if shard not in self._writers:
            self._writers[shard] = SafetensorsWriter(
                self.files[shard], self._headers[shard], {"format": "pt"}
            )
        if isinstance(rows, Packed) or dtype in ("F8_E4M3", "I8"):
            block = FP8_BLOCK if dtype == "F8_E4M3" else 1
            codes, scale = rows if isinstance(rows, Packed) else self._quantise(name, start, rows, dtype)
            self._store(shard, name, codes, start)
            self._store(shard, scale_name(name), scale, start // block)
        elif tensor.storage == "ids":
            check_experts(name, rows, self.experts, start)
            self._store(shard, name, rows.to(torch.int64), start)
        else:
            values = rows.to(torch.bfloat16 if dtype == "BF16" else torch.float32)
            check_finite(name, values, start)
            self._store(shard, name, values, start)
        if not self._left[shard]:
            self._writers[shard].close()

    @staticmethod
    def _quantise(name: str, start: int, rows: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
        check_finite(name, rows, start)
        if dtype == "F8_E4M3":
            return quant.quant_fp8(rows)
        codes, scale = quant.quant_fp4(rows)
        return codes.view(torch.int8), scale

    def _store(self, shard: int, name: str, rows: torch.Tensor, start: int) -> None:
        self._writers[shard].write(name, rows, start)
        self._left[shard] -= rows.nbytes

    def discard(self) -> None:
        """Delete every file written so far."""
        for shard, writer in self._writers.items():
            if self._left[shard]:
                writer.discard()
            self.files[shard].unlink(missing_ok=True)

    def index(self) -> dict[str, Any]:
        assert not any(self._left), "every shard closes with its last tensor"
        weight_map = {name: self.files[shard].name for name, shard in self._shard_of.items()}
        return index_json(weight_map, self.total_bytes)


def _from_rows(
    tensors: dict[str, ModelTensor], rows: RowSource
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
            f"{len(left)} tensors of the config were not given: {join_names(list(left))}. Nothing was kept."
        )
