"""The rows that a recorded step captures, side by side: one range of bytes for each row of the step.

A step copies every captured site into its column of the buffer, for all rows: there is no index, and no shape
depends on the requests. Which rows belong to which job is a `RowCopyPlan`, made once for as long as the same jobs
capture the same rows: a few long copies to the host, and for each job memory of its own with the rows of its sites.
That memory is allocated for several steps at once: touching new pages is most of the cost of delivering rows, and
large pages are fewer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from birkhoff.hooks.plan import Key

SiteTensor = tuple[Key, bool]  # a site before (False) or after (True) its edits
RowKind = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of one row
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
ALIGNED = 16
GAP = 1 << 18  # bytes between two ranges that are cheaper to copy along than a second copy is to start
ARENA_STEPS = 16  # steps that a job's memory is allocated for ...
MAX_ARENA = 1 << 24  # ... up to this many bytes


class Column(NamedTuple):
    first: int  # byte offset in a row
    kind: RowKind

    @property
    def items(self) -> int:
        return prod(self.kind[0])

    @property
    def size(self) -> int:
        """Bytes, including padding."""
        return -(-self.items * self.kind[1].itemsize // ALIGNED) * ALIGNED


class CaptureBuffer:
    def __init__(self, rows: int, sites: Mapping[SiteTensor, RowKind], device: torch.device):
        """Columns are in the order of `sites`."""
        self.columns: dict[SiteTensor, Column] = {}
        self.width = 0
        for site, kind in sites.items():
            column = self.columns[site] = Column(self.width, kind)
            self.width += column.size
        self.data = torch.empty(rows, self.width, dtype=torch.uint8, device=device)

    def site(self, site: SiteTensor) -> torch.Tensor:
        """The rows of one site, [rows, *row_shape]."""
        return self.sites([site])[:, 0]

    def sites(self, sites: Sequence[SiteTensor]) -> torch.Tensor:
        """The rows of sites of one kind with adjacent columns, [rows, sites, *row_shape]."""
        first = self.columns[sites[0]]
        last = self.columns[sites[-1]]
        part = self.data[:, first.first : last.first + last.size].view(first.kind[1])
        columns = torch.unflatten(part, 1, (len(sites), -1))[..., : first.items]
        return torch.unflatten(columns, -1, first.kind[0])


class Columns(NamedTuple):
    """Adjacent sites of one kind in a job's memory, at bytes `first` to `stop`."""

    keys: tuple[Key, ...]
    first: int
    stop: int
    column: Column


class JobRows(NamedTuple):
    """The rows of one job: (first, stop) ranges of the bytes on the host, and the columns they hold in sequence."""

    ranges: tuple[tuple[int, int], ...]
    columns: tuple[Columns, ...]


class RowCopyPlan:
    """Which bytes of a capture buffer go to which job. In a decode step every request has one token, so every job has
    one row."""

    def __init__(self, buffer: CaptureBuffer, requests: Sequence[tuple[int, Sequence[SiteTensor]]]):
        """`requests`: for each job its row and its sites."""
        order = {site: index for index, site in enumerate(buffer.columns)}
        sorted_requests = [(row, sorted(sites, key=order.__getitem__)) for row, sites in requests]
        ranges_of = [
            [
                (row * buffer.width + first, row * buffer.width + stop)
                for first, stop in _ranges(buffer, sites)
            ]
            for row, sites in sorted_requests
        ]
        # Bytes first .. stop of the buffer, and the offset on the host.
        self.copies: list[tuple[int, int, int]] = []
        for first, stop in sorted(byte_range for ranges in ranges_of for byte_range in ranges):
            if self.copies and first - self.copies[-1][1] <= GAP:
                last = self.copies[-1]
                self.copies[-1] = (last[0], max(stop, last[1]), last[2])
            else:
                self.copies.append((first, stop, self._size()))
        self.num_bytes = self._size()
        self.jobs = [
            JobRows(
                tuple(self._on_host(*byte_range) for byte_range in ranges), tuple(_columns(buffer, sites))
            )
            for ranges, (_, sites) in zip(ranges_of, sorted_requests)
        ]
        self._arenas = [RowArena(sum(stop - first for first, stop in ranges)) for ranges in ranges_of]

    def _size(self) -> int:
        return self.copies[-1][2] + self.copies[-1][1] - self.copies[-1][0] if self.copies else 0

    def _on_host(self, first: int, stop: int) -> tuple[int, int]:
        offset = next(to - start for start, end, to in self.copies if start <= first and stop <= end)
        return first + offset, stop + offset

    def rows(self, index: int, host: Bytes) -> Iterator[tuple[Key, torch.Tensor]]:
        """Copy the rows of one job out of the bytes on the host into memory of its own. NumPy copies, because PyTorch
        would wake its threads and wait for them when no core is free."""
        ranges, columns = self.jobs[index]
        memory = self._arenas[index].take()
        to = 0
        for first, stop in ranges:
            memory[to : to + stop - first] = host[first:stop]
            to += stop - first
        block = torch.from_numpy(memory)
        for keys, first, stop, column in columns:
            shape, dtype = column.kind
            rows = block[first:stop].view(dtype).view(len(keys), 1, -1)
            rows = rows[..., : column.items] if rows.shape[-1] != column.items else rows
            yield from zip(keys, torch.unflatten(rows, -1, shape).unbind())


class RowArena:
    """Memory for one job's rows, one piece per step. A piece is never returned twice."""

    def __init__(self, size: int):
        self._size = size
        self._free: Bytes = np.empty(0, np.uint8)

    def take(self) -> Bytes:
        if len(self._free) < self._size:
            self._free = np.empty(max(self._size, min(ARENA_STEPS * self._size, MAX_ARENA)), np.uint8)
        piece = self._free[: self._size]
        self._free = self._free[self._size :]
        return piece


def _ranges(buffer: CaptureBuffer, sites: Sequence[SiteTensor]) -> list[tuple[int, int]]:
    """Byte ranges of a row that hold these sites; adjacent columns are joined."""
    ranges: list[tuple[int, int]] = []
    for column in map(buffer.columns.__getitem__, sites):
        stop = column.first + column.size
        if ranges and ranges[-1][1] == column.first:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((column.first, stop))
    return ranges


def _columns(buffer: CaptureBuffer, sites: Sequence[SiteTensor]) -> Iterator[Columns]:
    keys: list[Key] = []
    first = stop = 0
    for index, (key, after) in enumerate(sites):
        column = buffer.columns[key, after]
        keys.append(key)
        stop += column.size
        if index + 1 == len(sites) or buffer.columns[sites[index + 1]].kind != column.kind:
            yield Columns(tuple(keys), first, stop, column)
            keys, first = [], stop
