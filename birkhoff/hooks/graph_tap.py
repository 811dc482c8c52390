"""The taps of a decoding step as fixed operations on buffers that stay: what a recorded graph can hold.

A `Pattern` says what is done where: which sites are captured, added to, changed row by row or spliced, and in how many
lanes; it is all that a recorded step depends on. Which rows, vectors, features and bounds there are is data, written by
`fill` between replays, so edits come, go and change without recording anything again. When nobody wants anything there
is no pattern, and a step without any of this is replayed.

A captured site is copied whole into its column of a `CaptureBuffer`. An output that is only looked at is not even copied at its
site: the sublayer writes it to a place of its own (`keep`), and `end` takes all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from birkhoff.hooks.batch_tap import BatchTap
from birkhoff.hooks.capture_buffer import CaptureBuffer, Kind
from birkhoff.hooks.edit import ORDER, Op, Path, SiteContext, SiteEdit
from birkhoff.hooks.plan import Key
from birkhoff.hooks.row_edits import RowEdit, RowEditBuffers, RowEditsByKind, lay
from birkhoff.hooks.sites import BY_NAME, MHC_ATTN_POST_MIX, MHC_FFN_POST_MIX, Site
from birkhoff.hooks.step_edits import SiteEdits, StepEdits
from birkhoff.hooks.tap import Reads, together
from birkhoff.hooks.vector_table import gather_add

MOST_SHARED = 1 << 27  # bytes of scratch memory
APART = 512  # bytes: what is kept begins at a multiple, as memory of its own would

EditStage = Callable[[torch.Tensor, SiteContext], torch.Tensor]


class GraphSplice(Protocol):
    """Something spliced into a site, in fixed shapes."""

    def fill(self, uses: Sequence[tuple[Any, list[int]]]) -> None: ...

    def run(self, x: torch.Tensor, around: SiteContext) -> torch.Tensor: ...


class SpliceGroup(NamedTuple):
    """Uses of one host at one site. `kind` is whatever fixes the shapes of its operations."""

    op: Op
    path: Path
    host: Any
    kind: Hashable


class Pattern(NamedTuple):
    captures: tuple[tuple[Key, bool], ...]  # before or after the edits
    adds: tuple[tuple[Key, Path], ...]
    token_lanes: int
    lanes: tuple[tuple[Key, RowEdit], ...]
    splices: tuple[tuple[Key, SpliceGroup], ...]
    places: tuple[int, ...]  # where the tables' slabs and maps lie: they move when they grow


class GraphPlan(NamedTuple):
    """What an armed tap wants, sorted out."""

    pattern: Pattern
    lanes: dict[Key, RowEditsByKind]
    uses: dict[tuple[Key, SpliceGroup], list[tuple[Any, list[int]]]]


def sort_out(tap: BatchTap, widths: Mapping[str, int]) -> GraphPlan | None:
    """A tap's wishes, or None when one of them has no fixed shape. `widths` tells a site's numbers a row by hook."""
    changes = tap.changes
    sites: dict[Key, SiteEdits] = {} if changes is None else changes.sites
    lanes: dict[Key, RowEditsByKind] = {}
    uses: dict[tuple[Key, SpliceGroup], list[tuple[Any, list[int]]]] = {}
    adds = sorted((key, path) for key, change in sites.items() for path in change.paths)
    for key, change in sites.items():
        lanes[key] = lay(
            [(edit, rows) for edit, rows in change.others if isinstance(edit, SiteEdit)], widths[key[0]]
        )
        joint: dict[tuple[Op, Path, Any], list[tuple[Any, list[int]]]] = {}
        for edit, rows in change.others:
            if not isinstance(edit, SiteEdit):
                joint.setdefault((edit.op, edit.path, edit.host), []).append((edit, rows))
        for (op, path, host), users in joint.items():
            kind = host.graph_kind(users) if hasattr(host, "still_kind") else None
            if kind is None:
                return None
            uses[key, SpliceGroup(op, path, host, kind)] = users
    token_rows = None if changes is None else changes.token_rows
    pattern = Pattern(
        tuple(sorted((want.key, want.after) for want in tap.wanted)),
        tuple(adds),
        0 if token_rows is None else len(token_rows),
        tuple((key, lane) for key, laid in sorted(lanes.items()) for lane in laid),
        tuple(uses),
        () if changes is None else _places(changes, adds),
    )
    return GraphPlan(pattern, lanes, uses)


def _places(changes: StepEdits, adds: Sequence[tuple[Key, Path]]) -> tuple[int, ...]:
    if changes.tables is None:
        return ()
    return tuple(part.data_ptr() for key, path in adds for part in changes.tables.site((*key, path)))


class Scratch:
    """Memory that the steps of all patterns share: what is in it is written and read within one step."""

    def __init__(self, device: torch.device, most: int = MOST_SHARED):
        self.most = most
        self._held = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, num_bytes: int) -> torch.Tensor | None:
        """So many bytes, or None where that is too much. Others that were given out stay where they are: graphs were
        recorded with them."""
        if not 0 < num_bytes <= self.most:
            return None
        if len(self._held) < num_bytes:
            self._held = self._held.new_empty(1 << (num_bytes - 1).bit_length())
        return self._held[:num_bytes]


class _SiteCapture:
    """One site on its way into the tray. In a pattern's first step there is none yet, since sizes are learnt there."""

    def __init__(self) -> None:
        self.first: torch.Tensor | None = None
        self.column: torch.Tensor | None = None

    def take(self, parts: Sequence[torch.Tensor]) -> None:
        whole = together(*parts)
        if self.column is None:
            self.first = whole.clone()
        else:
            self.column.copy_(whole)

    @property
    def kind(self) -> Kind:
        assert self.first is not None, "the site was met in the first step"
        return tuple(self.first.shape[1:]), self.first.dtype


class _OutputBuffer:
    """Outputs of one hook that are only looked at, of some layers: in parts [n, p, d] or whole [n, d]."""

    def __init__(self, layers: Sequence[int]):
        self.layers = list(layers)
        self.like: torch.Tensor | None = None
        self._buffer: torch.Tensor | None = None  # [layers, n, (p,) d]

    @property
    def size(self) -> int:
        """Bytes of one layer's, and those left free behind."""
        return 0 if self.like is None else -(-self.like.nbytes // APART) * APART

    def place(self, memory: torch.Tensor) -> None:
        assert self.like is not None
        flat = memory.view(self.like.dtype).view(len(self.layers), -1)[:, : self.like.numel()]
        self._buffer = flat.unflatten(1, self.like.shape)

    def at(self, layer: int, like: torch.Tensor) -> torch.Tensor | None:
        self.like = like
        return None if self._buffer is None else self._buffer[self.layers.index(layer)]

    def put(self, hook: str, sites: Collection[tuple[Key, bool]], tray: CaptureBuffer) -> None:
        """Into their columns: as many copies as there are runs of layers, as a rule one."""
        if self._buffer is None:
            return
        whole = self._buffer if self._buffer.dim() == 3 else self._buffer.sum(2)
        for after in (False, True):
            mine = [place for place, layer in enumerate(self.layers) if ((hook, layer), after) in sites]
            for first, stop in _runs(mine):
                columns = [((hook, layer), after) for layer in self.layers[first:stop]]
                tray.sites(columns).copy_(whole[first:stop].transpose(0, 1))


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    first = 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            yield numbers[first], numbers[place - 1] + 1
            first = place


class GraphTap:
    """A pattern's operations and buffers, for steps of `rows` tokens."""

    def __init__(
        self,
        wishes: GraphPlan,
        changes: StepEdits | None,
        rows: int,
        device: torch.device,
        scratch: Scratch | None = None,
    ):
        pattern = wishes.pattern
        self.pattern = pattern
        self._rows = rows
        self._device = device
        self.tray: CaptureBuffer | None = None
        self._scratch = scratch or Scratch(device)
        self._captures = {wanted: _SiteCapture() for wanted in pattern.captures}
        self._token_rows = torch.zeros(pattern.token_lanes, rows, dtype=torch.long, device=device)
        self._lanes = {(key, lane): RowEditBuffers(lane, rows, device) for key, lane in pattern.lanes}
        self._splices: dict[tuple[Key, SpliceGroup], GraphSplice] = {
            (key, spliced): spliced.host.still(spliced.kind) for key, spliced in pattern.splices
        }
        self._tables = None if changes is None else changes.tables
        self._filled: StepEdits | None = None
        self._layers: dict[int, _GraphLayerTap] = {}
        self._written = _GraphPostMix()
        wanted = {key for key, _ in pattern.captures}
        changed = {key for key, _ in (*pattern.adds, *pattern.lanes, *pattern.splices)}
        looked_at = sorted(wanted - changed)
        self._kept = {
            hook: _OutputBuffer([layer for name, layer in looked_at if name == hook]) for hook, _ in looked_at
        }
        for key in sorted(wanted | changed):
            self._layer(key[1]).add(BY_NAME[key[0]], self._site(key))

    def _layer(self, layer: int) -> _GraphLayerTap:
        if layer not in self._layers:
            self._layers[layer] = _GraphLayerTap(self._written, layer)
        return self._layers[layer]

    def _site(self, key: Key) -> _GraphSite:
        paths = {path for at, path in self.pattern.adds if at == key}
        paths |= {lane.path for at, lane in self.pattern.lanes if at == key}
        paths |= {spliced.path for at, spliced in self.pattern.splices if at == key}
        return _GraphSite(
            self._captures.get((key, False)),
            self._captures.get((key, True)),
            {left_out: self._stages(key, left_out) for left_out in ("none", "carry", "read")},
            paths,
            self._kept.get(key[0]) if not paths else None,
        )

    def _stages(self, key: Key, left_out: str) -> list[EditStage]:
        """In the order of `edit.stages`."""
        found: list[EditStage] = []
        pattern = self.pattern
        for op in ORDER:
            paths = [path for at, path in pattern.adds if at == key and path != left_out and op == "add"]
            if paths:
                assert self._tables is not None
                sites = [self._tables.site((*key, path)) for path in paths]
                found.append(partial(self._add, sites))
            mine = [s for at, s in pattern.splices if at == key and s.op == op and s.path != left_out]
            for spliced in sorted(mine, key=lambda s: s.host.order):
                found.append(self._splices[key, spliced].run)
            for at, lane in pattern.lanes:
                if at == key and lane.op == op and lane.path != left_out:
                    found.append(self._lanes[key, lane].run)
        return found

    def _add(
        self, sites: Sequence[tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor, _: SiteContext
    ) -> torch.Tensor:
        return gather_add(x, self._token_rows[:, : len(x)], sites)

    def fill(self, tap: BatchTap, wishes: GraphPlan) -> None:
        """Write what the coming step changes; nothing when it is what the last one changed."""
        changes = tap.changes
        if changes is None or changes is self._filled:
            return
        self._filled = changes
        if changes.token_rows is not None:
            self._token_rows.zero_()
            count = changes.token_rows.shape[1]
            if changes.only is None:
                self._token_rows[:, :count].copy_(changes.token_rows)
            else:
                self._token_rows.index_copy_(1, changes.only, changes.token_rows)
        for key, laid in wishes.lanes.items():
            for lane, given in laid.items():
                self._lanes[key, lane].fill(given)
        for (key, spliced), users in wishes.uses.items():
            self._splices[key, spliced].fill(users)

    def end(self) -> None:
        """Behind the last site of a step: everything captured is in the tray."""
        if self.tray is None and self._captures:
            self._lay_out()
        elif self.tray is not None:
            for hook, kept in self._kept.items():
                kept.put(hook, self._captures, self.tray)

    def _lay_out(self) -> None:
        """The first step has shown what sites hold. Columns of one hook lie together, those put at once in a row."""

        def order(site: tuple[Key, bool]) -> tuple:
            (hook, layer), after = site
            kept = self._kept.get(hook)
            return hook, after, kept is None or layer not in kept.layers, layer

        self.tray = CaptureBuffer(
            self._rows,
            {site: self._captures[site].kind for site in sorted(self._captures, key=order)},
            self._device,
        )
        for site, capture in self._captures.items():
            capture.column = self.tray.site(site)
            capture.take([capture.first])  # type: ignore[list-item]
            capture.first = None
        sizes = {hook: len(kept.layers) * kept.size for hook, kept in self._kept.items()}
        memory = self._scratch.take(sum(sizes.values()))
        if memory is not None:  # else every output is copied at its site
            for kept, part in zip(self._kept.values(), memory.split([*sizes.values()])):
                if len(part):
                    kept.place(part)

    def at(self, layer: int) -> _GraphLayerTap:
        return self._layers.get(layer) or _GraphLayerTap(self._written, layer)


class _GraphPostMix:
    """Write-out weights of the sublayer that wrote the streams last."""

    def __init__(self) -> None:
        self.post: torch.Tensor | None = None


class _GraphSite(NamedTuple):
    before: _SiteCapture | None
    after: _SiteCapture | None
    stages: Mapping[str, list[EditStage]]  # by the path that is left out
    paths: set[Path]
    kept: _OutputBuffer | None  # where nothing is changed

    def run(self, left_out: str, x: torch.Tensor, around: SiteContext) -> torch.Tensor:
        for stage in self.stages[left_out]:
            x = stage(x, around)
        return x


class _GraphLayerTap:
    """The tap of one layer."""

    def __init__(self, written: _GraphPostMix, layer: int):
        self._written = written
        self._number = layer
        self._sites: dict[int, _GraphSite] = {}

    def add(self, site: Site, what: _GraphSite) -> None:
        self._sites[site.id] = what

    def live(self, site: Site) -> bool:
        """Whether anything happens at a site: where fused launches have to be taken apart."""
        return site.id in self._sites

    def keep(self, site: Site, like: torch.Tensor) -> torch.Tensor | None:
        """A place for an output like this one, which is then captured without another word; None: there is none."""
        found = self._sites.get(site.id)
        return None if found is None or found.kept is None else found.kept.at(self._number, like)

    def at(self, layer: int) -> _GraphLayerTap:
        return self

    def see(self, site: Site, *parts: torch.Tensor) -> None:
        if site.id in (MHC_ATTN_POST_MIX.id, MHC_FFN_POST_MIX.id):
            self._written.post = parts[0]
        found = self._sites.get(site.id)
        if found is not None:
            for capture in (found.before, found.after):
                if capture is not None:
                    capture.take(parts)

    def __call__(self, site: Site, x: torch.Tensor) -> torch.Tensor:
        found = self._sites.get(site.id)
        if found is None:
            return x
        if found.before is not None:
            found.before.take([x])
        x = found.run("none", x, SiteContext(self._written.post))
        if found.after is not None:
            found.after.take([x])
        return x

    def part(
        self, site: Site, x: torch.Tensor, reads: Reads | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._sites.get(site.id)
        if found is None:
            return x, x
        if found.before is not None:
            found.before.take([x])
        around = SiteContext(self._written.post, reads)
        if found.paths <= {"both"}:
            read = carried = found.run("none", x, around)
        else:
            read = found.run("carry", x, around)
            carried = found.run("read", x, around)
        if found.after is not None:
            found.after.take([carried if found.paths - {"read"} else read])
        return read, carried
