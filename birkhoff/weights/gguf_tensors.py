"""Tensors of GGUF files as references under our names, decoded when their rows are asked for.

Plain floats and whole numbers are handed out as they lie. MXFP4 is handed out as the release's FP4: codes and scales
under their own names, so that packed loading and lossless conversion work as they do for safetensors. Every other block
type is handed out as float32, `encoding` telling what it was. A stack of experts is one reference per expert.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from birkhoff.errors import CheckpointError, TensorShape
from birkhoff.weights.gguf_blocks import GROUP, decode, unpack_mxfp4
from birkhoff.weights.gguf_names import GGUFMeaning, meaning
from birkhoff.weights.layout import scale_name
from birkhoff.weights.safetensors import TORCH_DTYPES
from birkhoff.weights.shard_index import Complain
from birkhoff.weights.tensor_ref import STRIP_BYTES, TensorRef

PLAIN = ("F32", "F16", "BF16", "I32", "I64", "I8", "I16")
MAX_EXPERTS = 65_536


class GGUFTensor(NamedTuple):
    """One tensor of one file; `shape` is outermost first, `offset` counts from the start of the file."""

    path: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Matrix(NamedTuple):
    """Some rows of a tensor: one expert of a stack, or all of it. `columns` keeps a part of every row."""

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
        """Bytes [rows, row bytes]."""
        size = self.row_bytes
        out = torch.empty((stop - start, size), dtype=torch.uint8)
        read_exactly(self.tensor.path, self.offset + start * size, out.view(-1).numpy().data)
        return out


class References(Mapping[str, TensorRef]):
    """Our names -> references; `source` tells in which GGUF tensor each lies."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[str, Matrix]] = {}
        self._memo: dict[str, tuple[int, int, tuple[torch.Tensor, torch.Tensor]]] = {}

    def add(self, name: str, matrix: Matrix, complain: Complain) -> None:
        kind = matrix.tensor.kind
        if name in self._made:
            complain(
                CheckpointError(
                    f"{name} is in {self._made[name][1].tensor.path.name} and again in {matrix.tensor.path.name}. "
                    "Keep the files of one model only."
                )
            )
            return
        if kind == "MXFP4" and len(matrix.shape) == 2 and matrix.columns is None and name.endswith(".weight"):
            self._made[name] = ("codes", matrix)
            self._made[scale_name(name)] = ("scale", matrix)
        else:
            self._made[name] = ("plain" if kind in PLAIN else "decoded", matrix)

    def source(self, name: str) -> GGUFTensor:
        return self._made[name][1].tensor

    def __getitem__(self, name: str) -> TensorRef:
        how, matrix = self._made[name]
        kind, shape = matrix.tensor.kind, matrix.shape
        if matrix.columns is not None:
            shape = (shape[0], matrix.columns[1] - matrix.columns[0])
        rows = 1 if len(matrix.shape) == 1 else matrix.shape[0]
        nbytes = rows * matrix.row_bytes * shape[-1] // matrix.shape[-1]
        if how == "codes":
            stored = (shape[0], shape[1] // 2)
            return TensorRef(name, "I8", stored, stored[0] * stored[1], partial(self._fp4, matrix, 0), kind)
        if how == "scale":
            stored = (shape[0], shape[1] // GROUP)
            return TensorRef(
                name, "F8_E8M0", stored, stored[0] * stored[1], partial(self._fp4, matrix, 1), kind
            )
        if how == "decoded":
            return TensorRef(name, "F32", shape, nbytes, partial(_decoded, matrix), kind)
        return TensorRef(name, kind, shape, nbytes, partial(_plain, matrix))

    def __contains__(self, name: object) -> bool:
        return name in self._made

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)

    def _fp4(self, matrix: Matrix, part: int, start: int, stop: int) -> torch.Tensor:
        """Codes and scales of the same rows are asked for one after the other: the blocks are read once for both."""
        key = f"{matrix.tensor.path}:{matrix.offset}"
        held = self._memo.get(key)
        if held is None or held[:2] != (start, stop):
            both = unpack_mxfp4(matrix.raw(start, stop))
            if both[0].nbytes > 2 * STRIP_BYTES:
                return both[part]
            self._memo.clear()
            self._memo[key] = held = (start, stop, both)
        return held[2][part]


def refer(
    tensors: list[GGUFTensor], trunk_layers: int, mtp_file: bool, references: References, complain: Complain
) -> list[str]:
    """Add the tensors of one file. In an MTP file the root names are copies, but for the head mixer, which is its own.

    Returns the names that were left out because they are copies.
    """
    copies: list[str] = []
    own_head = any(".nextn.hc_head_fn." in tensor.name for tensor in tensors)
    for tensor in tensors:
        what = meaning(tensor.name, trunk_layers)
        if what is None:
            references.add(tensor.name, Matrix(tensor, tensor.shape, tensor.offset), complain)
            continue
        ours = what.ours
        if mtp_file and not ours.startswith("mtp."):
            if not ours.startswith("hc_head_") or own_head:
                copies.append(tensor.name)
                continue
            ours = f"mtp.0.{ours}"
        _add(tensor, ours, what, references, complain)
    return copies


def _add(
    tensor: GGUFTensor, ours: str, what: GGUFMeaning, references: References, complain: Complain
) -> None:
    shape = tensor.shape
    if what.halves:
        if len(shape) != 2 or shape[1] % 2:
            complain(TensorShape(f"{tensor.name} is {shape}, expected two square matrices side by side."))
            return
        half = shape[1] // 2
        for part, columns in (("e", (0, half)), ("h", (half, 2 * half))):
            references.add(ours.format(part), Matrix(tensor, shape, tensor.offset, columns), complain)
    elif what.stacked:
        if len(shape) != 3 or shape[0] > MAX_EXPERTS:
            complain(
                TensorShape(
                    f"{tensor.name} is {shape}, expected one matrix for each of up to {MAX_EXPERTS} experts."
                )
            )
            return
        size = tensor.nbytes // shape[0]
        for expert in range(shape[0]):
            references.add(
                ours.format(expert), Matrix(tensor, shape[1:], tensor.offset + expert * size), complain
            )
    elif len(shape) == 3 and ours.endswith(
        "wo_a.weight"
    ):  # one matrix per group of heads, stacked: the same bytes
        references.add(ours, Matrix(tensor, (shape[0] * shape[1], shape[2]), tensor.offset), complain)
    else:
        references.add(ours, Matrix(tensor, shape, tensor.offset), complain)


def read_exactly(path: Path, offset: int, view: memoryview) -> None:
    """Fill `view` from the file; short reads are an error, because the header was checked against the size."""
    with open(path, "rb", buffering=0) as file:
        done = 0
        while done < len(view):
            count = os.preadv(file.fileno(), [view[done : done + (1 << 30)]], offset + done)
            if not count:
                raise CheckpointError(
                    f"{path.name} ended at byte {offset + done}: it changed while it was read. Try again."
                )
            done += count


def _plain(matrix: Matrix, start: int, stop: int) -> torch.Tensor:
    dtype = TORCH_DTYPES[matrix.tensor.kind]
    if len(matrix.shape) == 1:
        out = torch.empty(stop - start, dtype=dtype)
        where = matrix.offset + start * dtype.itemsize
        read_exactly(matrix.tensor.path, where, out.view(torch.uint8).numpy().data)
        return out
    rows = matrix.raw(start, stop).view(dtype).view(stop - start, *matrix.shape[1:])
    return _columns(matrix, rows)


def _decoded(matrix: Matrix, start: int, stop: int) -> torch.Tensor:
    if len(matrix.shape) == 1:
        return decode(matrix.raw(0, 1), matrix.tensor.kind, matrix.tensor.name).view(-1)[start:stop]
    return _columns(matrix, decode(matrix.raw(start, stop), matrix.tensor.kind, matrix.tensor.name))


def _columns(matrix: Matrix, rows: torch.Tensor) -> torch.Tensor:
    return rows if matrix.columns is None else rows[:, slice(*matrix.columns)].contiguous()
