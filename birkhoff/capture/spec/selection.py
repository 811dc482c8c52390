"""Row selection of a running request, and the listed positions that were never computed.

A `Selection` is a bound selector of `hooks/selector.py` plus a record of the tokens computed so far. Tokens that are
computed again (after preemption, or as rejected drafts) change nothing. Positions that were listed one by one and not
reached by the end of the request are reported, because a list is a demand and not a filter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from birkhoff.hooks.selector import PositionSelector, bind

__all__ = ["PositionSelector", "Selection", "bind"]


class Selection:
    """The selected rows of one request, step by step."""

    def __init__(self, selector: PositionSelector):
        self.selector = selector
        self._run = np.zeros(len(selector.demanded), bool)

    def rows(self, start: int, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Ascending offsets of the selected tokens in the chunk of tokens that begins at position `start`."""
        demanded = self.selector.demanded
        if len(demanded):
            first, last = np.searchsorted(demanded, (start, start + len(token_ids)))
            self._run[first:last] = True
        return self.selector.rows(start, token_ids)

    def never_computed(self, length: int | None = None) -> list[int]:
        """Listed positions that were not computed; with `length`, also those beyond the end of the final sequence."""
        demanded = self.selector.demanded
        missing = ~self._run if length is None else ~self._run | (demanded >= length)
        return [int(position) for position in demanded[missing]]
