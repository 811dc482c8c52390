"""Pool of state snapshots in memory that is allocated once.

A snapshot is a dozen tensors whose sizes depend on its position, and snapshots come and go by the thousand. With the
system allocator, the gaps that freed snapshots leave rarely fit new ones, and resident memory keeps growing after the
cache is full. Each snapshot is therefore divided into blocks of one size that may be anywhere in the pool, and the
memory in use never exceeds what was allocated at the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from birkhoff.engine.id_pool import IdPool
from birkhoff.kernels.row_index import to_device
from birkhoff.model.state import Snapshot

BLOCKS = 16  # blocks of a snapshot at a page boundary; others waste half a block on average
ALIGNMENT = 64  # bytes

SnapshotLayout = tuple[tuple[str, torch.dtype, torch.Size], ...]  # name, dtype and shape of each tensor


@dataclass(frozen=True, eq=False)
class PooledSnapshot:
    """A stored snapshot: its position, layout and blocks."""

    position: int
    layout: SnapshotLayout
    blocks: tuple[int, ...]
    nbytes: int  # of the blocks


class SnapshotPool:
    """`limit_bytes` of snapshots. `boundary_bytes` is the size of a snapshot at a page boundary, the usual one."""

    def __init__(self, limit_bytes: int, boundary_bytes: int, device: torch.device | str = "cpu"):
        self.block_bytes = -(-boundary_bytes // (BLOCKS * ALIGNMENT)) * ALIGNMENT
        self._blocks = IdPool(limit_bytes // self.block_bytes)
        # Not zeroed: on a CPU, memory that was never written is not resident.
        self._memory = torch.empty(self._blocks.size, self.block_bytes, dtype=torch.uint8, device=device)
        self._layouts: dict[SnapshotLayout, SnapshotLayout] = {}  # interned: there are few different ones

    @property
    def held_bytes(self) -> int:
        """Bytes of blocks in use."""
        return (self._blocks.size - self._blocks.num_free) * self.block_bytes

    @property
    def nbytes(self) -> int:
        """Bytes allocated at the start."""
        return self._memory.nbytes

    def fits(self, snapshot: Snapshot, empty: bool = False) -> bool:
        """Whether a snapshot fits now, or would fit an `empty` pool."""
        return self._num_blocks(snapshot) <= (self._blocks.size if empty else self._blocks.num_free)

    def put(self, snapshot: Snapshot) -> PooledSnapshot:
        """Copy a snapshot that fits into the pool."""
        # Wide items first: then every tensor starts at a multiple of its item size.
        tensors = sorted(snapshot.rows.items(), key=lambda item: -item[1].element_size())
        layout = tuple((name, rows.dtype, rows.shape) for name, rows in tensors)
        blocks = self._blocks.allocate(self._num_blocks(snapshot))
        assert blocks is not None, "the snapshot does not fit"
        if blocks:
            data = torch.empty(len(blocks) * self.block_bytes, dtype=torch.uint8, device=self._memory.device)
            torch.cat([rows.flatten().view(torch.uint8) for _, rows in tensors], out=data[: snapshot.nbytes])
            self._memory[self._index(blocks)] = data.view(len(blocks), -1)
        layout = self._layouts.setdefault(layout, layout)
        return PooledSnapshot(snapshot.position, layout, (*blocks,), len(blocks) * self.block_bytes)

    def get(self, pooled: PooledSnapshot) -> Snapshot:
        """A copy of a stored snapshot."""
        data = self._memory[self._index(pooled.blocks)].flatten()
        snapshot = Snapshot(pooled.position)
        start = 0
        for name, dtype, shape in pooled.layout:
            stop = start + shape.numel() * dtype.itemsize
            snapshot.rows[name] = data[start:stop].view(dtype).view(shape)
            start = stop
        return snapshot

    def release(self, pooled: PooledSnapshot) -> None:
        self._blocks.release(pooled.blocks)

    def _num_blocks(self, snapshot: Snapshot) -> int:
        return -(-snapshot.nbytes // self.block_bytes)

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        return to_device(np.array(blocks, np.int64), self._memory.device)
