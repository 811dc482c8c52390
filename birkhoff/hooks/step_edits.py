"""The edits of one step, by site: plain adds from the tables, and all others row by row.

`StepEditBuilder.build` determines for every edit of every span which tokens of the chunk it changes; for generated
tokens the plan often knows this in advance. While requests only decode, the result is the same from step to step;
then the same `StepEdits` object is returned and nothing is built. The index from tokens to table rows is a buffer
of a few fixed sizes, padded with the row that changes nothing and written in place.

A plan without table rows (a single forward pass for a trace, for example) has its plain adds applied row by row, with
the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from birkhoff.hooks.attention_change import AttentionChange, RowChanges
from birkhoff.hooks.call_use import CallUse
from birkhoff.hooks.edit import (
    EditStage,
    ExcludedPath,
    Path,
    SiteContext,
    SiteEdit,
    Splice,
    add_total,
    edit_stages,
)
from birkhoff.hooks.gating import GateRun, SiteGate, SiteGates
from birkhoff.hooks.plan import Key, Plan, Span
from birkhoff.hooks.vector_table import SENTINEL, Tables, gather

SIZES = (8, 64, 512)  # tokens an index can hold; beyond the last, multiples of it
MAX_CACHED_TOKENS = 64  # up to this many tokens, the sum of table rows is kept from step to step
SPARSE_SHARE = 4  # when at most one token in this many is changed, only those are gathered


def bucket(count: int) -> int:
    """The size of the buffer for `count` tokens."""
    for size in SIZES:
        if count <= size:
            return size
    return -(-count // SIZES[-1]) * SIZES[-1]


class SiteEdits:
    """The edits of one site: `table_paths` of its table rows, and `row_edits` with the rows of the step they change."""

    def __init__(self) -> None:
        self.table_paths: set[Path] = set()
        self.row_edits: list[tuple[SiteEdit | Splice, list[int]]] = []

    @property
    def changes(self) -> RowChanges:
        """The edits of a ragged site."""
        return [(edit, rows) for edit, rows in self.row_edits if isinstance(edit, AttentionChange)]

    @property
    def paths(self) -> set[Path]:
        return self.table_paths | {edit.path for edit, _ in self.row_edits}


@dataclass(eq=False)
class StepEdits:
    """All edits of a step. `token_rows` [lanes, tokens]: table rows added to each token; `only`: the tokens it covers,
    None for all."""

    sites: dict[Key, SiteEdits] = field(default_factory=dict)
    tables: Tables | None = None
    token_rows: torch.Tensor | None = None
    only: torch.Tensor | None = None
    gates: dict[Key, SiteGates] = field(default_factory=dict)  # by the site that they read
    _gate_runs: dict[tuple[SiteGate, tuple[int, ...]], GateRun] = field(default_factory=dict)
    _stages: dict[tuple[Key, ExcludedPath], list[EditStage]] = field(default_factory=dict)
    _totals: dict[tuple[Key, tuple[Path, ...]], torch.Tensor] = field(default_factory=dict)

    @property
    def needs_post(self) -> bool:
        """Whether some edit reads the write-out weights of the sublayer before it."""
        return any(
            edit.post_mix if isinstance(edit, SiteEdit) else edit.needs_post
            for site in self.sites.values()
            for edit, _ in site.row_edits
        )

    def gate_run(self, gate: SiteGate, rows: list[int]) -> GateRun:
        """The run of a gate for these rows, one for all edits that it gates."""
        name = (gate, tuple(rows))
        if name not in self._gate_runs:
            self._gate_runs[name] = GateRun(gate, rows)
            self.gates.setdefault(gate.key, SiteGates()).add(self._gate_runs[name])
        return self._gate_runs[name]

    def stages(self, key: Key, excluded: ExcludedPath) -> list[EditStage]:
        """The edits of a site in their order, without those of the excluded path."""
        stages = self._stages.get((key, excluded))
        if stages is None:
            site = self.sites[key]
            paths = tuple(path for path in sorted(site.table_paths) if path != excluded)
            row_edits = [(edit, rows) for edit, rows in site.row_edits if edit.path != excluded]
            table_adds = partial(self._add_rows, key, paths) if paths else None
            stages = self._stages[key, excluded] = edit_stages(row_edits, table_adds, self.gate_run)
        return stages

    def _add_rows(
        self, key: Key, paths: tuple[Path, ...], x: torch.Tensor, context: SiteContext
    ) -> torch.Tensor:
        assert self.tables is not None and self.token_rows is not None
        total = self._totals.get((key, paths))  # valid while the tables stay unchanged
        if total is None:
            total = gather(self.token_rows, [self.tables.site((*key, path)) for path in paths])
            if len(total) <= MAX_CACHED_TOKENS:
                self._totals[key, paths] = total
        if self.only is None:
            return add_total(x, total)
        return x.index_copy(0, self.only, add_total(x.index_select(0, self.only), total))


@dataclass(frozen=True, eq=False)
class _ActiveEdit:
    """An edit that changes tokens in this step: its index in its plan, and the offsets of those tokens in the chunk."""

    span: Span
    index: int
    offsets: Sequence[int]

    @property
    def rows(self) -> list[int]:
        return [self.span.first_row + int(offset) for offset in self.offsets]


# Edits of a plan that change tokens of a chunk: indices if each changes the only token, else with offsets.
EditsOfChunk = Sequence[int] | Sequence[tuple[int, Sequence[int]]]


def _active_edits(span: Span, edits: EditsOfChunk) -> Iterator[_ActiveEdit]:
    for edit in edits:
        index, offsets = edit if isinstance(edit, tuple) else (edit, range(1))
        yield _ActiveEdit(span, index, offsets)


class StepEditBuilder:
    """Builds the edits of a step and reuses the last result while nothing differs."""

    def __init__(self, device: torch.device | str = "cpu"):
        self._device = torch.device(device)
        self._buffers: dict[tuple[int, int], torch.Tensor] = {}
        self._signature: list[Any] | None = None
        self._last: StepEdits | None = None

    def build(self, spans: Sequence[Span], num_rows: int | None) -> StepEdits | None:
        """The edits of a step of `num_rows` tokens (None: unknown), or None if there are none."""
        active: list[tuple[Span, EditsOfChunk]] = []
        signature: list[Any] = [num_rows]
        for span in spans:
            plan = span.plan
            if not plan.edits:
                continue
            if span.start >= span.prompt_len and len(span.token_ids) == 1 and plan.on_generated is not None:
                edits: EditsOfChunk = plan.on_generated  # the same for all generated tokens
                if edits:
                    plan.steered.add(span.start)
            else:
                edits = self._edits_of_chunk(span)
            if edits:
                active.append((span, edits))
                version = 0 if plan.table is None else plan.table.tables.version
                start = span.start if plan.by_position else 0
                signature.append((plan, span.first_row, start, edits, version))
        if not active:
            return None
        if signature != self._signature:
            self._last = self._build(
                [edit for span, edits in active for edit in _active_edits(span, edits)], num_rows
            )
            self._signature = signature
        return self._last

    def _edits_of_chunk(self, span: Span) -> list[tuple[int, Sequence[int]]]:
        edits: list[tuple[int, Sequence[int]]] = []
        for index, edit in enumerate(span.plan.edits):
            offsets = edit.offsets(span.start, span.token_ids, span.prompt_len)
            if len(offsets):
                offsets = offsets if isinstance(offsets, range) else [int(offset) for offset in offsets]
                edits.append((index, offsets))
                span.plan.steered.update(span.start + offset for offset in offsets)
        return edits

    def _build(self, active: Sequence[_ActiveEdit], num_rows: int | None) -> StepEdits:
        step = StepEdits()
        in_tables: dict[Plan, list[_ActiveEdit]] = {}
        for edit in active:
            table = edit.span.plan.table
            in_table = table is not None and edit.index in table.row_of
            if in_table and table is not None:
                assert step.tables in (None, table.tables), "a step has one set of tables"
                step.tables = table.tables
                in_tables.setdefault(edit.span.plan, []).append(edit)
                for hook, layer, path in table.sites(edit.index):
                    step.sites.setdefault((hook, layer), SiteEdits()).table_paths.add(path)
            self._add_row_edits(edit, step, in_table)
        if in_tables:
            self._index_tables(step, in_tables, num_rows)
        return step

    def _add_row_edits(self, active: _ActiveEdit, step: StepEdits, in_table: bool) -> None:
        """Add the operations that are not in a table; an edit may be in a table at some of its sites only."""
        rows: list[int] | None = None
        for key, edit in active.span.plan.edits[active.index].sites.items():
            if in_table and isinstance(edit, SiteEdit) and edit.is_plain:
                continue
            if isinstance(edit, (SiteEdit, CallUse)):
                edit = edit.at([active.span.start + offset for offset in active.offsets])
            rows = rows or active.rows
            if edit.gate is not None:
                step.gate_run(edit.gate, rows)
            step.sites.setdefault(key, SiteEdits()).row_edits.append((edit, rows))

    def _index_tables(
        self, step: StepEdits, in_tables: dict[Plan, list[_ActiveEdit]], num_rows: int | None
    ) -> None:
        """Edits of one request that may change the same tokens are in different lanes, ordered by content."""
        lanes = max(len(edits) for edits in in_tables.values())
        count = num_rows or 1 + max(
            row for edits in in_tables.values() for edit in edits for row in edit.rows
        )
        index = np.full((lanes, count), SENTINEL, np.int64)
        for plan, edits in in_tables.items():
            table = plan.table
            assert table is not None
            for lane, edit in enumerate(sorted(edits, key=lambda edit: table.rank[edit.index])):
                index[lane, edit.rows] = table.row_of[edit.index]
        changed = np.flatnonzero((index != SENTINEL).any(0))
        if num_rows is None or len(changed) * SPARSE_SHARE <= num_rows:
            step.only = torch.from_numpy(changed).to(self._device)
            index = index[:, changed]
        step.token_rows = self._write(index)

    def _write(self, index: np.ndarray[Any, Any]) -> torch.Tensor:
        lanes, count = index.shape
        size = bucket(count)
        if (lanes, size) not in self._buffers:
            self._buffers[lanes, size] = torch.zeros((lanes, size), dtype=torch.long, device=self._device)
        buffer = self._buffers[lanes, size]
        padded = np.full((lanes, size), SENTINEL, np.int64)
        padded[:, :count] = index
        buffer.copy_(torch.from_numpy(padded))
        return buffer[:, :count]
