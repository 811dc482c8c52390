"""What a recorded step captures, laid side by side: one run of bytes for each row of the step, on a buffer that stays.

A step copies every captured site into its column of the tray, for all rows: no index, no shape that depends on who
asked. Which rows leave, and whose they are, is cut afterwards (`RowCopyPlan`), once for as long as the same jobs want the same
rows: a few long copies to the host, and for each job memory of its own, seen as the rows of its sites. That memory is
made for several steps at once: touching new pages is most of what handing out rows costs, and large pages are fewer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from birkhoff.hooks.plan import Key

Site = tuple[Key, bool]  # before or after the edits
Kind = tuple[tuple[int, ...], torch.dtype]  # of one row
ALIGNED = 16
GAP = 1 << 18  # bytes that nobody wants and that are cheaper to copy along than a second copy is to begin
STEPS, MOST_ROOM = (
    16,
    1 << 24,
)  # a job's memory is made for so many steps, but not for more than so many bytes


class Column(NamedTuple):
    first: int  # byte of a row
    kind: Kind

    @property
    def items(self) -> int:
        return prod(self.kind[0])

    @property
    def size(self) -> int:
        """Bytes, with what is left free behind."""
        return -(-self.items * self.kind[1].itemsize // ALIGNED) * ALIGNED


class CaptureBuffer:
    def __init__(self, rows: int, sites: Mapping[Site, Kind], device: torch.device):
        """Columns in the order of `sites`."""
        self.columns: dict[Site, Column] = {}
        self.width = 0
        for site, kind in sites.items():
            column = self.columns[site] = Column(self.width, kind)
            self.width += column.size
        self.data = torch.empty(rows, self.width, dtype=torch.uint8, device=device)

    def site(self, site: Site) -> torch.Tensor:
        """The rows of one site, [rows, *row_shape]."""
        return self.sites([site])[:, 0]

    def sites(self, sites: Sequence[Site]) -> torch.Tensor:
        """The rows of sites of one kind whose columns lie next to each other, [rows, sites, *row_shape]."""
        first = self.columns[sites[0]]
        last = self.columns[sites[-1]]
        part = self.data[:, first.first : last.first + last.size].view(first.kind[1])
        return part.unflatten(1, (len(sites), -1))[..., : first.items].unflatten(-1, first.kind[0])


class Columns(NamedTuple):
    """Sites of one kind next to each other in a job's block."""

    keys: tuple[Key, ...]
    first: int
    stop: int
    column: Column


class JobRows(NamedTuple):
    """What one job gets: runs of the bytes that came, (from, to) pairs, and what they are one after the other."""

    runs: tuple[tuple[int, int], ...]
    columns: tuple[Columns, ...]


class RowCopyPlan:
    """Who gets what of a tray. A decoding step has one token of each request, so every job has one row."""

    def __init__(self, tray: CaptureBuffer, wanted: Sequence[tuple[int, Sequence[Site]]]):
        """`wanted`: for each job its row and its sites."""
        places = {site: place for place, site in enumerate(tray.columns)}
        own = [(row, sorted(sites, key=places.__getitem__)) for row, sites in wanted]
        runs = [
            [(row * tray.width + first, row * tray.width + stop) for first, stop in _runs(tray, sites)]
            for row, sites in own
        ]
        self.copies: list[
            tuple[int, int, int]
        ] = []  # bytes from .. to of the tray, and where they go on the host
        for first, stop in sorted(run for mine in runs for run in mine):
            if self.copies and first - self.copies[-1][1] <= GAP:
                known = self.copies[-1]
                self.copies[-1] = (known[0], max(stop, known[1]), known[2])
            else:
                self.copies.append((first, stop, self._size()))
        self.num_bytes = self._size()
        self.shares = [
            JobRows(tuple(self._landed(*run) for run in mine), tuple(_columns(tray, sites)))
            for mine, (_, sites) in zip(runs, own)
        ]
        self._rooms = [RowArena(sum(stop - first for first, stop in mine)) for mine in runs]

    def _size(self) -> int:
        return self.copies[-1][2] + self.copies[-1][1] - self.copies[-1][0] if self.copies else 0

    def _landed(self, first: int, stop: int) -> tuple[int, int]:
        to = next(to - start for start, end, to in self.copies if start <= first and stop <= end)
        return first + to, stop + to

    def rows(self, number: int, host: np.ndarray) -> Iterator[tuple[Key, torch.Tensor]]:
        """The rows of one job out of the bytes that came, in memory of its own. NumPy copies: PyTorch would wake its
        threads for it, and wait for them where they find no core free."""
        runs, parts = self.shares[number]
        memory = self._rooms[number].take()
        to = 0
        for first, stop in runs:
            memory[to : to + stop - first] = host[first:stop]
            to += stop - first
        block = torch.from_numpy(memory)
        for keys, first, stop, column in parts:
            shape, dtype = column.kind
            rows = block[first:stop].view(dtype).view(len(keys), 1, -1)
            rows = rows[..., : column.items] if rows.shape[-1] != column.items else rows
            yield from zip(keys, rows.unflatten(-1, shape).unbind())


class RowArena:
    """Memory for one job's rows, a piece a step. A piece that was given away is never given again."""

    def __init__(self, size: int):
        self._size = size
        self._left = np.empty(0, np.uint8)

    def take(self) -> np.ndarray:
        if len(self._left) < self._size:
            self._left = np.empty(max(self._size, min(STEPS * self._size, MOST_ROOM)), np.uint8)
        piece = self._left[: self._size]
        self._left = self._left[self._size :]
        return piece


def _runs(tray: CaptureBuffer, sites: Sequence[Site]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for column in map(tray.columns.__getitem__, sites):
        stop = column.first + column.size
        if found and found[-1][1] == column.first:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((column.first, stop))
    return found


def _columns(tray: CaptureBuffer, sites: Sequence[Site]) -> Iterator[Columns]:
    keys: list[Key] = []
    first = stop = 0
    for place, (key, after) in enumerate(sites):
        column = tray.columns[key, after]
        keys.append(key)
        stop += column.size
        if place + 1 == len(sites) or tray.columns[sites[place + 1]].kind != column.kind:
            yield Columns(tuple(keys), first, stop, column)
            keys, first = [], stop
