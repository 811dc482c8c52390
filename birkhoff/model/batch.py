"""One step, flattened: the tokens of many sequences side by side, whatever stage each is at.

A `SequenceChunk` is what one sequence contributes: some consecutive tokens starting at some position. `Batch.of` lays pieces
out so that attention meets rectangles: all single tokens (decoding) form one group whatever their positions, longer
pieces are grouped with those that have the same start and length. Everything that is per token (linear layers,
streams, experts) sees the flat rows and never asks which sequence they belong to.

Invariant: rows `group.rows` of the flat tensors, viewed `[B, T, ...]`, are the group's pieces in `group.pieces` order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class SequenceChunk:
    """`token_ids` of one sequence at positions `start, start + 1, ...`; `slot` is its place in the state."""

    slot: int
    start: int
    token_ids: Sequence[int] | torch.Tensor

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class Group:
    """Pieces of equal length; they also share their start unless the length is one."""

    rows: slice
    length: int
    starts: tuple[int, ...]
    slots: torch.Tensor  # [B]
    first: torch.Tensor  # [B] the starts, on the device
    _made: dict = field(default_factory=dict, repr=False)

    def once(self, what: Hashable, make: Callable[[], Any]) -> Any:
        """Something every layer needs alike, made by the first that asks."""
        if what not in self._made:
            self._made[what] = make()
        return self._made[what]

    @property
    def size(self) -> int:
        return len(self.starts)

    @property
    def newest(self) -> int:
        """The largest position any query of the group has."""
        return max(self.starts) + self.length - 1

    def after(self, members: list[int]) -> Group:
        """Some members of a decoding group as they stand one token later; it has no rows of its own."""
        kept = torch.tensor(members, device=self.first.device)
        starts = tuple(self.starts[i] + 1 for i in members)
        return Group(slice(0, 0), 1, starts, self.slots[kept], self.first[kept] + 1)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The group's rows as `[B, T, ...]`."""
        return flat[self.rows].unflatten(0, (self.size, self.length))

    def positions(self) -> torch.Tensor:
        """[B, T] on the device."""
        return self.once(
            "positions",
            lambda: self.first.unsqueeze(-1) + torch.arange(self.length, device=self.first.device),
        )


@dataclass(frozen=True)
class Batch:
    token_ids: torch.Tensor  # [n]
    positions: torch.Tensor  # [n]
    groups: tuple[Group, ...]
    pieces: tuple[SequenceChunk, ...]  # in row order
    offsets: tuple[int, ...]  # first row of each piece

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    def last_rows(self) -> list[int]:
        """The row of each piece's last token, in `pieces` order."""
        return [offset + len(piece.token_ids) - 1 for offset, piece in zip(self.offsets, self.pieces)]

    @classmethod
    def of(cls, pieces: Sequence[SequenceChunk], device: torch.device | str = "cpu") -> Batch:
        def together(piece: SequenceChunk) -> tuple[int, int]:
            length = len(piece.token_ids)
            return (length, piece.start if length > 1 else 0)

        if pieces and all(len(piece.token_ids) == 1 for piece in pieces):
            return cls._singles(tuple(pieces), device)
        ordered = tuple(sorted(pieces, key=together))  # stable: equal pieces keep the caller's order
        groups = []
        offsets = []
        row = 0
        begin = 0
        while begin < len(ordered):
            key, end = together(ordered[begin]), begin
            while end < len(ordered) and together(ordered[end]) == key:
                offsets.append(row + (end - begin) * key[0])
                end += 1
            members = ordered[begin:end]
            starts = tuple(piece.start for piece in members)
            stop = row + key[0] * len(members)
            slots = torch.tensor([piece.slot for piece in members], device=device)
            groups.append(Group(slice(row, stop), key[0], starts, slots, torch.tensor(starts, device=device)))
            row, begin = stop, end
        flat = [torch.as_tensor(piece.token_ids, dtype=torch.long) for piece in ordered]
        token_ids = torch.cat(flat).to(device)
        positions = torch.cat([torch.arange(piece.start, piece.stop) for piece in ordered]).to(device)
        return cls(token_ids, positions, tuple(groups), ordered, tuple(offsets))

    @classmethod
    def _singles(cls, pieces: tuple[SequenceChunk, ...], device: torch.device | str) -> Batch:
        """A decoding step, which is laid out many times a second: one group in the caller's order."""
        starts = tuple(piece.start for piece in pieces)
        token_ids = torch.tensor([int(piece.token_ids[0]) for piece in pieces], device=device)
        positions = torch.tensor(starts, device=device)
        slots = torch.tensor([piece.slot for piece in pieces], device=device)
        rows = range(len(pieces))
        return cls(
            token_ids,
            positions,
            (Group(slice(0, len(rows)), 1, starts, slots, positions),),
            pieces,
            tuple(rows),
        )

    @classmethod
    def whole(cls, token_ids: torch.Tensor) -> Batch:
        """Complete sequences `[B, T]` from position 0, on the device of `token_ids`."""
        if token_ids.dim() == 1:
            token_ids = token_ids.unsqueeze(0)
        return cls.of(
            [SequenceChunk(slot, 0, row) for slot, row in enumerate(token_ids.cpu())], token_ids.device
        )
