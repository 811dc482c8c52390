"""Captured rows of past prompts, so that capturing a known prompt again does not require computing it again.

Rows are stored under the key of their page, which covers the model, the tokens and every edit up to there: a request
finds a row only if it would compute the same one. Delivered rows are referenced, not copied, within a byte limit. Rows
that were delivered together are evicted together, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from birkhoff.config import PAGE_TOKENS
from birkhoff.hooks.plan import SiteRows

PageSite = tuple[bytes, str, int, bool]  # page key, hook, layer, whether after the edits


class _PageRows(NamedTuple):
    """Rows [start, stop) of a step belong to one page."""

    rows: SiteRows
    start: int
    stop: int


class RowCache:
    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.served_rows = 0
        self.rows_too_large = 0  # delivered together and larger than the limit: not stored
        self._sites_of: OrderedDict[SiteRows, list[PageSite]] = OrderedDict()  # where rows are indexed
        self._by_site: dict[PageSite, list[_PageRows]] = {}

    def put(self, keys: Sequence[bytes], after: bool, rows: SiteRows) -> None:
        """Store rows under the keys of their pages, unless they exceed the limit or have no key yet."""
        if rows.tensor.nbytes > self.limit_bytes:
            self.rows_too_large += len(rows)
            return
        sites: list[PageSite] = []
        start = 0
        while start < len(rows.positions):
            page = rows.positions[start] // PAGE_TOKENS
            stop = start + 1
            while stop < len(rows.positions) and rows.positions[stop] // PAGE_TOKENS == page:
                stop += 1
            if page < len(keys):
                site = (keys[page], rows.hook, rows.layer, after)
                self._by_site.setdefault(site, []).append(_PageRows(rows, start, stop))
                sites.append(site)
            start = stop
        if sites:
            self._sites_of[rows] = sites
            self.held_bytes += rows.tensor.nbytes
            while self.held_bytes > self.limit_bytes:
                self._evict(next(iter(self._sites_of)))

    def get(
        self, keys: Sequence[bytes], hook: str, layer: int, after: bool, positions: Sequence[int]
    ) -> torch.Tensor | None:
        """The rows of one site at these positions [rows, ...], or None unless all of them are stored."""
        tensors: list[torch.Tensor] = []
        used: dict[SiteRows, None] = {}
        page, by_position = -1, dict[int, tuple[SiteRows, int]]()
        for position in positions:
            if position // PAGE_TOKENS != page:
                page = position // PAGE_TOKENS
                by_position = self._by_position((keys[page], hook, layer, after))
            if position not in by_position:
                return None
            rows, index = by_position[position]
            used[rows] = None
            tensors.append(rows.tensor[index])
        for rows in used:
            self._sites_of.move_to_end(rows)
        return torch.stack(tensors) if tensors else None

    def clear(self) -> None:
        self._sites_of.clear()
        self._by_site.clear()
        self.held_bytes = 0

    def _by_position(self, site: PageSite) -> dict[int, tuple[SiteRows, int]]:
        return {
            rows.positions[index]: (rows, index)
            for rows, start, stop in self._by_site.get(site, ())
            for index in range(start, stop)
        }

    def _evict(self, rows: SiteRows) -> None:
        self.held_bytes -= rows.tensor.nbytes
        for site in self._sites_of.pop(rows):
            remaining = [part for part in self._by_site[site] if part.rows is not rows]
            if remaining:
                self._by_site[site] = remaining
            else:
                del self._by_site[site]
