"""Which rows of a running request a capture wants, and which of those it asked for by place never came.

A `Selection` is the bound selector of `hooks/selector.py` plus a memory of the tokens that have been run. Tokens that
are run again (after the request gave its memory back, or as rejected drafts) change nothing. Places that were asked for
one by one and that the request ended without reaching are reported, because a list is a demand and not a filter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from birkhoff.hooks.selector import PositionSelector, bind

__all__ = ["PositionSelector", "Selection", "bind"]


class Selection:
    """One request's rows, step by step."""

    def __init__(self, selector: PositionSelector):
        self.selector = selector
        self._run = np.zeros(len(selector.demanded), bool)

    def rows(self, start: int, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Which tokens of the piece that starts at `start` are wanted: their places in the piece, ascending."""
        demanded = self.selector.demanded
        if len(demanded):
            first, last = np.searchsorted(demanded, (start, start + len(token_ids)))
            self._run[first:last] = True
        return self.selector.rows(start, token_ids)

    def never_computed(self, length: int | None = None) -> list[int]:
        """Places asked for that were not run; with `length`, also those of tokens that did not stay in the text."""
        demanded = self.selector.demanded
        missing = ~self._run if length is None else ~self._run | (demanded >= length)
        return demanded[missing].tolist()

    def finished(self, position: int) -> bool:
        """Whether no token at `position` or after it can be wanted."""
        return self.selector.finished(position)
