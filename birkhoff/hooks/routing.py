"""Edits of the router: which experts a token gets, and with which weights.

`reroute` is the only implementation. An edit has three numbers per expert: what is added to its score, whether it is
forced (1) or banned (-1), and its weight (NaN: as computed). Scores are sqrt-softplus of the router's logits plus what
is added, at least 0. Experts are chosen by score and bias; in hash-routed layers those of the token's table come first,
and scores choose among the others. Forced experts come before all others, banned ones are never chosen. Weights are the
scores of the chosen experts, normalised and scaled as in the model, unless they are set.

Edits of one row are merged: additions are summed, later choices and weights replace earlier ones. A step's edits at a
layer are one splice (`edit.Splice`) of the tensor `[n, k, 2]` of ids and weights.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from birkhoff.hooks.digest import DigestPart, float32_bytes, framed
from birkhoff.hooks.edit import GraphSplice, Op, Path, Routing, SiteContext
from birkhoff.hooks.gating import SiteGate

Uses = Sequence[tuple["ExpertUse", list[int]]]
MAX_GRAPH_ROWS = 64  # rows of a recorded step
MAX_CACHED = 16


def reroute(routing: Routing, rows: torch.Tensor | None, numbers: torch.Tensor, topk: int) -> torch.Tensor:
    """Ids and weights [r, k, 2] float32 of rows (None: all) under edits `numbers` [r, 3, E]."""
    logits = routing.logits if rows is None else routing.logits.index_select(0, rows)
    add, choice, weight = numbers.unbind(1)
    scores = (_scores(logits.float().contiguous()) + add).clamp_min(0)
    group = choice
    if routing.hash_table is None:
        biased = scores if routing.bias is None else scores + routing.bias
    else:
        tokens = routing.token_ids if rows is None else routing.token_ids.index_select(0, rows)
        table = routing.hash_table[tokens].long()
        biased, group = scores, group.scatter_add(1, table, torch.full_like(group, 0.5)[:, : table.shape[1]])
    by_score = biased.sort(dim=-1, descending=True, stable=True).indices
    by_group = group.gather(1, by_score).sort(dim=-1, descending=True, stable=True).indices
    ids = by_score.gather(1, by_group)[:, :topk]
    chosen = scores.gather(1, ids).unbind(1)
    total = sum(chosen[1:], chosen[0]).clamp_min(torch.finfo(torch.float32).tiny)
    weights = torch.stack(chosen, 1) / total.unsqueeze(1) * routing.factor
    given = weight.gather(1, ids)
    return torch.stack((ids.float(), torch.where(given.isnan(), weights, given)), -1)


def _scores(logits: torch.Tensor) -> torch.Tensor:
    """sqrt(softplus(logits)), from functions whose bits do not depend on the number of rows; those of
    `torch.nn.functional.softplus` do on a CPU, where the last numbers of a tensor are computed one by one."""
    return (logits.clamp_min(0) + torch.log1p(torch.exp(-logits.abs()))).sqrt()


@dataclass(frozen=True, eq=False)
class ExpertUse:
    """One request's edit of the router of some layers: `numbers` [3, E]. A splice."""

    numbers: torch.Tensor
    host: RouterHost
    op: Op = "patch"
    path: Path = "both"
    needs_post: bool = False
    gate: SiteGate | None = None

    def digest_part(self, key: tuple[str, int], positions: bytes) -> DigestPart:
        hook, layer = key
        gates = [] if self.gate is None else [self.gate.content]
        return DigestPart(
            "patch", framed(hook.encode(), str(layer).encode(), self._content, positions, *gates)
        )

    @cached_property
    def _content(self) -> bytes:
        given = ~self.numbers[2].isnan()
        parts = (*self.numbers[:2], given.float(), torch.where(given, self.numbers[2], 0.0))
        return framed(*map(float32_bytes, parts))


def merge(earlier: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
    """The numbers [3, E] of two edits of one row."""
    choice = torch.where(later[1] == 0, earlier[1], later[1])
    return torch.stack((earlier[0] + later[0], choice, torch.where(later[2].isnan(), earlier[2], later[2])))


def merged_rows(uses: Uses) -> dict[int, torch.Tensor]:
    """The numbers of every edited row."""
    by_row: dict[int, torch.Tensor] = {}
    for use, rows in uses:
        for row in rows:
            by_row[row] = merge(by_row[row], use.numbers) if row in by_row else use.numbers
    return by_row


@dataclass(frozen=True)
class RouterHost:
    """Runs the router edits of a step for a model with `experts` experts of which `topk` are chosen."""

    experts: int
    topk: int
    order: int = 0
    _prepared: OrderedDict[Any, tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=OrderedDict, compare=False, repr=False
    )

    def run(self, x: torch.Tensor, uses: Uses, context: SiteContext) -> torch.Tensor:
        assert context.routing is not None
        name = tuple((use, tuple(rows)) for use, rows in uses)
        if name not in self._prepared:
            by_row = merged_rows(uses)
            index = torch.tensor(list(by_row), device=x.device)
            self._prepared[name] = index, torch.stack(list(by_row.values())).to(x.device)
            if len(self._prepared) > MAX_CACHED:
                self._prepared.popitem(last=False)
        index, numbers = self._prepared[name]
        return x.index_copy(0, index, reroute(context.routing, index, numbers, self.topk))

    def graph_kind(self, uses: Uses) -> str | None:
        return "rows" if max(row for _, rows in uses for row in rows) < MAX_GRAPH_ROWS else None

    def graph_splice(self, kind: Any) -> GraphSplice:
        return GraphRouter(self)


class GraphRouter:
    """Router edits of recorded steps: all rows are routed again, and those with an edit replace the others."""

    def __init__(self, host: RouterHost):
        self._host = host
        self._numbers = torch.zeros(MAX_GRAPH_ROWS, 3, host.experts)
        self._active = torch.zeros(MAX_GRAPH_ROWS, 1, 1, dtype=torch.bool)

    def fill(self, uses: Uses) -> None:
        numbers = torch.zeros(MAX_GRAPH_ROWS, 3, self._host.experts)
        numbers[:, 2] = torch.nan
        active = torch.zeros(MAX_GRAPH_ROWS, 1, 1, dtype=torch.bool)
        for row, own in merged_rows(uses).items():
            numbers[row], active[row] = own, True
        self._numbers.copy_(numbers)
        self._active.copy_(active)

    def run(self, x: torch.Tensor, context: SiteContext) -> torch.Tensor:
        assert context.routing is not None
        if self._numbers.device != x.device:  # the first step of a pattern, which is not recorded
            self._numbers, self._active = self._numbers.to(x.device), self._active.to(x.device)
        count = len(x)
        new = reroute(context.routing, None, self._numbers[:count], self._host.topk)
        return torch.where(self._active[:count], new, x)
