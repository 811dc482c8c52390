"""A conversion as data: output files with their headers, and units of work that fill them.

A `ConversionUnit` is the smallest resumable step: one dense tensor, one expert, or one matrix with its scale. All
offsets are known before writing, so units run in any order, on several threads, and are skipped if already written.
`produce` yields (region index, bytes) chunks of a few megabytes and records rounding in `RoundingStats`; a conversion
holds only a few such chunks in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

OutputChunks = Iterator[tuple[int, np.ndarray]]


class FileRegion(NamedTuple):
    """A byte range of one output file. `offset` counts from the start of the file."""

    name: str
    offset: int
    nbytes: int


@dataclass
class RoundingStats:
    """Effect of rounding on one unit: values, values changed, largest magnitude, largest absolute error."""

    values: int = 0
    changed: int = 0
    largest: float = 0.0
    worst: float = 0.0

    def compare(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Add the difference between values before and after rounding."""
        self.values += before.numel()
        if torch.equal(before, after):
            return
        error = (after - before).abs_()
        self.changed += int(torch.count_nonzero(error))
        self.worst = max(self.worst, float(error.max()))
        self.largest = max(self.largest, float(before.abs().max()))

    def row(self) -> list[float]:
        """Return the fields as a journal row."""
        return [self.values, self.changed, self.largest, self.worst]


class ConversionUnit(NamedTuple):
    """One step. `file` is an index into the plan's files; `order` is the position of its source on disk."""

    file: int
    kind: str  # the class of `weights.inspect.tensor_class`
    order: int
    regions: tuple[FileRegion, ...]
    produce: Callable[[RoundingStats], OutputChunks]

    @property
    def name(self) -> str:
        return self.regions[0].name

    @property
    def nbytes(self) -> int:
        return sum(region.nbytes for region in self.regions)


class OutputFile(NamedTuple):
    """An output file: path, header bytes, total size and number of tensors."""

    path: Path
    header: bytes
    nbytes: int
    tensors: int


@dataclass(frozen=True)
class ConversionPlan:
    """A whole conversion. `texts` are small files written next to the output; the last marks completeness."""

    source: str
    destination: Path
    options: dict[str, Any]
    files: list[OutputFile]
    units: list[ConversionUnit]
    source_files: list[Path]
    texts: dict[str, str] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def payload_bytes(self) -> int:
        return sum(unit.nbytes for unit in self.units)

    def bytes_by_class(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for unit in self.units:
            sizes[unit.kind] = sizes.get(unit.kind, 0) + unit.nbytes
        return sizes

    def fingerprint(self) -> str:
        """Hash of everything that determines the output bytes: options, headers, source files."""
        digest = hashlib.sha256(repr(sorted(self.options.items())).encode())
        for file in self.files:
            digest.update(f"{file.path.name} {file.nbytes} ".encode() + hashlib.sha256(file.header).digest())
        for path in self.source_files:
            status = path.stat()
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
        for unit in self.units:
            digest.update(f"{unit.file} {unit.regions}".encode())
        return digest.hexdigest()
