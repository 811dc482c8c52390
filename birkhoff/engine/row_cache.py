"""Captured rows of past prompts, so that seeing a known prompt again need not mean computing it again.

Rows are filed under the key of their page, which stands for the model, the tokens and every edit up to there, so a row
can only be found by a request for which it would be computed alike. They pass by on their way to whoever captured them
and are held, not copied, within a bound of bytes; those that came in together go together, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from birkhoff.config import PAGE_TOKENS
from birkhoff.hooks.plan import SiteRows

Place = tuple[bytes, str, int, bool]  # page, hook, layer, whether after the edits there


@dataclass(eq=False)
class _StepRows:
    """Rows that one job was handed in one step."""

    tensor: torch.Tensor
    places: list[Place] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _PageRows:
    """Rows `first, first + 1, ...` of a chunk stand at these offsets in their page."""

    chunk: _StepRows
    first: int
    offsets: tuple[int, ...]


class RowCache:
    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.served_rows = 0
        self._chunks: OrderedDict[_StepRows, None] = OrderedDict()
        self._parts: dict[Place, list[_PageRows]] = {}

    def put(self, keys: Sequence[bytes], after: bool, rows: SiteRows) -> None:
        """File rows under the pages they belong to; those beyond the last key belong to none yet."""
        chunk, start = _StepRows(rows.tensor), 0
        while start < len(rows.positions):
            page = rows.positions[start] // PAGE_TOKENS
            stop = start + 1
            while stop < len(rows.positions) and rows.positions[stop] // PAGE_TOKENS == page:
                stop += 1
            if page < len(keys):
                place = (keys[page], rows.hook, rows.layer, after)
                offsets = tuple(position - page * PAGE_TOKENS for position in rows.positions[start:stop])
                self._parts.setdefault(place, []).append(_PageRows(chunk, start, offsets))
                chunk.places.append(place)
            start = stop
        if chunk.places and rows.tensor.nbytes <= self.limit_bytes:
            self._chunks[chunk] = None
            self.held_bytes += rows.tensor.nbytes
            while self.held_bytes > self.limit_bytes:
                self._drop(next(iter(self._chunks)))
        elif chunk.places:
            self._unfile(chunk)

    def get(
        self, keys: Sequence[bytes], hook: str, layer: int, after: bool, positions: Sequence[int]
    ) -> torch.Tensor | None:
        """The rows of one site at these positions [rows, ...], or None unless all of them are here."""
        found: list[torch.Tensor] = []
        used: dict[_StepRows, None] = {}
        page, held = -1, dict[int, tuple[_StepRows, int]]()
        for position in positions:
            if position // PAGE_TOKENS != page:
                page = position // PAGE_TOKENS
                held = self._by_offset((keys[page], hook, layer, after))
            if position % PAGE_TOKENS not in held:
                return None
            chunk, row = held[position % PAGE_TOKENS]
            used[chunk] = None
            found.append(chunk.tensor[row])
        for chunk in used:
            self._chunks.move_to_end(chunk)
        return torch.stack(found) if found else None

    def clear(self) -> None:
        self._chunks.clear()
        self._parts.clear()
        self.held_bytes = 0

    def _by_offset(self, place: Place) -> dict[int, tuple[_StepRows, int]]:
        return {
            offset: (part.chunk, part.first + number)
            for part in self._parts.get(place, ())
            for number, offset in enumerate(part.offsets)
        }

    def _drop(self, chunk: _StepRows) -> None:
        del self._chunks[chunk]
        self.held_bytes -= chunk.tensor.nbytes
        self._unfile(chunk)

    def _unfile(self, chunk: _StepRows) -> None:
        for place in chunk.places:
            left = [part for part in self._parts[place] if part.chunk is not chunk]
            if left:
                self._parts[place] = left
            else:
                del self._parts[place]
