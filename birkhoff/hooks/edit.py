"""What can be done to the rows of a site: add a vector, hold a direction within bounds, put another row in place.

A dictionary of features spliced into a site is a `Splice`: its owner does the arithmetic, the order is kept here.

These are the operations alone: tensors and row numbers in, a new tensor out. Rows that are not named keep their bits.
Arithmetic is float32 whatever the site's dtype, rounded once. Rows are flat, `[n, width]`; at stream sites an operation
may work on single streams, `[n, m, d]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

import torch

Op = Literal["patch", "add", "delta", "full", "clamp"]
Path = Literal["both", "read", "carry"]
ORDER: tuple[Op, ...] = (
    "patch",
    "add",
    "delta",
    "full",
    "clamp",
)  # at one site; capture comes before all of them


@dataclass(frozen=True, eq=False)
class SiteContext:
    """What stands around a site. `post` [n, m]: write-out weights of the sublayer that wrote the streams last; `read`
    gives the weights [n, m] with which the coming sublayer reads streams [n, m, d]."""

    post: torch.Tensor | None = None
    read: Callable[[torch.Tensor], torch.Tensor] | None = None


class Splice(Protocol):
    """One request's use of something spliced into a site. All uses of one `host` in a step run together."""

    @property
    def op(self) -> Op: ...

    @property
    def path(self) -> Path: ...

    @property
    def host(self) -> SpliceHost: ...

    @property
    def needs_post(self) -> bool:
        """Whether it wants the write-out weights of the sublayer before the site."""
        ...


class SpliceHost(Protocol):
    @property
    def order(self) -> int:
        """Hosts at one site run in ascending order, whoever's request stands first in the batch."""
        ...

    def run(
        self, x: torch.Tensor, uses: Sequence[tuple[Splice, list[int]]], around: SiteContext
    ) -> torch.Tensor:
        """A new tensor with the named rows changed and all others bit-identical."""
        ...


@dataclass(frozen=True, eq=False)
class SiteEdit:
    """One operation at one site, for the rows that its owner names step by step.

    `vector` is `[width]`, or `[d]` with `streams` naming the streams it is applied to one by one; a patch may bring
    each stream its own part of `[m * d]`. A patch may also bring a row for each of several positions: then `vector` is
    `[k, width]` and `places` are the k positions."""

    op: Op
    vector: torch.Tensor
    scale: float = 1.0
    path: Path = "both"
    streams: tuple[int, ...] | None = None
    norm_match: bool = False  # add: the vector takes each row's own norm
    post_mix: bool = False  # add: times the live write-out weights, as if the sublayer had produced it
    low: float | None = None  # clamp: bounds of the row's component along `vector`, a unit vector
    high: float | None = None
    places: tuple[int, ...] | None = None

    def at(self, positions: Sequence[int]) -> SiteEdit:
        """The edit for tokens at these positions: itself, or with the row that each of them is given."""
        if self.places is None:
            return self
        found = [self.places.index(position) for position in positions]
        return replace(self, vector=self.vector[found], places=None)

    @property
    def is_plain(self) -> bool:
        """A constant added to the row: many of these are one operation."""
        return self.op == "add" and not self.norm_match and not self.post_mix

    def constant(self, width: int) -> torch.Tensor:
        """The whole-row vector a plain add adds, [width] float32."""
        vector = self.vector.float() * self.scale
        if self.streams is None:
            return vector
        whole = torch.zeros(width // vector.shape[0], vector.shape[0], device=vector.device)
        whole[list(self.streams)] = vector
        return whole.flatten()


EditStage = Callable[[torch.Tensor, SiteContext], torch.Tensor]


def stages(
    edits: Sequence[tuple[SiteEdit | Splice, list[int]]],
    added: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> list[EditStage]:
    """All edits of one site in their fixed order, sorted out once for as many steps as they stay the same. `added`
    does the plain additions that are in tables."""
    found: list[EditStage] = []
    for op in ORDER:
        if op == "add" and added is not None:
            found.append(lambda x, around: added(x))
        hosts: dict[SpliceHost, list[tuple[Splice, list[int]]]] = {}
        chosen = [(edit, rows) for edit, rows in edits if edit.op == op and isinstance(edit, SiteEdit)]
        for edit, rows in edits:
            if edit.op == op and not isinstance(edit, SiteEdit):
                hosts.setdefault(edit.host, []).append((edit, rows))
        for host in sorted(hosts, key=lambda host: host.order):
            found.append(partial(_spliced, host, hosts[host]))
        plain = [(edit, rows) for edit, rows in chosen if edit.is_plain]
        if plain:
            found.append(partial(_constants_added, plain))
        found += [partial(_edited, edit, rows) for edit, rows in chosen if not edit.is_plain]
    return found


def apply(
    x: torch.Tensor, edits: Sequence[tuple[SiteEdit | Splice, list[int]]], around: SiteContext
) -> torch.Tensor:
    """All edits of one site of one step."""
    for stage in stages(edits):
        x = stage(x, around)
    return x


def _spliced(
    host: SpliceHost, uses: Sequence[tuple[Splice, list[int]]], x: torch.Tensor, around: SiteContext
) -> torch.Tensor:
    return host.run(x, uses, around)


def _constants_added(
    edits: list[tuple[SiteEdit, list[int]]], x: torch.Tensor, around: SiteContext
) -> torch.Tensor:
    return _add_constants(x, edits)


def _edited(edit: SiteEdit, rows: list[int], x: torch.Tensor, around: SiteContext) -> torch.Tensor:
    return _edit_rows(x, edit, rows, around.post)


def _add_constants(x: torch.Tensor, edits: list[tuple[SiteEdit, list[int]]]) -> torch.Tensor:
    """One gather and one addition for all vectors that are simply added."""
    width = x[0].numel()
    table = torch.stack([edit.constant(width) for edit, _ in edits]).to(x.device)
    total: dict[int, list[int]] = {}
    for slot, (_, rows) in enumerate(edits):
        for row in rows:
            total.setdefault(row, []).append(slot)
    where = torch.tensor(list(total), device=x.device)
    if all(len(slots) == 1 for slots in total.values()):
        delta = table[torch.tensor([slots[0] for slots in total.values()], device=x.device)]
    else:  # several edits on one row: summed in float32 before they meet it
        delta = torch.stack([table[slots].sum(0) for slots in total.values()])
    return _replace(x, where, x[where].flatten(1).float() + delta)


def _edit_rows(
    x: torch.Tensor, edit: SiteEdit, numbers: list[int], post: torch.Tensor | None
) -> torch.Tensor:
    rows = torch.tensor(numbers, device=x.device)
    old = x[rows].float()
    shape = old.shape
    vector = edit.vector.float().to(x.device)
    if edit.streams is not None:
        parts = old.clone()  # [r, m, d]
        own = vector.unflatten(-1, shape[1:]) if vector.shape[-1] == old[0].numel() else None  # [.., m, d]
        for stream in edit.streams:
            parts[:, stream] = _change(old[:, stream], vector if own is None else own[..., stream, :], edit)
        return _replace(x, rows, parts.flatten(1))
    if edit.post_mix and post is not None:
        spread = post[rows].unsqueeze(-1) * vector.view(
            1, 1, -1
        )  # a d-wide vector, into every stream by its weight
        return _replace(x, rows, (old + edit.scale * spread).flatten(1))
    return _replace(x, rows, _change(old.flatten(1), vector, edit))


def _change(old: torch.Tensor, vector: torch.Tensor, edit: SiteEdit) -> torch.Tensor:
    if edit.op == "patch":
        return old + edit.scale * (vector - old)
    if edit.op == "clamp":
        along = old @ vector
        held = along.clamp(min=edit.low, max=edit.high)
        return old + edit.scale * (held - along).unsqueeze(-1) * vector
    step = edit.scale * vector
    if edit.norm_match:
        step = edit.scale * vector / vector.norm() * old.norm(dim=-1, keepdim=True)
    return old + step


def _replace(x: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return x.index_copy(0, rows, values.view(len(rows), *x.shape[1:]).to(x.dtype))
