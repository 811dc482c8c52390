"""Edits of single rows as operations of fixed shape: which row is changed, and to what, is data in buffers that stay.

A lane does one kind of edit to at most one edit of each row of a step; rows without one keep their bits. Edits of one
operation that meet in a row lie in different lanes, in their order, so lanes one after the other are `edit.stages`. The
arithmetic is that of `hooks/edit.py`: float32, rounded once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from birkhoff.hooks.edit import ORDER, Op, Path, SiteContext, SiteEdit

MOST_STREAMS = 16  # columns of a lane's mask


class RowEdit(NamedTuple):
    """What a lane does. `turn` counts the edits of this operation that a row has had before."""

    op: Op
    turn: int
    path: Path
    norm_match: bool
    post_mix: bool
    per_stream: bool
    width: int  # of the vectors it is given


RowEditsByKind = dict[RowEdit, list[tuple[int, SiteEdit]]]  # by lane: rows and their edits


def lay(edits: Iterable[tuple[SiteEdit, Sequence[int]]], width: int) -> RowEditsByKind:
    """Rows of one site, each of `width` numbers, by lane. Vectors that are simply added to a row are summed up first,
    in float32."""
    found: RowEditsByKind = {}
    turns: dict[tuple[Op, int], int] = {}
    sums: dict[tuple[Path, int], torch.Tensor] = {}
    for edit, rows in edits:
        for place, row in enumerate(rows):
            one = edit if edit.vector.dim() == 1 else replace(edit, vector=edit.vector[place])
            if one.is_plain:
                own, known = one.constant(width), sums.get((one.path, row))
                sums[one.path, row] = own if known is None else known + own
                continue
            turn = turns.get((one.op, row), 0)
            turns[one.op, row] = turn + 1
            lane = RowEdit(
                one.op, turn, one.path, one.norm_match, one.post_mix, one.streams is not None, len(one.vector)
            )
            found.setdefault(lane, []).append((row, one))
    for (path, row), vector in sums.items():
        lane = RowEdit("add", -1, path, False, False, False, len(vector))
        found.setdefault(lane, []).append((row, SiteEdit("add", vector, path=path)))
    return dict(sorted(found.items(), key=lambda item: (ORDER.index(item[0].op), *item[0][1:])))


class RowEditBuffers:
    """One lane's data for steps of up to `rows` tokens."""

    def __init__(self, lane: RowEdit, rows: int, device: torch.device):
        self.lane = lane
        self.numbers = torch.zeros(rows, lane.width + 3, device=device)
        self.vector = self.numbers[:, : lane.width]
        self.scale, self.low, self.high = self.numbers[:, lane.width :].unbind(1)
        columns = MOST_STREAMS if lane.per_stream else 1
        self.active = torch.zeros(rows, columns, dtype=torch.bool, device=device)

    def fill(self, given: Sequence[tuple[int, SiteEdit]]) -> None:
        """From now on these rows are changed, and no others. Everything is put together on the host and copied once."""
        numbers = torch.zeros(self.numbers.shape)
        active = torch.zeros(self.active.shape, dtype=torch.bool)
        for row, edit in given:
            vector = edit.vector.float().cpu()
            numbers[row, : self.lane.width] = vector / vector.norm() if self.lane.norm_match else vector
            low = -torch.inf if edit.low is None else edit.low
            high = torch.inf if edit.high is None else edit.high
            numbers[row, self.lane.width :] = torch.tensor([edit.scale, low, high])
            active[row, list(edit.streams) if edit.streams is not None else [0]] = True
        self.numbers.copy_(numbers)
        self.active.copy_(active)

    def run(self, x: torch.Tensor, around: SiteContext) -> torch.Tensor:
        """x [n, width] or [n, m, d] -> a new one; fixed operations on fixed buffers."""
        lane, n = self.lane, len(x)
        vector, active = self.vector[:n], self.active[:n]
        if lane.per_stream:
            old = x.float()
            own = vector.unsqueeze(1) if lane.width == x.shape[-1] else vector.view(x.shape)
            active = active[:, : x.shape[1]].unsqueeze(-1)
        else:
            old, own = x.flatten(1).float(), vector
        scale = self.scale[:n].view(-1, *[1] * (old.dim() - 1))
        if lane.post_mix and around.post is not None:
            old = x.float()
            new = old + scale.view(-1, 1, 1) * (around.post.unsqueeze(-1) * vector.unsqueeze(1))
            active = active.unsqueeze(-1)
        elif lane.op == "patch":
            new = old + scale * (own - old)
        elif lane.op == "clamp":
            along = (old * own).sum(-1, keepdim=True)
            low, high = (t[:n].view(scale.shape) for t in (self.low, self.high))
            new = old + scale * (torch.minimum(torch.maximum(along, low), high) - along) * own
        elif lane.norm_match:
            new = old + scale * own * old.norm(dim=-1, keepdim=True)
        else:
            new = old + scale * own
        return torch.where(active, new.to(x.dtype), x.view(new.shape)).view(x.shape)
