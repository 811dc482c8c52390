"""What a conversion will do, as data: files with their headers, and units of work that fill them.

A `Unit` is the smallest thing done or not done: one dense tensor, one expert, or one matrix with its scale. Where its
bytes go is known before the first is written, so units can be done in any order, by several threads, and left out when
they are already there. `produce` yields (region, bytes) pieces a few megabytes at a time and tells `RoundingTally` what
rounding did; the whole of a conversion's memory is a few such pieces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

Pieces = Iterator[tuple[int, np.ndarray]]


class Region(NamedTuple):
    """A stretch of one output file: `offset` counts from the start of the file."""

    name: str
    offset: int
    nbytes: int


@dataclass
class RoundingTally:
    """What rounding did to one unit: how many numbers changed, how far, and the largest beside them."""

    numbers: int = 0
    changed: int = 0
    largest: float = 0.0
    worst: float = 0.0

    def compare(self, before: torch.Tensor, after: torch.Tensor) -> None:
        self.numbers += before.numel()
        if torch.equal(before, after):
            return
        gap = (after - before).abs_()
        self.changed += int(torch.count_nonzero(gap))
        self.worst = max(self.worst, float(gap.max()))
        self.largest = max(self.largest, float(before.abs().max()))

    def row(self) -> list[float]:
        return [self.numbers, self.changed, self.largest, self.worst]


class Unit(NamedTuple):
    """`file` is an index into the plan's files; `place` orders units as their sources lie on disk."""

    file: int
    kind: str  # the class of `weights.inspect.class_of`
    place: int
    regions: tuple[Region, ...]
    produce: Callable[[RoundingTally], Pieces]

    @property
    def name(self) -> str:
        return self.regions[0].name

    @property
    def nbytes(self) -> int:
        return sum(region.nbytes for region in self.regions)


class OutputFile(NamedTuple):
    path: Path
    header: bytes
    nbytes: int
    tensors: int


@dataclass(frozen=True)
class ConversionPlan:
    """A whole conversion. `texts` are small files written beside, the last one marking completeness."""

    source: str
    destination: Path
    options: dict[str, Any]
    files: list[OutputFile]
    units: list[Unit]
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
        """Changes with anything that would change a byte of the output: options, headers, source files."""
        digest = hashlib.sha256(repr(sorted(self.options.items())).encode())
        for file in self.files:
            digest.update(f"{file.path.name} {file.nbytes} ".encode() + hashlib.sha256(file.header).digest())
        for path in self.source_files:
            status = path.stat()
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
        for unit in self.units:
            digest.update(f"{unit.file} {unit.regions}".encode())
        return digest.hexdigest()
