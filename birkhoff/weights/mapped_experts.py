"""Routed experts that stay in the checkpoint's files, mapped into memory.

Their pages are read from disk when an expert is used and belong to the page cache, which the system may reclaim, so a
checkpoint may be larger than memory. The files must not change while they are mapped: reading behind the end of a file
that was cut short ends the process.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch

from birkhoff.kernels.packed import PackedMatrix
from birkhoff.weights.layout import scale_name
from birkhoff.weights.tensor_ref import TensorRef

PARTS = ("w1", "w3", "w2")  # gate, up, down


class MappedFiles:
    """Read-only maps of whole files, one per file."""

    def __init__(self) -> None:
        self._maps: dict[Path, torch.Tensor] = {}

    def view(self, path: Path, offset: int, rows: int, row_bytes: int) -> torch.Tensor:
        """Bytes [rows, row bytes] of a file, without a copy."""
        return self._whole(path)[offset : offset + rows * row_bytes].view(rows, row_bytes)

    def _whole(self, path: Path) -> torch.Tensor:
        if path not in self._maps:
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # nothing writes to the tensor
                self._maps[path] = torch.frombuffer(mapped, dtype=torch.uint8)
        return self._maps[path]

    def matrix(self, tensors: Mapping[str, TensorRef], name: str) -> PackedMatrix:
        """A matrix of the checkpoint as stored."""
        ref = tensors[name]
        kind = ref.packed_type
        assert kind is not None and ref.location is not None, name
        rows, columns = ref.value_shape
        codes = self.view(*ref.location, rows, kind.row_bytes(columns))
        scale = None
        shape = kind.scale_shape(rows, columns)
        if shape is not None:
            where = tensors[scale_name(name)].location
            assert where is not None, name
            scale = self.view(*where, *shape)
        return PackedMatrix(kind, columns, codes, scale)


def map_experts(
    tensors: Mapping[str, TensorRef], prefix: str, count: int, files: MappedFiles
) -> list[tuple[PackedMatrix, PackedMatrix, PackedMatrix]]:
    """Gate, up and down of the `count` experts whose names start with `prefix`."""
    mapped = []
    for expert in range(count):
        gate, up, down = (files.matrix(tensors, f"{prefix}.{expert}.{part}.weight") for part in PARTS)
        mapped.append((gate, up, down))
    return mapped
