"""Operations on the rows of a site: add a vector, clamp the component along a direction or every entry, replace a row.

`edit_rows` is the only implementation of this arithmetic. Eager steps call it with the rows that an edit names
(`edit_stages`), recorded steps call it with all rows of the step and buffers of fixed shape (`row_edits.py`). Both
give equal bits: every operation is elementwise except sums over a row, and `row_sum` adds in an order that does not
depend on the number of rows. Arithmetic is float32 whatever the site's dtype, rounded once per edit. Rows that no
edit names keep their bits.

Rows are flat, `[n, width]`; at stream sites an operation may work on single streams, `[n, m, d]`. A dictionary of
features spliced into a site is a `Splice`: its host does the arithmetic, the order is kept here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from birkhoff.hooks.digest import DigestPart, float32_bytes, framed, int64_bytes, number

if TYPE_CHECKING:
    from birkhoff.hooks.gating import GateRun, SiteGate

Op = Literal["patch", "add", "delta", "full", "call", "clamp", "bound", "attend"]
Path = Literal["both", "read", "carry"]
ExcludedPath = Literal["none", "carry", "read"]  # the path whose edits a tensor does not get
Number = float | torch.Tensor
# The order of operations at one site; captures of the unedited tensor come before all of them.
ORDER: tuple[Op, ...] = ("patch", "add", "delta", "full", "call", "clamp", "bound")
SINKHORN_ITERS = 20  # as in V4
SINKHORN_MIN = 1e-6  # entries below it count as this much
MAX_STACKED = 64  # rows whose edits are applied at once, each with a vector of its own
FOLD = 16  # largest number of terms that one step of `row_sum` adds on a GPU


@dataclass(frozen=True, eq=False)
class Routing:
    """What a router chose experts by: logits [n, E], and a bias [E] or, in hash-routed layers, the experts of every
    token id [vocab, k]. `factor` scales the weights."""

    logits: torch.Tensor
    bias: torch.Tensor | None
    hash_table: torch.Tensor | None
    token_ids: torch.Tensor
    factor: float


@dataclass(frozen=True, eq=False)
class SiteContext:
    """Inputs of a site besides its tensor. `post` [n, m]: write-out weights of the sublayer that last wrote the
    streams; `read` returns the weights [n, m] with which the next sublayer reads streams [n, m, d]; `routing` at the
    chosen experts."""

    post: torch.Tensor | None = None
    read: Callable[[torch.Tensor], torch.Tensor] | None = None
    routing: Routing | None = None


EditStage = Callable[[torch.Tensor, SiteContext], torch.Tensor]
GateRuns = Callable[["SiteGate", list[int]], "GateRun"]


class Splice(Protocol):
    """One request's use of a dictionary spliced into a site. All uses of one `host` in a step run together."""

    @property
    def op(self) -> Op: ...

    @property
    def path(self) -> Path: ...

    @property
    def host(self) -> SpliceHost: ...

    @property
    def gate(self) -> SiteGate | None:
        """Rows where it does not fire are as without this use."""
        ...

    @property
    def needs_post(self) -> bool:
        """Whether it reads the write-out weights of the sublayer before the site."""
        ...


class GraphSplice(Protocol):
    """Uses of one host as operations of fixed shape, for recorded steps."""

    def fill(self, uses: Sequence[tuple[Any, list[int]]]) -> None:
        """Write the buffers for these uses; replaces the uses before."""
        ...

    def run(self, x: torch.Tensor, context: SiteContext) -> torch.Tensor: ...


class SpliceHost(Protocol):
    @property
    def order(self) -> int:
        """Hosts at one site run in ascending order, independent of the order of requests in the batch."""
        ...

    def run(
        self, x: torch.Tensor, uses: Sequence[tuple[Any, list[int]]], context: SiteContext
    ) -> torch.Tensor:
        """Return a new tensor with the named rows changed and all others bit-identical."""
        ...

    def graph_kind(self, uses: Sequence[tuple[Any, list[int]]]) -> Hashable | None:
        """The fixed shapes that these uses fit, or None if a recorded step cannot run them."""
        ...

    def graph_splice(self, kind: Any) -> GraphSplice:
        """Buffers and operations of one `graph_kind`."""
        ...


@dataclass(frozen=True, eq=False)
class SiteEdit:
    """One operation at one site; which rows it changes is decided step by step.

    `vector` is `[width]`, or `[d]` with `streams` naming the streams it is applied to one by one; a patch may instead
    give each stream its own part of `[m * d]`. A patch may also hold one row for each of several positions: then
    `vector` is `[k, width]` and `positions` are the k positions."""

    op: Op
    vector: torch.Tensor
    scale: float = 1.0
    path: Path = "both"
    streams: tuple[int, ...] | None = None
    norm_match: bool = False  # add: the vector is scaled to the norm of each row
    post_mix: bool = False  # add: times the live write-out weights, as if the sublayer had produced it
    # `low` and `high`. Clamp: bounds of the row's component along `vector`, a unit vector; bound: of its entries.
    low: float | None = None
    high: float | None = None
    positions: tuple[int, ...] | None = None
    entries: tuple[int, ...] | None = None  # of a row: the others keep their bits
    renormalise: bool = False  # the row is a mixer [m * m] and is made doubly stochastic where it was changed
    gate: SiteGate | None = None  # rows where it does not fire keep their bits

    def at(self, positions: Sequence[int]) -> SiteEdit:
        """The edit for tokens at these positions: itself, or with one row of `vector` for each of them."""
        if self.positions is None:
            return self
        rows = [self.positions.index(position) for position in positions]
        return replace(self, vector=self.vector[rows], positions=None)

    @property
    def is_plain(self) -> bool:
        """Whether it adds a constant to the row: many of these are one operation."""
        return self.op == "add" and not self.norm_match and not self.post_mix and self.gate is None

    @cached_property
    def operand(self) -> torch.Tensor:
        """The vector as `edit_rows` takes it: float32, and for an add that matches norms every row of it a unit vector.
        Kept for later passes with gradients, which refuse tensors that were made in inference mode."""
        with torch.inference_mode(False), torch.no_grad():
            vector = self.vector.float()
            return vector / row_sum(vector * vector).sqrt() if self.norm_match else vector

    @property
    def bounds(self) -> tuple[float, float]:
        """`low` and `high`, infinite where there is none."""
        return -torch.inf if self.low is None else self.low, torch.inf if self.high is None else self.high

    def digest_part(self, key: tuple[str, int], positions: bytes) -> DigestPart:
        """Canonical bytes of the edit at one site, for the tokens that `positions` describes; empty for all.

        Operation, hook, layer, path, streams, flags, the vector as float32, scale and bounds as float64 (a scale of 1
        is omitted), and the positions; absent fields add nothing. Vectors enter by content, not by name."""
        hook, layer = key
        flags = bytes([self.norm_match, self.post_mix])
        streams = b"" if self.streams is None else ",".join(map(str, self.streams)).encode()
        scale = b"" if self.scale == 1 else number(self.scale)
        bounds = framed(number(self.low), number(self.high)) if self.op in ("clamp", "bound") else b""
        patched = b"" if self.positions is None else int64_bytes(self.positions)
        more: list[bytes] = []  # what most edits do not have
        if self.entries is not None or self.renormalise:
            entries = b"" if self.entries is None else int64_bytes(self.entries)
            more = [entries, bytes([self.renormalise])]
        if self.gate is not None:
            more = [*(more or [b"", b""]), self.gate.content]
        site = (hook.encode(), str(layer).encode(), self.path.encode(), streams, flags)
        numbers = (float32_bytes(self.vector), scale, bounds, positions, patched)
        return DigestPart(self.op, framed(*site, *numbers, *more))

    def constant(self, width: int) -> torch.Tensor:
        """The whole-row vector that a plain add adds, [width] float32."""
        vector = self.vector.float() * self.scale
        if self.streams is None:
            return vector
        whole = torch.zeros(width // vector.shape[0], vector.shape[0], device=vector.device)
        whole[list(self.streams)] = vector
        return whole.flatten()


# Edits of one site and the rows of the step they change.
RowEdits = Sequence[tuple[SiteEdit | Splice, list[int]]]


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension, [..., d] -> [..., 1], with bits that do not depend on the number of rows.

    On a GPU, PyTorch divides a long sum among threads in a way that depends on how many sums there are. Sums of at most
    `FOLD` terms are added by one thread in order, so a long row is folded in steps of that size."""
    while x.is_cuda and x.shape[-1] > FOLD:
        width = x.shape[-1]
        fold = next((size for size in (FOLD, 8, 4, 2) if width % size == 0 and width // size > 1), None)
        if fold is None:  # an odd width
            x = torch.nn.functional.pad(x, (0, 1))
        else:
            x = torch.unflatten(x, -1, (fold, width // fold)).sum(-2)
    return x.sum(-1, keepdim=True)


def edit_rows(
    op: Op,
    old: torch.Tensor,
    vector: torch.Tensor,
    scale: Number,
    low: Number = 0.0,
    high: Number = 0.0,
    norm_match: bool = False,
    post: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply one edit to float32 rows `old` [..., d]; the other arguments broadcast against it.

    patch: old + scale (vector - old). clamp: the component along the unit `vector` is moved into [low, high], by
    `scale` of the way; bound: every entry is. add: old + scale vector, times the row's norm (`norm_match`, `vector` is
    a unit vector) or times the write-out weights `post` [..., m, 1]."""
    if op == "patch":
        return torch.lerp(old, vector.expand_as(old), scale)  # `vector` itself for scale 1
    if op == "clamp":
        along = row_sum(old * vector)
        limited = torch.clamp(along, low, high)  # type: ignore[arg-type]  # two numbers or two tensors
        return old + scale * (limited - along) * vector
    if op == "bound":
        return torch.lerp(old, torch.clamp(old, low, high), scale)  # type: ignore[arg-type]
    if post is not None:
        return old + scale * (post * vector)
    if norm_match:
        return old + scale * vector * row_sum(old * old).sqrt()
    return old + scale * vector


def doubly_stochastic(mix: torch.Tensor, iters: int = SINKHORN_ITERS) -> torch.Tensor:
    """Sinkhorn: rows and columns of [..., m, m] divided by their sums in turn, ending on columns, as V4 makes its
    mixers. Sums are additions of slices, so that no bit depends on the number of matrices."""
    mix = mix.clamp_min(SINKHORN_MIN)
    for _ in range(iters):
        for dim in (-1, -2):
            parts = mix.unbind(dim)
            mix = mix / sum(parts[1:], parts[0]).unsqueeze(dim)
    return mix


def changed_entries(
    old: torch.Tensor, new: torch.Tensor, entries: torch.Tensor | None, renormalise: bool
) -> torch.Tensor:
    """Rows [n, width] as an edit leaves them: only `entries` (a mask that broadcasts) change, and a changed mixer is
    renormalised."""
    if entries is not None:
        new = torch.where(entries, new, old)
    if not renormalise:
        return new
    m = math.isqrt(new.shape[-1])
    mixed = doubly_stochastic(new.unflatten(-1, (m, m))).flatten(-2)
    return torch.where((new != old).any(-1, keepdim=True), mixed, old)


def add_total(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """x [n, ...] plus float32 rows [n, width], rounded to the dtype of x."""
    changed = x + total.view(x.shape)
    return changed if changed.dtype is x.dtype else changed.to(x.dtype)


def total_constant(edits: Iterable[SiteEdit], width: int) -> torch.Tensor:
    """The sum of plain adds, [width] float32: in order within each path, then by path. The order is the same whether
    the sums of paths are made here or by a step."""
    by_path: dict[Path, torch.Tensor] = {}
    for edit in edits:
        constant = edit.constant(width)
        by_path[edit.path] = by_path[edit.path] + constant if edit.path in by_path else constant
    totals = [by_path[path] for path in sorted(by_path)]
    return sum(totals[1:], totals[0])


def edit_stages(
    edits: RowEdits, table_adds: EditStage | None = None, runs: GateRuns | None = None
) -> list[EditStage]:
    """The edits of one site in their fixed order, to be applied one after the other to the site's tensor.

    The result can be reused for as long as edits and rows stay the same. `table_adds` applies the plain adds whose
    vectors are in tables; `runs` returns the run of a gate for some rows."""
    stages: list[EditStage] = []
    for op in ORDER:
        if op == "add" and table_adds is not None:
            stages.append(table_adds)
        hosts: dict[SpliceHost, list[tuple[Splice, list[int]]]] = {}
        plain: list[tuple[SiteEdit, list[int]]] = []
        others: list[_EditStage] = []
        for edit, rows in edits:
            if edit.op != op:
                continue
            if not isinstance(edit, SiteEdit):
                hosts.setdefault(edit.host, []).append((edit, rows))
            elif edit.is_plain:
                plain.append((edit, rows))
            else:
                run = None if edit.gate is None or runs is None else runs(edit.gate, rows)
                _add_stage(others, edit, rows, run)
        stages += [
            _SpliceStage(host, hosts[host], runs) for host in sorted(hosts, key=lambda host: host.order)
        ]
        if plain:
            stages.append(_PlainAddStage(plain))
        stages += others
    return stages


def _add_stage(stages: list[_EditStage], edit: SiteEdit, rows: list[int], gate: GateRun | None) -> None:
    """Add an edit to the last stage that can take it, or as a stage of its own. Edits of one row keep their order."""
    for stage in reversed(stages):
        if stage.touches(rows):
            break
        if stage.take(edit, rows, gate):
            return
    stages.append(_EditStage(edit, rows, gate))


class _SpliceStage:
    """All uses of one host. Where the gate of a use fires, the row is the one that this use gives together with those
    without a gate; a row has at most one gated use of a host."""

    def __init__(self, host: SpliceHost, uses: list[tuple[Splice, list[int]]], runs: GateRuns | None):
        self._host = host
        self._uses = uses
        self._plain = [(use, rows) for use, rows in uses if use.gate is None]
        gated = [(use.gate, rows) for use, rows in uses if use.gate is not None]
        assert runs is not None or not gated
        self._gates = [runs(gate, rows) for gate, rows in gated] if runs is not None else []

    def __call__(self, x: torch.Tensor, context: SiteContext) -> torch.Tensor:
        if not self._gates:
            return self._host.run(x, self._uses, context)
        plain = self._host.run(x, self._plain, context) if self._plain else x
        new = self._host.run(x, self._uses, context)
        rows = torch.tensor([row for gate in self._gates for row in gate.rows], device=x.device)
        fired = torch.cat([gate.fired for gate in self._gates]).view(-1, *[1] * (x.dim() - 1))
        return plain.index_copy(0, rows, torch.where(fired, new[rows], plain[rows]))


class _PlainAddStage:
    """One gather and one addition for all plain adds. Vectors added to the same row are summed in float32 first."""

    def __init__(self, edits: list[tuple[SiteEdit, list[int]]]):
        self._edits = edits
        self._data: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def _prepare(self, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        edits_of: dict[int, tuple[int, ...]] = {}
        for index, (_, rows) in enumerate(self._edits):
            for row in rows:
                edits_of[row] = (*edits_of.get(row, ()), index)
        slots: dict[tuple[int, ...], int] = {}
        slot_of = [slots.setdefault(indices, len(slots)) for indices in edits_of.values()]
        totals = [total_constant((self._edits[index][0] for index in indices), width) for indices in slots]
        return (
            torch.tensor(list(edits_of), device=device),
            torch.stack(totals).to(device),
            torch.tensor(slot_of, device=device),
        )

    def __call__(self, x: torch.Tensor, context: SiteContext) -> torch.Tensor:
        if self._data is None:
            self._data = self._prepare(x[0].numel(), x.device)
        rows, totals, slots = self._data
        return x.index_copy(0, rows, add_total(x.index_select(0, rows), totals.index_select(0, slots)))


class _EditStage:
    """Edits that are not plain adds, of one kind, applied at once to the rows they name; no row is named twice."""

    def __init__(self, edit: SiteEdit, rows: list[int], gate: GateRun | None = None):
        assert (gate is None) == (edit.gate is None)
        self._kind = _kind(edit)
        self._edits = [(edit, rows)]
        self._gates = [] if gate is None else [gate]
        self._rows = set(rows)
        self._data: tuple[Any, ...] | None = None

    def touches(self, rows: Sequence[int]) -> bool:
        return not self._rows.isdisjoint(rows)

    def take(self, edit: SiteEdit, rows: list[int], gate: GateRun | None) -> bool:
        """Include another edit of other rows; False if it is of another kind, or if there are many rows already."""
        if _kind(edit) != self._kind:
            return False
        if len(self._rows) + len(rows) > MAX_STACKED:
            return False
        self._edits.append((edit, rows))
        self._gates += [] if gate is None else [gate]
        self._rows.update(rows)
        return True

    def _prepare(self, width: int, device: torch.device) -> tuple[Any, ...]:
        """Rows, vectors, entries, and scale, low and high: of each row if there are several edits."""
        edit, entries = self._edits[0][0], None
        if edit.entries is not None:
            entries = torch.zeros(width, dtype=torch.bool)
            entries[list(edit.entries)] = True
            entries = entries.to(device)
        rows = torch.tensor([row for _, own in self._edits for row in own], device=device)
        if len(self._edits) == 1:
            return rows, edit.operand.to(device), entries, (edit.scale, *edit.bounds)
        # A vector is the same for all rows of its edit, or has one row for each.
        operands = [each.operand.expand(len(own), -1) for each, own in self._edits]
        vector = torch.cat(operands).to(device)
        numbers = torch.tensor([(each.scale, *each.bounds) for each, own in self._edits for _ in own])
        dims = 2 if edit.streams is not None or edit.post_mix else 1
        return rows, vector, entries, numbers.to(device).view(len(rows), 3, *[1] * dims).unbind(1)

    def __call__(self, x: torch.Tensor, context: SiteContext) -> torch.Tensor:
        edit = self._edits[0][0]
        if self._data is None:
            self._data = self._prepare(x[0].numel(), x.device)
        rows, vector, entries, numbers = self._data
        old = x.index_select(0, rows)  # [r, width] or [r, m, d]
        post = None
        if edit.streams is not None:
            if vector.shape[-1] == old[0].numel():  # each stream has its own part
                vector = torch.unflatten(vector, -1, old.shape[1:])[..., list(edit.streams), :]
            elif vector.dim() == 2:
                vector = vector.unsqueeze(1)
            part = old[:, list(edit.streams)].float()  # [r, streams, d]
        elif edit.post_mix:
            assert context.post is not None, (
                "edits with post_mix are refused where nothing has written the streams"
            )
            part = old.float()
            vector = vector.unsqueeze(1) if vector.dim() == 2 else vector
            post = context.post.index_select(0, rows).unsqueeze(-1)
        else:
            part = old.flatten(1).float()
        scale, low, high = numbers
        new = edit_rows(edit.op, part, vector, scale, low, high, edit.norm_match, post)
        new = changed_entries(part, new, entries, edit.renormalise)
        if self._gates:
            fired = (
                self._gates[0].fired if len(self._gates) == 1 else torch.cat([g.fired for g in self._gates])
            )
            new = torch.where(fired.view(-1, *[1] * (new.dim() - 1)), new, part)
        new = new.to(x.dtype)
        if edit.streams is not None:
            old[:, list(edit.streams)] = new
            new = old
        return x.index_copy(0, rows, new.view(old.shape))


def _kind(edit: SiteEdit) -> tuple[Any, ...]:
    """What edits have in common that are one stage."""
    return (
        edit.op,
        edit.path,
        edit.streams,
        edit.norm_match,
        edit.post_mix,
        edit.entries,
        edit.renormalise,
        edit.gate is None,
        edit.vector.shape[-1],
    )
