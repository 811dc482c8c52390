"""Edits of single rows as operations of fixed shape, for recorded steps: which rows change, and how, is data in
buffers.

A row edit buffer applies one kind of edit to at most one edit of each row of a step. Edits of one operation on the same
row are in different buffers, in their order, so running the buffers one after the other equals `edit.edit_stages`. The
arithmetic is `edit.edit_rows` for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from birkhoff.hooks.edit import (
    ORDER,
    Op,
    Path,
    SiteContext,
    SiteEdit,
    add_total,
    changed_entries,
    edit_rows,
    total_constant,
)
from birkhoff.hooks.gating import SiteGate

MAX_STREAMS = 128  # columns of a mask: streams, or heads of attention
PLAIN = -1  # `rank` of the sum of a row's plain adds, which comes before its other adds


class RowEditKind(NamedTuple):
    """What one buffer does. `rank` counts the edits of this operation that a row has before this one."""

    op: Op
    rank: int
    path: Path
    norm_match: bool
    post_mix: bool
    per_stream: bool
    width: int  # of its vectors
    per_entry: bool = False
    renormalise: bool = False
    gate: tuple[str, int, int] | tuple[()] = ()  # hook, layer and number of the gate buffers

    @property
    def is_plain(self) -> bool:
        return self.rank == PLAIN


RowEditsByKind = dict[RowEditKind, list[tuple[int, SiteEdit]]]  # rows and their edits


class StepGates:
    """The gates of a step by site and number: gates of one row at one site have different numbers."""

    def __init__(self) -> None:
        self.by_number: dict[tuple[str, int, int], list[tuple[int, SiteGate]]] = {}
        self._of_row: dict[tuple[tuple[str, int], int], list[SiteGate]] = {}

    def number(self, gate: SiteGate, row: int) -> tuple[str, int, int]:
        own = self._of_row.setdefault((gate.key, row), [])
        if gate not in own:
            own.append(gate)
            self.by_number.setdefault((*gate.key, len(own) - 1), []).append((row, gate))
        return *gate.key, own.index(gate)


def group_row_edits(
    edits: Iterable[tuple[SiteEdit, Sequence[int]]], width: int, gates: StepGates | None = None
) -> RowEditsByKind:
    """Group the edits of one site, whose rows have `width` numbers, by kind. Plain adds of one row are summed. Gates
    are numbered by `gates`."""
    gates = gates or StepGates()
    groups: RowEditsByKind = {}
    counts: dict[tuple[Op, int], int] = {}
    plain: dict[tuple[Path, int], list[SiteEdit]] = {}
    for edit, rows in edits:
        for index, row in enumerate(rows):
            row_edit = edit if edit.vector.dim() == 1 else replace(edit, vector=edit.vector[index])
            if row_edit.is_plain:
                plain.setdefault((row_edit.path, row), []).append(row_edit)
                continue
            count = counts.get((edit.op, row), 0)
            counts[edit.op, row] = count + 1
            kind = RowEditKind(
                edit.op,
                count,
                edit.path,
                edit.norm_match,
                edit.post_mix,
                edit.streams is not None,
                row_edit.vector.shape[0],
                edit.entries is not None,
                edit.renormalise,
                () if edit.gate is None else gates.number(edit.gate, row),
            )
            groups.setdefault(kind, []).append((row, row_edit))
    for (path, row), adds in plain.items():
        kind = RowEditKind("add", PLAIN, path, False, False, False, width)
        groups.setdefault(kind, []).append((row, SiteEdit("add", total_constant(adds, width), path=path)))
    return dict(sorted(groups.items(), key=lambda item: (ORDER.index(item[0].op), *item[0][1:])))


class RowEditBuffers:
    """The data of one kind of row edit, for steps of up to `rows` tokens."""

    def __init__(self, kind: RowEditKind, rows: int, device: torch.device, fired: torch.Tensor | None = None):
        self.kind = kind
        self._fired = fired
        self.numbers = torch.full((rows, kind.width + 3), -0.0, device=device)
        self.vector = self.numbers[:, : kind.width]
        self.scale, self.low, self.high = self.numbers[:, kind.width :].unbind(1)
        columns = kind.width if kind.per_entry else MAX_STREAMS if kind.per_stream else 1
        self.active = torch.zeros(rows, columns, dtype=torch.bool, device=device)

    def fill(self, row_edits: Sequence[tuple[int, SiteEdit]]) -> None:
        """Set the rows to change and their edits, replacing those before. Buffers are assembled on the host and copied
        once. Rows without an edit hold minus zero, which changes no number when it is added."""
        numbers = torch.full(self.numbers.shape, -0.0)
        active = torch.zeros(self.active.shape, dtype=torch.bool)
        for row, edit in row_edits:
            numbers[row, : self.kind.width] = edit.operand.cpu()
            numbers[row, self.kind.width :] = torch.tensor([edit.scale, *edit.bounds])
            active[row, list(edit.entries or edit.streams or [0])] = True
        self.numbers.copy_(numbers)
        self.active.copy_(active)

    def run(self, x: torch.Tensor, context: SiteContext) -> torch.Tensor:
        """Apply the edits to x [n, width] or [n, m, d] and return a new tensor."""
        kind, n = self.kind, len(x)
        vector, active = self.vector[:n], self.active[:n]
        post = None
        old = x
        if kind.per_stream:
            vector = vector.unsqueeze(1) if kind.width == x.shape[-1] else vector.view(x.shape)
            active = active[:, : x.shape[1]].unsqueeze(-1)
        elif kind.post_mix:
            assert context.post is not None, (
                "edits with post_mix are refused where nothing has written the streams"
            )
            post = context.post.unsqueeze(-1)
            vector = vector.unsqueeze(1)
            active = active.unsqueeze(-1)
        else:
            old = x.flatten(1)
        shape = (n, *[1] * (old.dim() - 1))
        scale, low, high = (numbers[:n].view(shape) for numbers in (self.scale, self.low, self.high))
        new = edit_rows(kind.op, old.float(), vector, scale, low, high, kind.norm_match, post)
        new = changed_entries(old.float(), new, active if kind.per_entry else None, kind.renormalise)
        if kind.per_entry and kind.renormalise:
            active = active.any(1, keepdim=True)
        if self._fired is not None:
            active = active & self._fired[:n].view(shape)
        return torch.where(active, new.to(x.dtype), old).view(x.shape)


class PlainAdds:
    """The plain adds of one site: the sums of several paths, added at once."""

    def __init__(self, buffers: Sequence[RowEditBuffers]):
        self._vectors = [buffer.vector for buffer in sorted(buffers, key=lambda buffer: buffer.kind.path)]

    def __call__(self, x: torch.Tensor, context: SiteContext) -> torch.Tensor:
        total = self._vectors[0][: len(x)]
        for vector in self._vectors[1:]:
            total = total + vector[: len(x)]
        return add_total(x, total)
