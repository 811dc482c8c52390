"""One step, flattened: the tokens of many sequences in one row dimension, at any stage of their generation.

A `SequenceChunk` is what one sequence contributes: consecutive tokens from some position on. `Batch.of` arranges chunks
so that attention runs on rectangles: all single tokens (decoding) form one group whatever their positions, and longer
chunks are grouped with others of the same start and length. Everything that is computed per token (linear layers,
streams, experts) takes the flat rows and does not depend on the sequence they belong to.

Invariant: rows `group.rows` of the flat tensors, viewed `[B, T, ...]`, are the chunks of the group in order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from birkhoff.kernels.row_index import RowIndex, to_device


@dataclass(frozen=True)
class SequenceChunk:
    """`token_ids` of one sequence at positions `start, start + 1, ...`; `slot` is its slot in the state."""

    slot: int
    start: int
    token_ids: Sequence[int] | torch.Tensor

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class Group:
    """Chunks of equal length; they also share their start unless the length is one."""

    rows: slice
    length: int
    starts: tuple[int, ...]
    slots: torch.Tensor  # [B]
    first: torch.Tensor  # [B] the starts, on the device
    _cache: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def cached(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """A value that all layers share, computed on first use."""
        if key not in self._cache:
            self._cache[key] = compute()
        return self._cache[key]

    @property
    def size(self) -> int:
        return len(self.starts)

    @property
    def last_position(self) -> int:
        """The largest position of the group."""
        return max(self.starts) + self.length - 1

    def advanced(self, members: list[int]) -> Group:
        """Some members of a decoding group one token later; the result has no rows."""
        kept = torch.tensor(members, device=self.first.device)
        starts = tuple(self.starts[i] + 1 for i in members)
        return Group(slice(0, 0), 1, starts, self.slots[kept], self.first[kept] + 1)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The rows of the group as `[B, T, ...]`."""
        rows: torch.Tensor = flat[self.rows].unflatten(0, (self.size, self.length))
        return rows

    def positions(self) -> torch.Tensor:
        """[B, T] on the device."""
        positions: torch.Tensor = self.cached(
            "positions",
            lambda: self.first.unsqueeze(-1) + torch.arange(self.length, device=self.first.device),
        )
        return positions


@dataclass(frozen=True)
class Batch:
    token_ids: torch.Tensor  # [n]
    positions: torch.Tensor  # [n]
    groups: tuple[Group, ...]
    chunks: tuple[SequenceChunk, ...]  # in row order
    offsets: tuple[int, ...]  # first row of each chunk
    _cache: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def cached(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """A value that all layers share, computed on first use."""
        if key not in self._cache:
            self._cache[key] = compute()
        return self._cache[key]

    @cached_property
    def one_chunk_per_slot(self) -> bool:
        return len({chunk.slot for chunk in self.chunks}) == len(self.chunks)

    @cached_property
    def row_index(self) -> RowIndex:
        """The rows as kernels take them that process all chunks at once."""
        chunks = [(chunk.slot, chunk.start, chunk.stop) for chunk in self.chunks]
        return RowIndex.of(chunks, self.token_ids.device)

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    def last_rows(self) -> list[int]:
        """The row of the last token of each chunk, in the order of `chunks`."""
        return [offset + len(chunk.token_ids) - 1 for offset, chunk in zip(self.offsets, self.chunks)]

    @classmethod
    def of(cls, chunks: Sequence[SequenceChunk], device: torch.device | str = "cpu") -> Batch:
        """Arrange chunks in groups."""

        def group_key(chunk: SequenceChunk) -> tuple[int, int]:
            length = len(chunk.token_ids)
            return (length, chunk.start if length > 1 else 0)

        if chunks and all(len(chunk.token_ids) == 1 for chunk in chunks):
            return cls._decode_step(tuple(chunks), device)
        ordered = tuple(sorted(chunks, key=group_key))  # stable: chunks of one group keep the caller's order
        lengths = [len(chunk.token_ids) for chunk in ordered]
        token_ids, positions, slots = to_device(
            np.stack(
                (
                    np.concatenate([np.asarray(chunk.token_ids, np.int64) for chunk in ordered]),
                    np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in ordered]),
                    np.repeat([chunk.slot for chunk in ordered], lengths),
                )
            ),
            device,
        )
        groups = []
        offsets = []
        row = 0
        begin = 0
        while begin < len(ordered):
            key, end = group_key(ordered[begin]), begin
            while end < len(ordered) and group_key(ordered[end]) == key:
                offsets.append(row + (end - begin) * key[0])
                end += 1
            starts = tuple(chunk.start for chunk in ordered[begin:end])
            rows = slice(row, row + key[0] * len(starts))
            first_rows = slice(row, rows.stop, key[0])
            groups.append(Group(rows, key[0], starts, slots[first_rows], positions[first_rows]))
            row, begin = rows.stop, end
        return cls(token_ids, positions, tuple(groups), ordered, tuple(offsets))

    @classmethod
    def _decode_step(cls, chunks: tuple[SequenceChunk, ...], device: torch.device | str) -> Batch:
        """Single tokens only, the frequent case: one group in the caller's order, without sorting."""
        starts = tuple(chunk.start for chunk in chunks)
        first_tokens = [int(chunk.token_ids[0]) for chunk in chunks]
        token_ids, positions, slots = to_device(
            np.array((first_tokens, starts, [chunk.slot for chunk in chunks]), np.int64), device
        )
        group = Group(slice(0, len(chunks)), 1, starts, slots, positions)
        return cls(token_ids, positions, (group,), chunks, tuple(range(len(chunks))))

    @classmethod
    def whole(cls, token_ids: torch.Tensor) -> Batch:
        """Complete sequences `[T]` or `[B, T]` from position 0, on the device of `token_ids`."""
        if token_ids.dim() == 1:
            token_ids = token_ids.unsqueeze(0)
        return cls.of(
            [SequenceChunk(slot, 0, row) for slot, row in enumerate(token_ids.cpu())], token_ids.device
        )
