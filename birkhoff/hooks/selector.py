"""A position selector bound to one request: which rows of the current chunk are selected.

`rows` is called at every step for every request with a capture or an edit of some positions, so a chunk in which
nothing can match costs two comparisons and no array. Positions count the whole text: the prompt is 0..P-1,
generated tokens follow. Whether a token is a prompt token depends on its position alone, not on the chunk. The last
sampled token is never run, so there are at most `max_tokens - 1` generated rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from birkhoff.errors import SelectorError, quoted
from birkhoff.hooks.digest import framed
from birkhoff.hooks.positions import Positions, Side

_NONE, _FIRST = np.empty(0, np.int64), np.zeros(1, np.int64)
_NONE.setflags(write=False)
_FIRST.setflags(write=False)
NO_TOKEN = -1  # an id that no token has


@dataclass(frozen=True, eq=False)
class _TokenRange:
    """Tokens in [start, stop) that are in `listed`, have one of `token_ids`, and are not in any of `without`."""

    start: int
    stop: int
    listed: np.ndarray | None = None  # ascending positions
    token_ids: np.ndarray | None = None
    without: tuple[_TokenRange, ...] = ()

    @cached_property
    def reads_ids(self) -> bool:
        return self.token_ids is not None or any(part.token_ids is not None for part in self.without)

    @cached_property
    def id_set(self) -> frozenset[int] | None:
        return None if self.token_ids is None else frozenset(self.token_ids.tolist())

    def wants(self, position: int, token_id: int) -> bool:
        """Whether one token is selected, without arrays: the case of a decode step."""
        if not self.start <= position < self.stop or (
            self.id_set is not None and token_id not in self.id_set
        ):
            return False
        if self.listed is not None:
            index = bisect_left(self.listed, position)
            if index == len(self.listed) or self.listed[index] != position:
                return False
        return not any(part.wants(position, token_id) for part in self.without)

    def positions(
        self, start: int, stop: int, first: int, token_ids: Sequence[int] | np.ndarray | None
    ) -> np.ndarray:
        """Selected positions in [start, stop). `token_ids[0]` is the token at `first`; None ignores conditions on
        ids."""
        start, stop = max(start, self.start), min(stop, self.stop)
        if start >= stop:
            return _NONE
        if self.listed is None:
            selected = np.arange(start, stop)
        else:
            selected = self.listed[np.searchsorted(self.listed, start) : np.searchsorted(self.listed, stop)]
        ids = None
        if self.reads_ids and token_ids is not None:
            ids = np.asarray(token_ids[start - first : stop - first], np.int64)[selected - start]
        for part in self.without:
            if ids is not None or part.token_ids is None:
                kept = ~part.holds(selected, ids)
                selected, ids = selected[kept], None if ids is None else ids[kept]
        if self.token_ids is not None and ids is not None:
            selected = selected[np.isin(ids, self.token_ids)]
        return selected

    def count(self, start: int, stop: int) -> int:
        """Number of selected positions in [start, stop), conditions on ids ignored. Memory does not grow with the
        range: callers may name any number of tokens before a limit is applied."""
        if self.listed is not None:
            return len(self.positions(start, stop, 0, None))
        ranges = self._ranges(start, stop)
        points = self._excluded_points(ranges)
        return sum(len(part) for part in ranges) - len(points)

    def first(self, start: int, stop: int) -> int | None:
        """The first selected position in [start, stop), conditions on ids ignored; None if there is none."""
        if self.listed is not None:
            selected = self.positions(start, stop, 0, None)
            return int(selected[0]) if len(selected) else None
        ranges = self._ranges(start, stop)
        points = set(self._excluded_points(ranges).tolist())
        return next((at for part in ranges for at in part if at not in points), None)

    def _ranges(self, start: int, stop: int) -> list[range]:
        """[start, stop) of this range without the ranges it excludes, as disjoint ascending ranges."""
        ranges = [range(max(start, self.start), min(stop, self.stop))]
        for part in self.without:
            if part.listed is None and part.token_ids is None:
                ranges = [
                    piece
                    for each in ranges
                    for piece in (
                        range(each.start, min(each.stop, part.start)),
                        range(max(each.start, part.stop), each.stop),
                    )
                ]
        return [each for each in ranges if each]

    def _excluded_points(self, ranges: Sequence[range]) -> np.ndarray:
        """The positions in `ranges` that are excluded one by one, ascending and distinct."""
        listed = [part.listed for part in self.without if part.listed is not None and part.token_ids is None]
        if not listed:
            return _NONE
        points = np.unique(np.concatenate(listed))
        inside = np.zeros(len(points), bool)
        for each in ranges:
            inside |= (points >= each.start) & (points < each.stop)
        return points[inside]

    def holds(self, positions: np.ndarray, ids: np.ndarray | None) -> np.ndarray:
        """Mask of `positions` that are in this range, which has no `without` of its own."""
        mask = (positions >= self.start) & (positions < self.stop)
        if self.listed is not None:
            mask &= np.isin(positions, self.listed)
        if self.token_ids is not None:
            assert ids is not None, "a range with token ids is called with the ids"
            mask &= np.isin(ids, self.token_ids)
        return mask

    def signature(self, first: int, last: int) -> bytes:
        """Canonical bytes of the selected tokens of [first, last). A bound at the end of the text is left open, so that
        prompts with a common prefix agree whatever their lengths."""
        open_ends = (
            b"" if self.start <= first else str(self.start).encode(),
            b"" if self.stop >= last else str(self.stop).encode(),
        )
        lists = (
            b"" if values is None else b"=" + values.astype("<i8").tobytes()
            for values in (self.listed, self.token_ids)
        )
        pieces = (*open_ends, *lists, *sorted(part.signature(first, last) for part in self.without))
        return framed(*pieces) if any(pieces) or self.without else b""


@dataclass(frozen=True, eq=False)
class PositionSelector:
    """The selected tokens of one request. `demanded` are the positions that were listed one by one."""

    prompt_len: int
    max_tokens: int
    _prompt: _TokenRange | None = None
    _generated: _TokenRange | None = None
    demanded: np.ndarray = field(default_factory=lambda: _NONE)

    def wants(self, position: int, token_id: int) -> bool:
        """Whether the token `token_id` at `position` is selected."""
        parts = (self._prompt, self._generated)
        return any(part is not None and part.wants(position, token_id) for part in parts)

    def rows(self, start: int, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Offsets of the selected tokens in the chunk that starts at position `start`, ascending."""
        stop = start + len(token_ids)
        prompt, generated = self._prompt, self._generated
        early = prompt is not None and start < prompt.stop and stop > prompt.start
        late = generated is not None and start < generated.stop and stop > generated.start
        if not early and not late:
            return _NONE
        if stop - start == 1:
            token_id = NO_TOKEN if self.exact else token_ids[0]  # it may not be known yet
            return _FIRST if self.wants(start, token_id) else _NONE
        selected = prompt.positions(start, stop, start, token_ids) if early and prompt is not None else _NONE
        if late and generated is not None:
            later = generated.positions(start, stop, start, token_ids)
            selected = np.concatenate((selected, later)) if len(selected) else later
        return selected - start if start else selected

    def all_positions(self, prompt_ids: Sequence[int] | None) -> np.ndarray | None:
        """Every selected position, ascending; None if tokens are selected by ids that are not known."""
        parts = []
        if self._prompt is not None:
            if prompt_ids is None and self._prompt.reads_ids:
                return None
            parts.append(self._prompt.positions(0, self.prompt_len, 0, prompt_ids))
        if self._generated is not None:
            if self._generated.reads_ids:
                return None
            last = self.prompt_len + self.max_tokens
            parts.append(self._generated.positions(self.prompt_len, last, self.prompt_len, None))
        return np.concatenate(parts) if parts else _NONE

    def signature(self, phase: str) -> bytes | None:
        """Canonical bytes of the selected tokens of "prefill" or "decode": empty for all, None for none."""
        end = self.prompt_len + self.max_tokens
        part, first, last = (
            (self._prompt, 0, self.prompt_len)
            if phase == "prefill"
            else (self._generated, self.prompt_len, end)
        )
        return None if part is None or part.start >= part.stop else part.signature(first, last)

    def lowest_prompt_position(self) -> int | None:
        """The first selected prompt token, below which a cached prefix can be reused; None if no prompt token is
        selected.

        If the selection depends on token ids that `bind` was not given, the first that could be selected.
        """
        return None if self._prompt is None else self._prompt.first(0, self.prompt_len)

    def max_rows(self) -> tuple[int, int]:
        """Upper bounds of the numbers of selected (prompt, generated) rows; see `exact`."""
        last = self.prompt_len + max(self.max_tokens - 1, 0)
        early = 0 if self._prompt is None else self._prompt.count(0, self.prompt_len)
        late = 0 if self._generated is None else self._generated.count(self.prompt_len, last)
        return early, late

    @property
    def exact(self) -> bool:
        """Whether `max_rows` are reached when the request runs to `max_tokens`: nothing depends on token ids."""
        return not any(part is not None and part.reads_ids for part in (self._prompt, self._generated))


def bind(
    positions: Positions, prompt: int | Sequence[int], max_tokens: int, path: str = "positions"
) -> PositionSelector:
    """Bind a selector to a prompt, given by its token ids or its length, and to the number of tokens that may
    follow."""
    prompt_len = prompt if isinstance(prompt, int) else len(prompt)
    whole_text = _SelectorSpan(0, prompt_len + max_tokens, prompt_len)
    early = _SelectorSpan(0, prompt_len, prompt_len)
    late = _SelectorSpan(prompt_len, prompt_len + max_tokens, None)
    without = () if positions.exclude is None else (_part(positions.exclude, whole_text, f"{path}.exclude"),)
    part_of_prompt = part_of_rest = None
    if positions.indices is not None:
        listed = whole_text.absolute_positions(positions.indices, path)
        part_of_prompt = _at(listed[listed < prompt_len])
        part_of_rest = _at(listed[listed >= prompt_len])
    if positions.prompt is not None:
        part_of_prompt = _part(positions.prompt, early, f"{path}.prompt", without)
    if positions.generated is not None:
        part_of_rest = _part(positions.generated, late, f"{path}.generated", without)
    by_ids = part_of_prompt is not None and part_of_prompt.reads_ids
    # Ids are known: decided here, once.
    if by_ids and part_of_prompt is not None and not isinstance(prompt, int):
        part_of_prompt = _at(part_of_prompt.positions(0, prompt_len, 0, prompt))
    demanded = [
        part.positions(0, prompt_len + max_tokens, 0, None)
        for part, side in ((part_of_prompt, positions.prompt), (part_of_rest, positions.generated))
        if part is not None
        and (positions.indices is not None or (side is not None and side.indices is not None))
    ]
    selector = PositionSelector(
        prompt_len, max_tokens, part_of_prompt, part_of_rest, np.concatenate(demanded) if demanded else _NONE
    )
    if not by_ids and not len(selector.demanded) and sum(selector.max_rows()) == 0:
        raise SelectorError(
            f"selects nothing of a prompt of {prompt_len} tokens and up to {max_tokens} generated ones (the last of "
            "these is never run). Choose positions that will be computed, or raise max_tokens.",
            path,
            "position",
        )
    return selector


@dataclass(frozen=True)
class _SelectorSpan:
    """The range of a side in the whole text, and the position from which negative numbers count (None: not allowed)."""

    start: int
    stop: int
    end: int | None

    def absolute(self, index: int) -> int:
        """The position in the whole text of an index of this side."""
        if index < 0:
            assert self.end is not None, (
                "negative positions of a side without an end are refused by the parser"
            )
            return self.end + index
        return self.start + index

    def absolute_positions(self, indices: Sequence[int], path: str) -> np.ndarray:
        """The positions in the whole text of indices of this side, ascending and distinct."""
        for index in indices:
            if not self.start <= self.absolute(index) < self.stop:
                negative = f" or -{self.end}..-1 from the end of the prompt" if self.end else ""
                raise SelectorError(
                    f"position {quoted(index)} is out of range: there are {self.stop - self.start} of them, counted "
                    f"from 0{negative}.",
                    path,
                    "position",
                )
        return np.unique(np.array([self.absolute(index) for index in indices], np.int64))

    def window(self, window: tuple[int | None, int | None] | None) -> tuple[int, int]:
        """As a slice: bounds beyond the side are cut, and a window that ends before it starts is empty."""
        start, stop = window or (None, None)
        first = self.start if start is None else max(self.absolute(start), self.start)
        last = self.stop if stop is None else min(self.absolute(stop), self.stop)
        return first, max(first, last)


def _part(side: Side, span: _SelectorSpan, path: str, without: tuple[_TokenRange, ...] = ()) -> _TokenRange:
    listed = None if side.indices is None else span.absolute_positions(side.indices, path)
    start, stop = span.window(side.window)
    if listed is not None:
        listed.setflags(write=False)
        start, stop = int(listed[0]), int(listed[-1]) + 1
    ids = None if side.token_ids is None else np.array(side.token_ids, np.int64)
    if side.exclude is not None:
        without = (*without, _part(side.exclude, span, f"{path}.exclude"))
    return _TokenRange(start, stop, listed, ids, without)


def _at(listed: np.ndarray) -> _TokenRange | None:
    listed.setflags(write=False)  # `rows` returns views
    return _TokenRange(int(listed[0]), int(listed[-1]) + 1, listed) if len(listed) else None
