"""States behind pages, in memory that is taken once and used again and again.

A state is a dozen tensors whose lengths depend on where it was taken, and states come and go by the thousand. Left to
the system's allocator, the gaps that old ones leave seldom fit new ones: resident memory went on rising long after the
cache was full. So each is cut into blocks of one size, which lie wherever a block is free. What is held is counted in
blocks, and no traffic can make it more than was taken at the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from birkhoff.engine.id_pool import IdPool
from birkhoff.model.state import Snapshot

BLOCKS = 16  # the state at a border of pages takes this many; others waste a half of one
ALIGNMENT = 64  # bytes

Form = tuple[tuple[str, torch.dtype, torch.Size], ...]


@dataclass(frozen=True, eq=False)
class PooledSnapshot:
    """A snapshot's place: what lies there, in which blocks."""

    position: int
    form: Form
    blocks: tuple[int, ...]
    nbytes: int  # of the blocks


class SnapshotPool:
    """Room for snapshots, `limit_bytes` in all. `border_bytes` is what the usual one takes."""

    def __init__(self, limit_bytes: int, border_bytes: int, device: torch.device | str = "cpu"):
        self.block_bytes = -(-border_bytes // (BLOCKS * ALIGNMENT)) * ALIGNMENT
        self._blocks = IdPool(limit_bytes // self.block_bytes)
        # Not zeroed: on a CPU, memory that was never used is not resident either.
        self._memory = torch.empty(self._blocks.size, self.block_bytes, dtype=torch.uint8, device=device)
        self._forms: dict[Form, Form] = {}  # there are few, and every snapshot has one

    @property
    def held_bytes(self) -> int:
        return (self._blocks.size - self._blocks.num_free) * self.block_bytes

    @property
    def nbytes(self) -> int:
        """What was taken at the start."""
        return self._memory.nbytes

    def fits(self, snapshot: Snapshot, empty: bool = False) -> bool:
        """Whether there is room for a snapshot now, or would be in an `empty` store."""
        return self._needed(snapshot) <= (self._blocks.size if empty else self._blocks.num_free)

    def put(self, snapshot: Snapshot) -> PooledSnapshot:
        """Copy a snapshot that fits."""
        # Wide items first: then every part begins at a multiple of its items' size.
        parts = sorted(snapshot.rows.items(), key=lambda part: -part[1].element_size())
        form = tuple((name, rows.dtype, rows.shape) for name, rows in parts)
        blocks = self._blocks.allocate(self._needed(snapshot))
        assert blocks is not None, "make room before"
        if blocks:
            whole = torch.empty(len(blocks) * self.block_bytes, dtype=torch.uint8, device=self._memory.device)
            torch.cat([rows.flatten().view(torch.uint8) for _, rows in parts], out=whole[: snapshot.nbytes])
            self._memory[self._index(blocks)] = whole.view(len(blocks), -1)
        return PooledSnapshot(
            snapshot.position, self._forms.setdefault(form, form), (*blocks,), len(blocks) * self.block_bytes
        )

    def get(self, kept: PooledSnapshot) -> Snapshot:
        """A copy of what was put there."""
        whole = self._memory[self._index(kept.blocks)].flatten()
        snapshot = Snapshot(kept.position)
        start = 0
        for name, dtype, shape in kept.form:
            stop = start + shape.numel() * dtype.itemsize
            snapshot.rows[name] = whole[start:stop].view(dtype).view(shape)
            start = stop
        return snapshot

    def drop(self, kept: PooledSnapshot) -> None:
        self._blocks.release(kept.blocks)

    def _needed(self, snapshot: Snapshot) -> int:
        return -(-snapshot.nbytes // self.block_bytes)

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.long, device=self._memory.device)
