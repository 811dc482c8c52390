"""What one step changes, by site: additions out of the tables, and everything else row by row.

`StepEditBuilder.of` asks every edit of every span which tokens of its piece it changes, unless the plan knows it of all
generated tokens. While requests only decode, the answers are the same step after step; then the same `StepEdits` are
handed out again and nothing is built. The index from
tokens to table rows is a buffer of a few fixed sizes, padded with the row that changes nothing and written in place.

A plan that holds no rows of a table (one forward pass for a trace, say) has its additions done row by row: the same
arithmetic, next door.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from birkhoff.hooks.edit import EditStage, Path, SiteContext, SiteEdit, Splice, stages
from birkhoff.hooks.plan import Key, Span
from birkhoff.hooks.vector_table import SENTINEL, Tables, add_total, gather

LeftOut = Literal["none", "carry", "read"]  # the path whose edits a tensor does not get
RowEdits = list[tuple[SiteEdit | Splice, list[int]]]
SIZES = (8, 64, 512)  # tokens an index can hold; beyond the last, multiples of it
KEPT = 64  # tokens for which the sum of what is added is kept from step to step
FEW = 4  # when fewer than one token in so many is touched, only those are gathered


def bucket(count: int) -> int:
    for size in SIZES:
        if count <= size:
            return size
    return -(-count // SIZES[-1]) * SIZES[-1]


class SiteEdits:
    """One site's share. `paths` of table rows that are live here; `others` are edits with their rows."""

    def __init__(self) -> None:
        self.paths: set[Path] = set()
        self.others: RowEdits = []

    @property
    def one_tensor(self) -> bool:
        """Whether what is read and what is carried stay the same tensor."""
        return self.paths <= {"both"} and all(edit.path == "both" for edit, _ in self.others)

    @property
    def carries(self) -> bool:
        return bool(self.paths - {"read"}) or any(edit.path != "read" for edit, _ in self.others)


@dataclass(eq=False)
class StepEdits:
    """A step's changes. `token_rows` [lanes, tokens]; `only` are the tokens it speaks of, None for all of them."""

    sites: dict[Key, SiteEdits] = field(default_factory=dict)
    tables: Tables | None = None
    token_rows: torch.Tensor | None = None
    only: torch.Tensor | None = None
    _sorted: dict[tuple[Key, LeftOut], list[EditStage]] = field(default_factory=dict)
    _totals: dict[tuple[Key, tuple[Path, ...]], torch.Tensor] = field(
        default_factory=dict
    )  # while tables stay as is

    def needs_post(self) -> bool:
        """Whether some edit wants the write-out weights of the sublayer before it."""
        return any(
            edit.post_mix if isinstance(edit, SiteEdit) else edit.needs_post
            for change in self.sites.values()
            for edit, _ in change.others
        )

    def whole(self, key: Key, x: torch.Tensor, around: SiteContext) -> torch.Tensor:
        """A site with one tensor."""
        return self._apply(key, "none", x, around)

    def parted(self, key: Key, x: torch.Tensor, around: SiteContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Streams: what is read and what is carried."""
        change = self.sites[key]
        if change.one_tensor:
            both = self._apply(key, "none", x, around)
            return both, both
        return self._apply(key, "carry", x, around), self._apply(key, "read", x, around)

    def _apply(self, key: Key, left_out: LeftOut, x: torch.Tensor, around: SiteContext) -> torch.Tensor:
        sorted_out = self._sorted.get((key, left_out))
        if sorted_out is None:
            sorted_out = self._sorted[key, left_out] = self._stages(key, left_out)
        for stage in sorted_out:
            x = stage(x, around)
        return x

    def _stages(self, key: Key, left_out: LeftOut) -> list[EditStage]:
        change = self.sites[key]
        paths = tuple(path for path in sorted(change.paths) if path != left_out)
        others = [(edit, rows) for edit, rows in change.others if edit.path != left_out]
        return stages(others, partial(self._add, key, paths) if paths else None)

    def _add(self, key: Key, paths: tuple[Path, ...], x: torch.Tensor) -> torch.Tensor:
        assert self.tables is not None and self.token_rows is not None
        total = self._totals.get((key, paths))
        if total is None:
            total = gather(self.token_rows, [self.tables.site((*key, path)) for path in paths])
            if len(total) <= KEPT:
                self._totals[key, paths] = total
        if self.only is None:
            return add_total(x, total)
        return x.index_copy(0, self.only, add_total(x.index_select(0, self.only), total))


@dataclass(frozen=True, eq=False)
class _Active:
    """One edit at work in this step: its number in its plan, and the tokens of the piece it changes."""

    span: Span
    number: int
    offsets: Sequence[int]

    @property
    def rows(self) -> list[int]:
        return [self.span.first_row + int(offset) for offset in self.offsets]


# The edits of a plan that meet a piece: numbers alone when each meets its one token, else with the tokens they meet.
Met = Sequence[int] | Sequence[tuple[int, Sequence[int]]]


def _uses(span: Span, met: Met) -> Iterator[_Active]:
    for one in met:
        number, offsets = one if isinstance(one, tuple) else (one, range(1))
        yield _Active(span, number, offsets)


class StepEditBuilder:
    """Makes the changes of a step, and keeps the last ones for as long as nothing is different."""

    def __init__(self, device: torch.device | str = "cpu"):
        self._device = torch.device(device)
        self._buffers: dict[tuple[int, int], torch.Tensor] = {}
        self._signature: list[Any] | None = None
        self._last: StepEdits | None = None

    def of(self, spans: Sequence[Span], num_rows: int | None) -> StepEdits | None:
        """The changes of a step of `num_rows` tokens (None: many), or None when there are none."""
        met: list[tuple[Span, Met]] = []
        signature: list[Any] = [num_rows]
        for span in spans:
            plan = span.plan
            if not plan.edits:
                continue
            if span.start >= span.prompt_len and len(span.token_ids) == 1 and plan.on_generated is not None:
                here: Met = plan.on_generated  # known without asking, and the same for every token to come
                if here:
                    plan.steered.add(span.start)
            else:
                here = self._ask(span)
            if here:
                met.append((span, here))
                version = 0 if plan.table is None else plan.table.tables.version
                signature.append((plan, span.first_row, span.start if plan.by_position else 0, here, version))
        if not met:
            return None
        if signature != self._signature:
            active = [use for span, here in met for use in _uses(span, here)]
            self._last = self._build(active, num_rows)
            self._signature = signature
        return self._last

    def _ask(self, span: Span) -> list[tuple[int, Sequence[int]]]:
        found: list[tuple[int, Sequence[int]]] = []
        for number, edit in enumerate(span.plan.edits):
            offsets = edit.offsets(span.start, span.token_ids, span.prompt_len)
            if len(offsets):
                offsets = offsets if isinstance(offsets, range) else [int(offset) for offset in offsets]
                found.append((number, offsets))
                span.plan.steered.update(span.start + offset for offset in offsets)
        return found

    def _build(self, active: Sequence[_Active], num_rows: int | None) -> StepEdits:
        changes = StepEdits()
        tabled: dict[Any, list[_Active]] = {}  # by plan
        for use in active:
            table = use.span.plan.table
            in_table = table is not None and use.number in table.row_of
            if in_table and table is not None:
                assert changes.tables in (None, table.tables), "a step has one set of tables"
                changes.tables = table.tables
                tabled.setdefault(use.span.plan, []).append(use)
                for hook, layer, path in table.sites(use.number):
                    changes.sites.setdefault((hook, layer), SiteEdits()).paths.add(path)
            self._row_by_row(use, changes, in_table)
        if tabled:
            self._index(changes, tabled, num_rows)
        return changes

    def _row_by_row(self, use: _Active, changes: StepEdits, in_table: bool) -> None:
        """What is not in a table: an edit may be in one at some sites only."""
        rows: list[int] | None = None
        for key, edit in use.span.plan.edits[use.number].sites.items():
            if isinstance(edit, SiteEdit):
                if in_table and edit.is_plain:
                    continue
                edit = edit.at([use.span.start + offset for offset in use.offsets])
            rows = rows or use.rows
            changes.sites.setdefault(key, SiteEdits()).others.append((edit, rows))

    def _index(self, changes: StepEdits, tabled: dict[Any, list[_Active]], num_rows: int | None) -> None:
        """Edits of one request that may meet the same tokens lie in different lanes, in the order of their content."""
        lanes = max(len(uses) for uses in tabled.values())
        known = num_rows or 1 + max(row for uses in tabled.values() for use in uses for row in use.rows)
        index = np.full((lanes, known), SENTINEL, np.int64)
        for plan, uses in tabled.items():
            for lane, use in enumerate(sorted(uses, key=lambda use: plan.table.rank[use.number])):
                index[lane, use.rows] = plan.table.row_of[use.number]
        touched = np.flatnonzero((index != SENTINEL).any(0))
        if num_rows is None or len(touched) * FEW <= num_rows:
            changes.only = torch.from_numpy(touched).to(self._device)
            index = index[:, touched]
        changes.token_rows = self._write(index)

    def _write(self, index: np.ndarray) -> torch.Tensor:
        lanes, count = index.shape
        size = bucket(count)
        if (lanes, size) not in self._buffers:
            self._buffers[lanes, size] = torch.zeros((lanes, size), dtype=torch.long, device=self._device)
        held = self._buffers[lanes, size]
        padded = np.full((lanes, size), SENTINEL, np.int64)
        padded[:, :count] = index
        held.copy_(torch.from_numpy(padded))
        return held[:, :count]
