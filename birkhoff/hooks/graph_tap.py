"""The tap of a recorded decode step: fixed operations on persistent buffers, which a CUDA graph can hold.

A `Pattern` names what happens at which sites: what is captured, added from tables, edited row by row or spliced,
and how many buffers each takes. It is all that a recorded step depends on. Rows, vectors, features and bounds are
data, written by `fill` between replays, so edits come, go and change without a new recording. If nothing is
captured or edited there is no pattern and a graph without a tap is replayed.

A captured site is copied whole into its column of a `CaptureBuffer`. A sublayer output that is captured and not edited
is written by the sublayer directly to a buffer (`keep`), and `end` copies all of those at once.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from birkhoff.hooks.batch_tap import BatchTap
from birkhoff.hooks.capture_buffer import CaptureBuffer, RowKind, SiteTensor
from birkhoff.hooks.edit import ORDER, EditStage, ExcludedPath, GraphSplice, Op, Path, SiteContext, SiteEdit
from birkhoff.hooks.gating import GateBuffers
from birkhoff.hooks.key_rules import KeyRules, key_rules
from birkhoff.hooks.plan import Key
from birkhoff.hooks.row_edits import (
    PlainAdds,
    RowEditBuffers,
    RowEditKind,
    RowEditsByKind,
    StepGates,
    group_row_edits,
)
from birkhoff.hooks.site_runner import LayerTap, PostMix, SiteRunner
from birkhoff.hooks.sites import BY_NAME, Site
from birkhoff.hooks.step_edits import SiteEdits, StepEdits
from birkhoff.hooks.tap import stack_parts
from birkhoff.hooks.vector_table import gather_add

MAX_SCRATCH = 1 << 27  # bytes of scratch memory
ALIGNMENT = 512  # bytes: each output buffer begins at a multiple of this, as a separate allocation would

Uses = list[tuple[Any, list[int]]]


class SpliceGroup(NamedTuple):
    """Uses of one host at one site. `kind` fixes the shapes of its operations."""

    op: Op
    path: Path
    host: Any
    kind: Hashable
    gate: tuple[str, int, int] | tuple[()] = ()  # of some uses: hook, layer and number of the gate buffers


class Pattern(NamedTuple):
    captures: tuple[SiteTensor, ...]
    adds: tuple[tuple[Key, Path], ...]  # from tables
    token_lanes: int
    row_edits: tuple[tuple[Key, RowEditKind], ...]
    splices: tuple[tuple[Key, SpliceGroup], ...]
    table_addresses: tuple[int, ...]  # of the tables' slabs and maps, which are reallocated when they grow
    gates: tuple[tuple[str, int, int, int], ...] = ()  # hook, layer, number and width of a row
    rules: tuple[tuple[int, int], ...] = ()  # layers with changed attention, and their heads


class GraphPlan(NamedTuple):
    """The captures and edits of a `BatchTap`, grouped for a recorded step."""

    pattern: Pattern
    row_edits: dict[Key, RowEditsByKind]
    uses: dict[tuple[Key, SpliceGroup], Uses]
    gates: StepGates
    rules: Mapping[int, KeyRules] = {}  # by layer


class AttentionShape(NamedTuple):
    """Heads of attention, and the compression ratio of every layer."""

    heads: int
    ratios: Sequence[int]


def plan_graph(
    tap: BatchTap, widths: Mapping[str, int], attention: AttentionShape | None = None
) -> GraphPlan | None:
    """The graph plan of a tap, or None if a shape is dynamic, as of captured ragged sites. `widths`: row width by
    hook; without `attention` no change of it can be planned."""
    edits = tap.edits
    sites: dict[Key, SiteEdits] = {} if edits is None else dict(edits.sites)
    if any(BY_NAME[site.key[0]].ragged for site in tap.layout.sites):
        return None
    rules: dict[int, KeyRules] = {}
    for key in [key for key in sites if BY_NAME[key[0]].ragged]:
        layer, changes = key[1], sites.pop(key).changes
        count = 1 + max(row for _, changed in changes for row in changed)
        made = attention and key_rules(changes, count, attention.heads, attention.ratios[layer])
        if made is None:
            return None
        rules[layer] = made
    row_edits: dict[Key, RowEditsByKind] = {}
    uses: dict[tuple[Key, SpliceGroup], Uses] = {}
    gates = StepGates()
    adds = sorted((key, path) for key, site in sites.items() for path in site.table_paths)
    for key, site in sites.items():
        row_edits[key] = group_row_edits(
            [(edit, rows) for edit, rows in site.row_edits if isinstance(edit, SiteEdit)],
            widths[key[0]],
            gates,
        )
        spliced: dict[tuple[Op, Path, Any], Uses] = {}
        for edit, rows in site.row_edits:
            if not isinstance(edit, SiteEdit):
                spliced.setdefault((edit.op, edit.path, edit.host), []).append((edit, rows))
        for (op, path, host), host_uses in spliced.items():
            for gate, some in _by_gate(host_uses, gates).items():
                kind = host.graph_kind(some)
                if kind is None:
                    return None
                uses[key, SpliceGroup(op, path, host, kind, gate)] = some
    token_rows = None if edits is None else edits.token_rows
    pattern = Pattern(
        tuple(sorted((site.key, site.after) for site in tap.layout.sites)),
        tuple(adds),
        0 if token_rows is None else len(token_rows),
        tuple((key, kind) for key, by_kind in sorted(row_edits.items()) for kind in by_kind),
        tuple(uses),
        () if edits is None else _table_addresses(edits, adds),
        tuple(sorted((*number, widths[number[0]]) for number in gates.by_number)),
        tuple((layer, made.sink.shape[1]) for layer, made in sorted(rules.items())),
    )
    return GraphPlan(pattern, row_edits, uses, gates, rules)


def _by_gate(uses: Uses, gates: StepGates) -> dict[tuple[str, int, int] | tuple[()], Uses]:
    """The uses of one host without a gate, and for every number of a gate these and its own."""
    plain = [(use, rows) for use, rows in uses if use.gate is None]
    found: dict[tuple[str, int, int] | tuple[()], Uses] = {(): plain} if plain else {}
    for use, rows in uses:
        for row in rows if use.gate is not None else ():
            found.setdefault(gates.number(use.gate, row), list(plain)).append((use, [row]))
    return found


def _table_addresses(edits: StepEdits, adds: Sequence[tuple[Key, Path]]) -> tuple[int, ...]:
    if edits.tables is None:
        return ()
    return tuple(part.data_ptr() for key, path in adds for part in edits.tables.site((*key, path)))


class Scratch:
    """Memory shared by the steps of all patterns: its contents are written and read within one step."""

    def __init__(self, device: torch.device, limit: int = MAX_SCRATCH):
        self.limit = limit
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, num_bytes: int) -> torch.Tensor | None:
        """Return `num_bytes` bytes, or None if that is above the limit. Memory returned before stays valid, because
        graphs were recorded with it."""
        if not 0 < num_bytes <= self.limit:
            return None
        if len(self._memory) < num_bytes:
            self._memory = self._memory.new_empty(1 << (num_bytes - 1).bit_length())
        return self._memory[:num_bytes]


class _SiteCapture:
    """Copies one site into its column. In a pattern's first step there is no column yet: sizes are learned there."""

    def __init__(self) -> None:
        self.first: torch.Tensor | None = None
        self.column: torch.Tensor | None = None

    def __call__(self, parts: Sequence[torch.Tensor]) -> None:
        rows = stack_parts(*parts)
        if self.column is None:
            self.first = rows.clone()
        else:
            self.column[: len(rows)].copy_(rows)

    def set_column(self, column: torch.Tensor) -> None:
        """Use this column from now on, starting with the rows of the first step."""
        assert self.first is not None
        self.column = column
        self.column.copy_(self.first)
        self.first = None

    @property
    def kind(self) -> RowKind:
        assert self.first is not None, "every captured site is reached in the first step"
        return tuple(self.first.shape[1:]), self.first.dtype


class _OutputBuffer:
    """Outputs of one hook that are captured and not edited, at some layers: in parts [n, p, d] or whole [n, d]."""

    def __init__(self, layers: Sequence[int]):
        self.layers = list(layers)
        self.like: torch.Tensor | None = None
        self._buffer: torch.Tensor | None = None  # [layers, n, (p,) d]

    @property
    def size(self) -> int:
        """Bytes of one layer's output, rounded up to the alignment."""
        return 0 if self.like is None else -(-self.like.nbytes // ALIGNMENT) * ALIGNMENT

    def allocate(self, memory: torch.Tensor) -> None:
        assert self.like is not None
        flat = memory.view(self.like.dtype).view(len(self.layers), -1)[:, : self.like.numel()]
        self._buffer = torch.unflatten(flat, 1, self.like.shape)

    def at(self, layer: int, like: torch.Tensor) -> torch.Tensor | None:
        self.like = like
        return None if self._buffer is None else self._buffer[self.layers.index(layer)]

    def copy_to(self, buffer: CaptureBuffer, hook: str, sites: Collection[SiteTensor]) -> None:
        """Copy the outputs into their columns: one copy for each run of consecutive layers, usually one in all."""
        if self._buffer is None:
            return
        outputs = self._buffer if self._buffer.dim() == 3 else self._buffer.sum(2)
        for after in (False, True):
            captured = [index for index, layer in enumerate(self.layers) if ((hook, layer), after) in sites]
            for first, stop in _runs(captured):
                columns = [((hook, layer), after) for layer in self.layers[first:stop]]
                buffer.sites(columns).copy_(outputs[first:stop].transpose(0, 1))


def _runs(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of consecutive numbers, as (first, stop)."""
    first = 0
    for index in range(1, len(indices) + 1):
        if index == len(indices) or indices[index] != indices[index - 1] + 1:
            yield indices[first], indices[index - 1] + 1
            first = index


class GraphTap:
    """The operations and buffers of a pattern, for steps of `rows` tokens."""

    def __init__(
        self,
        plan: GraphPlan,
        edits: StepEdits | None,
        rows: int,
        device: torch.device,
        scratch: Scratch | None = None,
    ):
        pattern = plan.pattern
        self.pattern = pattern
        self._rows = rows
        self._device = device
        self.buffer: CaptureBuffer | None = None  # from the end of the first step on
        self._scratch = scratch or Scratch(device)
        self._captures = {site: _SiteCapture() for site in pattern.captures}
        self._token_rows = torch.zeros(pattern.token_lanes, rows, dtype=torch.long, device=device)
        self._gates = {
            (hook, layer, number): GateBuffers(width, rows, device)
            for hook, layer, number, width in pattern.gates
        }
        self._row_edits = {
            (key, kind): RowEditBuffers(
                kind, rows, device, self._gates[kind.gate].fired if kind.gate else None
            )
            for key, kind in pattern.row_edits
        }
        self._splices: dict[tuple[Key, SpliceGroup], GraphSplice] = {
            (key, group): group.host.graph_splice(group.kind) for key, group in pattern.splices
        }
        self._tables = None if edits is None else edits.tables
        self._filled: StepEdits | None = None
        self._layers: dict[int, _GraphLayerTap] = {}
        self._post_mix = PostMix()
        captured = {key for key, _ in pattern.captures}
        edited = {key for key, _ in (*pattern.adds, *pattern.row_edits, *pattern.splices)}
        edited |= {(hook, layer) for hook, layer, _ in self._gates}  # their tensors are read
        only_captured = sorted(captured - edited)
        self._outputs = {
            hook: _OutputBuffer([layer for name, layer in only_captured if name == hook])
            for hook, _ in only_captured
        }
        for key in sorted(captured | edited):
            hook, layer = key
            if layer not in self._layers:
                self._layers[layer] = _GraphLayerTap(self._post_mix, layer)
            site = BY_NAME[hook].id
            self._layers[layer].sites[site] = self._runner(key)
            if key not in edited:
                self._layers[layer].outputs[site] = self._outputs[hook]
        for layer, heads in pattern.rules:
            if layer not in self._layers:
                self._layers[layer] = _GraphLayerTap(self._post_mix, layer)
            self._layers[layer].key_rules = KeyRules.empty(rows, heads, device)

    def _runner(self, key: Key) -> SiteRunner:
        paths = {path for at, path in self.pattern.adds if at == key}
        paths |= {kind.path for at, kind in self.pattern.row_edits if at == key}
        paths |= {group.path for at, group in self.pattern.splices if at == key}
        excluded: tuple[ExcludedPath, ...] = ("none", "carry", "read")
        stages = {path: self._stages(key, path) for path in excluded}
        runner = SiteRunner(
            self._captures.get((key, False)), self._captures.get((key, True)), stages.__getitem__, paths
        )
        runner.probes += [buffers for (*site, _), buffers in self._gates.items() if tuple(site) == key]
        return runner

    def _stages(self, key: Key, excluded: ExcludedPath) -> list[EditStage]:
        """In the order of `edit.edit_stages`."""
        stages: list[EditStage] = []
        pattern = self.pattern
        for op in ORDER:
            paths = [path for at, path in pattern.adds if at == key and path != excluded and op == "add"]
            if paths:
                assert self._tables is not None
                sites = [self._tables.site((*key, path)) for path in paths]
                stages.append(partial(self._add_rows, sites))
            groups = [group for at, group in pattern.splices if at == key and group.op == op]
            hosts: dict[tuple[Path, Any], list[SpliceGroup]] = {}
            for group in sorted(groups, key=lambda group: group.host.order):
                if group.path != excluded:
                    hosts.setdefault((group.path, group.host), []).append(group)
            stages += [self._splice_stage(key, of_host) for of_host in hosts.values()]
            kinds = [kind for at, kind in pattern.row_edits if at == key and kind.op == op]
            buffers = [self._row_edits[key, kind] for kind in kinds if kind.path != excluded]
            plain = [buffer for buffer in buffers if buffer.kind.is_plain]
            if plain:
                stages.append(PlainAdds(plain))
            stages += [buffer.run for buffer in buffers if not buffer.kind.is_plain]
        return stages

    def _splice_stage(self, key: Key, groups: Sequence[SpliceGroup]) -> EditStage:
        """The uses of one host, in the order of `edit._SpliceStage`."""
        plain = next((self._splices[key, group] for group in groups if not group.gate), None)
        gated = [(self._splices[key, group], self._gates[group.gate].fired) for group in groups if group.gate]

        def run(x: torch.Tensor, context: SiteContext) -> torch.Tensor:
            out = x if plain is None else plain.run(x, context)
            for splice, fired in gated:
                open_rows = fired[: len(x)].view(-1, *[1] * (x.dim() - 1))
                out = torch.where(open_rows, splice.run(x, context), out)
            return out

        return run

    def _add_rows(
        self, sites: Sequence[tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor, context: SiteContext
    ) -> torch.Tensor:
        return gather_add(x, self._token_rows[:, : len(x)], sites)

    def fill(self, tap: BatchTap | None, plan: GraphPlan) -> None:
        """Write the edits of the next step into the buffers; does nothing if they are those of the last step. A step
        may have fewer token lanes than the pattern, or no edits at all: the other lanes then change nothing."""
        edits = None if tap is None else tap.edits
        if edits is self._filled:
            return
        self._filled = edits
        self._token_rows.zero_()
        if edits is None:
            return
        if edits.token_rows is not None:
            lanes, count = edits.token_rows.shape
            if edits.only is None:
                self._token_rows[:lanes, :count].copy_(edits.token_rows)
            else:
                self._token_rows[:lanes].index_copy_(1, edits.only, edits.token_rows)
        for key, by_kind in plan.row_edits.items():
            for kind, row_edits in by_kind.items():
                self._row_edits[key, kind].fill(row_edits)
        for (key, group), uses in plan.uses.items():
            self._splices[key, group].fill(uses)
        for number, rows_of_gates in plan.gates.by_number.items():
            self._gates[number].fill(rows_of_gates)
        for layer, made in plan.rules.items():
            rules = self._layers[layer].key_rules
            assert rules is not None
            rules.copy_(made)

    def end(self) -> None:
        """Called after the last site of a step: completes the capture buffer."""
        if self.buffer is None and self._captures:
            self._allocate()
        elif self.buffer is not None:
            for hook, outputs in self._outputs.items():
                outputs.copy_to(self.buffer, hook, self._captures)

    def _allocate(self) -> None:
        """Allocate the capture buffer; the first step has shown the shapes of sites. Columns of one hook are adjacent,
        and those that `end` copies together are consecutive."""

        def order(site: SiteTensor) -> tuple[str, bool, bool, int]:
            (hook, layer), after = site
            outputs = self._outputs.get(hook)
            return hook, after, outputs is None or layer not in outputs.layers, layer

        kinds = {site: self._captures[site].kind for site in sorted(self._captures, key=order)}
        self.buffer = CaptureBuffer(self._rows, kinds, self._device)
        for site, capture in self._captures.items():
            capture.set_column(self.buffer.site(site))
        sizes = [len(outputs.layers) * outputs.size for outputs in self._outputs.values()]
        memory = self._scratch.take(sum(sizes))
        if memory is not None:  # otherwise every output is copied at its site
            for outputs, part in zip(self._outputs.values(), torch.split(memory, sizes)):
                if len(part):
                    outputs.allocate(part)

    def at(self, layer: int) -> _GraphLayerTap:
        return self._layers.get(layer) or _GraphLayerTap(self._post_mix, layer)


class _GraphLayerTap(LayerTap):
    """The tap of one layer of a recorded step."""

    def __init__(self, post_mix: PostMix, layer: int):
        super().__init__(post_mix)
        self._layer = layer
        self.outputs: dict[int, _OutputBuffer] = {}  # by site id, where nothing is edited
        self.key_rules: KeyRules | None = None

    def rules(self, rows: int, heads: int, ratio: int) -> KeyRules | None:
        return self.key_rules

    def live(self, site: Site) -> bool:
        """Whether anything happens at a site: there, fused kernels have to be split."""
        return site.id in self.sites

    def keep(self, site: Site, like: torch.Tensor) -> torch.Tensor | None:
        """The buffer for an output shaped like this one; an output written there is captured without calling the tap.
        None if there is none."""
        outputs = self.outputs.get(site.id)
        return None if outputs is None else outputs.at(self._layer, like)

    def at(self, layer: int) -> _GraphLayerTap:
        return self
