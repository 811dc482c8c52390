"""Captured rows of past prompts, so that capturing a known prompt again does not require computing it again.

Rows are stored under the key of their page, which covers the model, the tokens and every edit up to there: a request
finds a row only if it would compute the same one. Delivered rows are referenced, not copied, within a byte limit. Rows
that were delivered together are evicted together, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from birkhoff.config import PAGE_TOKENS
from birkhoff.hooks.plan import SiteRows

PageSite = tuple[bytes, str, int, bool]  # page key, hook, layer, whether after the edits


@dataclass(eq=False)
class _StepRows:
    """Rows that one job received in one step, and where they are indexed."""

    tensor: torch.Tensor
    sites: list[PageSite] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _PageRows:
    """Rows `first, first + 1, ...` of a step are at these offsets in their page."""

    step: _StepRows
    first: int
    offsets: tuple[int, ...]


class RowCache:
    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.served_rows = 0
        self._steps: OrderedDict[_StepRows, None] = OrderedDict()
        self._by_site: dict[PageSite, list[_PageRows]] = {}

    def put(self, keys: Sequence[bytes], after: bool, rows: SiteRows) -> None:
        """Store rows under the keys of their pages; rows of pages without a key yet are not stored."""
        step, start = _StepRows(rows.tensor), 0
        while start < len(rows.positions):
            page = rows.positions[start] // PAGE_TOKENS
            stop = start + 1
            while stop < len(rows.positions) and rows.positions[stop] // PAGE_TOKENS == page:
                stop += 1
            if page < len(keys):
                site = (keys[page], rows.hook, rows.layer, after)
                offsets = tuple(position - page * PAGE_TOKENS for position in rows.positions[start:stop])
                self._by_site.setdefault(site, []).append(_PageRows(step, start, offsets))
                step.sites.append(site)
            start = stop
        if step.sites and rows.tensor.nbytes <= self.limit_bytes:
            self._steps[step] = None
            self.held_bytes += rows.tensor.nbytes
            while self.held_bytes > self.limit_bytes:
                self._evict(next(iter(self._steps)))
        elif step.sites:
            self._unindex(step)

    def get(
        self, keys: Sequence[bytes], hook: str, layer: int, after: bool, positions: Sequence[int]
    ) -> torch.Tensor | None:
        """The rows of one site at these positions [rows, ...], or None unless all of them are stored."""
        rows: list[torch.Tensor] = []
        used: dict[_StepRows, None] = {}
        page, by_offset = -1, dict[int, tuple[_StepRows, int]]()
        for position in positions:
            if position // PAGE_TOKENS != page:
                page = position // PAGE_TOKENS
                by_offset = self._by_offset((keys[page], hook, layer, after))
            if position % PAGE_TOKENS not in by_offset:
                return None
            step, row = by_offset[position % PAGE_TOKENS]
            used[step] = None
            rows.append(step.tensor[row])
        for step in used:
            self._steps.move_to_end(step)
        return torch.stack(rows) if rows else None

    def clear(self) -> None:
        self._steps.clear()
        self._by_site.clear()
        self.held_bytes = 0

    def _by_offset(self, site: PageSite) -> dict[int, tuple[_StepRows, int]]:
        return {
            offset: (part.step, part.first + index)
            for part in self._by_site.get(site, ())
            for index, offset in enumerate(part.offsets)
        }

    def _evict(self, step: _StepRows) -> None:
        del self._steps[step]
        self.held_bytes -= step.tensor.nbytes
        self._unindex(step)

    def _unindex(self, step: _StepRows) -> None:
        for site in step.sites:
            remaining = [part for part in self._by_site[site] if part.step is not step]
            if remaining:
                self._by_site[site] = remaining
            else:
                del self._by_site[site]
