"""Lazy references to the tensors of GGUF files under released names.

Plain floats and integers are returned as stored. MXFP4 is returned as the release's FP4, codes and scales as separate
tensors, so that packed loading and lossless conversion work as for safetensors. All other block types are decoded to
float32, with `encoding` set to the stored type. A stack of experts becomes one reference per expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from birkhoff.errors import CheckpointError, TensorShape
from birkhoff.weights.gguf_blocks import GROUP, decode, unpack_mxfp4
from birkhoff.weights.gguf_names import ReleasedName, to_released
from birkhoff.weights.layout import scale_name
from birkhoff.weights.safetensors import TORCH_DTYPES, read_exactly
from birkhoff.weights.shard_index import ErrorHandler
from birkhoff.weights.tensor_ref import STRIP_BYTES, TensorRef

PLAIN = ("F32", "F16", "BF16", "I32", "I64", "I8", "I16")
MAX_EXPERTS = 65_536


class GGUFTensor(NamedTuple):
    """One tensor of one file. `shape` is outermost first; `offset` is in bytes from the start of the file."""

    path: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GGUFSlice(NamedTuple):
    """Rows of a tensor: one expert of a stack, or all. `columns` selects a column range."""

    tensor: GGUFTensor
    shape: tuple[int, ...]
    offset: int
    columns: tuple[int, int] | None = None

    @property
    def row_bytes(self) -> int:
        rows = 1
        for size in self.tensor.shape[:-1]:
            rows *= size
        return self.tensor.nbytes // rows

    def raw(self, start: int, stop: int) -> torch.Tensor:
        """Read rows as bytes, [rows, row bytes]."""
        size = self.row_bytes
        out = torch.empty((stop - start, size), dtype=torch.uint8)
        read_exactly(self.tensor.path, self.offset + start * size, out.view(-1).numpy().data)
        return out


class GGUFRefs(Mapping[str, TensorRef]):
    """Mapping from released names to references; `source` returns the GGUF tensor that holds one."""

    def __init__(self) -> None:
        self._sources: dict[str, tuple[str, GGUFSlice]] = {}
        self._memo: dict[str, tuple[int, int, tuple[torch.Tensor, torch.Tensor]]] = {}

    def add(self, name: str, part: GGUFSlice, on_error: ErrorHandler) -> None:
        kind = part.tensor.kind
        if name in self._sources:
            on_error(
                CheckpointError(
                    f"{name} is in {self._sources[name][1].tensor.path.name} and again in {part.tensor.path.name}. "
                    "Keep the files of one model only."
                )
            )
            return
        if kind == "MXFP4" and len(part.shape) == 2 and part.columns is None and name.endswith(".weight"):
            self._sources[name] = ("codes", part)
            self._sources[scale_name(name)] = ("scale", part)
        else:
            self._sources[name] = ("plain" if kind in PLAIN else "decoded", part)

    def source(self, name: str) -> GGUFTensor:
        return self._sources[name][1].tensor

    def __getitem__(self, name: str) -> TensorRef:
        storage, part = self._sources[name]
        kind, shape = part.tensor.kind, part.shape
        if part.columns is not None:
            shape = (shape[0], part.columns[1] - part.columns[0])
        rows = 1 if len(part.shape) == 1 else part.shape[0]
        nbytes = rows * part.row_bytes * shape[-1] // part.shape[-1]
        where = None if part.columns is not None else (part.tensor.path, part.offset)
        if storage == "codes":
            stored = (shape[0], shape[1] // 2)
            reader = partial(self._fp4, part, 0)
            return TensorRef(name, "I8", stored, stored[0] * stored[1], reader, kind, location=where)
        if storage == "scale":
            stored = (shape[0], shape[1] // GROUP)
            return TensorRef(
                name, "F8_E8M0", stored, stored[0] * stored[1], partial(self._fp4, part, 1), kind
            )
        if storage == "decoded":
            return TensorRef(name, "F32", shape, nbytes, partial(_decoded, part), kind, location=where)
        return TensorRef(name, kind, shape, nbytes, partial(_plain, part), location=where)

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def _fp4(self, part: GGUFSlice, output: int, start: int, stop: int) -> torch.Tensor:
        """Return codes (0) or scales (1). Both are usually read for the same rows, so the last blocks are cached."""
        key = f"{part.tensor.path}:{part.offset}"
        cached = self._memo.get(key)
        if cached is None or cached[:2] != (start, stop):
            both = unpack_mxfp4(part.raw(start, stop))
            if both[0].nbytes > 2 * STRIP_BYTES:
                return both[output]
            self._memo.clear()
            self._memo[key] = cached = (start, stop, both)
        return cached[2][output]


def add_tensors(
    tensors: list[GGUFTensor], trunk_layers: int, mtp_file: bool, refs: GGUFRefs, on_error: ErrorHandler
) -> list[str]:
    """Add the tensors of one file to `refs`; return the names skipped because they are copies.

    Root tensors of an MTP file are copies of the trunk's, except the head mixer.
    """
    copies: list[str] = []
    has_head = any(".nextn.hc_head_fn." in tensor.name for tensor in tensors)
    for tensor in tensors:
        released = to_released(tensor.name, trunk_layers)
        if released is None:
            refs.add(tensor.name, GGUFSlice(tensor, tensor.shape, tensor.offset), on_error)
            continue
        ours = released.ours
        if mtp_file and not ours.startswith("mtp."):
            if not ours.startswith("hc_head_") or has_head:
                copies.append(tensor.name)
                continue
            ours = f"mtp.0.{ours}"
        _add(tensor, ours, released, refs, on_error)
    return copies


def _add(
    tensor: GGUFTensor, ours: str, released: ReleasedName, refs: GGUFRefs, on_error: ErrorHandler
) -> None:
    shape = tensor.shape
    if released.halves:
        if len(shape) != 2 or shape[1] % 2:
            on_error(TensorShape(f"{tensor.name} is {shape}, expected two square matrices side by side."))
            return
        half = shape[1] // 2
        for prefix, columns in (("e", (0, half)), ("h", (half, 2 * half))):
            refs.add(ours.format(prefix), GGUFSlice(tensor, shape, tensor.offset, columns), on_error)
    elif released.stacked:
        if len(shape) != 3 or shape[0] > MAX_EXPERTS:
            on_error(
                TensorShape(
                    f"{tensor.name} is {shape}, expected one matrix for each of up to {MAX_EXPERTS} experts."
                )
            )
            return
        size = tensor.nbytes // shape[0]
        for expert in range(shape[0]):
            refs.add(
                ours.format(expert), GGUFSlice(tensor, shape[1:], tensor.offset + expert * size), on_error
            )
    elif len(shape) == 3 and ours.endswith(
        "wo_a.weight"
    ):  # one matrix per head group, stacked: the same bytes
        refs.add(ours, GGUFSlice(tensor, (shape[0] * shape[1], shape[2]), tensor.offset), on_error)
    else:
        refs.add(ours, GGUFSlice(tensor, shape, tensor.offset), on_error)


def _plain(part: GGUFSlice, start: int, stop: int) -> torch.Tensor:
    dtype = TORCH_DTYPES[part.tensor.kind]
    if len(part.shape) == 1:
        out = torch.empty(stop - start, dtype=dtype)
        where = part.offset + start * dtype.itemsize
        read_exactly(part.tensor.path, where, out.view(torch.uint8).numpy().data)
        return out
    rows = part.raw(start, stop).view(dtype).view(stop - start, *part.shape[1:])
    return _columns(part, rows)


def _decoded(part: GGUFSlice, start: int, stop: int) -> torch.Tensor:
    if len(part.shape) == 1:
        return decode(part.raw(0, 1), part.tensor.kind, part.tensor.name).view(-1)[start:stop]
    return _columns(part, decode(part.raw(start, stop), part.tensor.kind, part.tensor.name))


def _columns(part: GGUFSlice, rows: torch.Tensor) -> torch.Tensor:
    return rows if part.columns is None else rows[:, slice(*part.columns)].contiguous()
