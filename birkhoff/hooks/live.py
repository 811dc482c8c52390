"""The tap of a running engine: rows of many requests leave one step, each to whoever asked for it.

Before a step, `arm` turns the plans of its spans into row indices per site; when nobody wants anything of this step it
answers None and the step runs with `NoTap`, so idle costs nothing. During the step a wanted site is one indexed copy
into its staging buffer. Index buffers and staging are kept between steps and come in a few fixed sizes; an index is
padded with the number of a row that nobody reads from the copy, so what requests want is data and never changes a
shape. After the step, `deliver` cuts the staged rows into what each job asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from birkhoff.hooks.changes import ChangeDesk, Changes, bucket
from birkhoff.hooks.edit import Around
from birkhoff.hooks.plan import Job, Key, Plan, Rows, Span
from birkhoff.hooks.sites import BY_NAME, MHC_ATTN_POST_MIX, MHC_FFN_POST_MIX, Site
from birkhoff.hooks.tap import NoTap, Reads, Tap, together

Witness = Callable[[Plan, Job, Rows], None]  # sees rows on their way to a job
Landing = Callable[[], Mapping[tuple[Key, bool], torch.Tensor]]  # rows on the host by site, when they have arrived
SENTINEL = 0  # padding reads this row; its copies are never delivered


@dataclass
class _Share:
    """Rows `first..first+count` of a staged site belong to this job."""

    plan: Plan
    job: Job
    first: int
    positions: tuple[int, ...]
    token_ids: tuple[int, ...]
    prompt_rows: int


@dataclass
class _Wanted:
    """What one step wants of one site."""

    key: Key
    after: bool
    rows: list[int] = field(default_factory=list)
    shares: list[_Share] = field(default_factory=list)
    index: torch.Tensor | None = None
    staged: torch.Tensor | None = None
    copied: torch.Tensor | None = None
    landing: Landing | None = None  # the step ran elsewhere: where its rows come out

    @property
    def has_rows(self) -> bool:
        return self.staged is not None or self.landing is not None

    def on_host(self) -> torch.Tensor:
        """The staged rows, copied out of their buffer once for everybody who asked for some."""
        if self.copied is None:
            if self.landing is not None:
                self.copied = self.landing()[self.key, self.after]
            else:
                assert self.staged is not None
                self.copied = self.staged[: len(self.rows)].to("cpu", copy=True)
        return self.copied


class Staging:
    """Index and staging buffers that outlive a step; two of each site, so that one can be read while one is filled."""

    def __init__(self, device: torch.device | str = "cpu", depth: int = 2):
        self.device, self.depth, self._turn = torch.device(device), depth, 0
        self.changes = ChangeDesk(self.device)
        self.armed: LiveTap | None = None  # the last tap that only changed things, for as long as it does
        self._index: dict[tuple[Key, bool, int], torch.Tensor] = {}
        self._rows: dict[tuple[Key, bool, int, int], torch.Tensor] = {}

    def next_turn(self) -> None:
        self._turn = (self._turn + 1) % self.depth

    def index(self, wanted: _Wanted) -> torch.Tensor:
        size = bucket(len(wanted.rows))
        name = (wanted.key, wanted.after, size)
        if name not in self._index:
            self._index[name] = torch.full((size,), SENTINEL, dtype=torch.long, device=self.device)
        held = self._index[name]
        padded = wanted.rows + [SENTINEL] * (size - len(wanted.rows))
        held.copy_(torch.tensor(padded))
        return held

    def copy(self, wanted: _Wanted, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The indexed rows of a site, in its buffer of this turn."""
        if wanted.index is None:
            wanted.index = self.index(wanted)
        picked = together(*(part.index_select(0, wanted.index) for part in parts)) if len(parts) > 1 else None
        shape = picked.shape if picked is not None else (len(wanted.index), *parts[0].shape[1:])
        name = (wanted.key, wanted.after, len(wanted.index), self._turn)
        held = self._rows.get(name)
        if held is None or held.shape != shape or (picked is None and held.dtype != parts[0].dtype):
            dtype = parts[0].dtype if picked is None else picked.dtype
            held = self._rows[name] = torch.empty(shape, dtype=dtype, device=parts[0].device)
        if picked is not None:
            return held.copy_(picked)
        return torch.index_select(parts[0], 0, wanted.index, out=held)


class LiveTap:
    """The sites of one step that somebody wants or changes, by layer."""

    def __init__(self, staging: Staging, wanted: dict[tuple[Key, bool], _Wanted], changes: Changes | None):
        self._staging, self.wanted, self.changes = staging, list(wanted.values()), changes
        self._layers: dict[int, _LayerTap] = {}
        written = _Written()
        for want in self.wanted:
            hook, layer = want.key
            self._layers.setdefault(layer, _LayerTap(staging, written)).add(BY_NAME[hook], want)
        for hook, layer in changes.sites if changes is not None else ():
            self._layers.setdefault(layer, _LayerTap(staging, written)).change(BY_NAME[hook], layer, changes)
        self._unwatched: Tap = NoTap()
        if changes is not None and changes.needs_post():
            self._unwatched = _LayerTap(staging, written)  # every sublayer's write-out weights are remembered
            written.wanted = True

    def at(self, layer: int) -> Tap:
        return self._layers.get(layer, self._unwatched)

    def __call__(self, site: Site, x: torch.Tensor) -> torch.Tensor:
        return x

    def part(self, site: Site, x: torch.Tensor, reads: Reads | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x

    def see(self, site: Site, *parts: torch.Tensor) -> None:
        pass

    def hand_over(self, landing: Landing) -> None:
        """The step ran elsewhere: every wanted site's rows come from there."""
        for want in self.wanted:
            want.landing = landing

    def deliver(self, waiting: Collection[Plan] = (), witness: Witness | None = None) -> None:
        """Hand every job its rows, copied out of the buffers, except jobs of plans that have to wait."""
        for want in self.wanted:
            for share in want.shares:
                if share.plan not in waiting:
                    _hand_out(want, share, len(share.positions), witness)

    def deliver_kept(self, plan: Plan, stop: int, witness: Witness | None = None) -> None:
        """Hand one plan its rows before position `stop`: those behind it were guesses that did not stay."""
        for want in self.wanted:
            for share in want.shares:
                if share.plan is plan:
                    _hand_out(want, share, sum(position < stop for position in share.positions), witness)


def _hand_out(want: _Wanted, share: _Share, count: int, witness: Witness | None) -> None:
    if not want.has_rows or not count:
        return
    tensor = want.on_host()[share.first : share.first + count]
    positions, token_ids = share.positions[:count], share.token_ids[:count]
    rows = Rows(*want.key, tensor, positions, token_ids, min(share.prompt_rows, count))
    if witness is not None:
        witness(share.plan, share.job, rows)
    share.job.deliver(rows)


class _Written:
    """The write-out weights of the sublayer that wrote the streams last."""

    wanted = False
    post: torch.Tensor | None = None


class _LayerTap:
    """One layer's share. At a site: capture, then the edits in their order, then captures of the edited tensor."""

    def __init__(self, staging: Staging, written: _Written):
        self._staging, self._written = staging, written
        self._before: dict[int, _Wanted] = {}
        self._after: dict[int, _Wanted] = {}
        self._changes: dict[int, tuple[Key, Changes]] = {}

    def change(self, site: Site, layer: int, changes: Changes | None) -> None:
        assert changes is not None
        self._changes[site.id] = (site.name, layer), changes

    def add(self, site: Site, want: _Wanted) -> None:
        (self._after if want.after else self._before)[site.id] = want

    def at(self, layer: int) -> _LayerTap:
        return self

    def see(self, site: Site, *parts: torch.Tensor) -> None:
        if self._written.wanted and site.id in (MHC_ATTN_POST_MIX.id, MHC_FFN_POST_MIX.id):
            self._written.post = parts[0]
        self._stage(self._before, site, *parts)
        self._stage(self._after, site, *parts)

    def __call__(self, site: Site, x: torch.Tensor) -> torch.Tensor:
        self._stage(self._before, site, x)
        if site.id in self._changes:
            key, changes = self._changes[site.id]
            x = changes.whole(key, x, Around(self._written.post))
        self._stage(self._after, site, x)
        return x

    def part(self, site: Site, x: torch.Tensor, reads: Reads | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        self._stage(self._before, site, x)
        if site.id not in self._changes:
            self._stage(self._after, site, x)
            return x, x
        key, changes = self._changes[site.id]
        read, carried = changes.parted(key, x, Around(self._written.post, reads))
        self._stage(self._after, site, carried if changes.sites[key].carries else read)
        return read, carried

    def _stage(self, sites: dict[int, _Wanted], site: Site, *parts: torch.Tensor) -> None:
        want = sites.get(site.id)
        if want is not None:
            want.staged = self._staging.copy(want, parts)


def arm(staging: Staging, spans: Sequence[Span], num_rows: int | None = None) -> LiveTap | None:
    """The tap of a step of `num_rows` tokens with these spans, or None when nothing of it is wanted or changed."""
    wanted: dict[tuple[Key, bool], _Wanted] = {}
    changes = staging.changes.of(spans, num_rows)
    for span in spans:
        if span.plan.jobs:
            _collect(span, wanted)
    if not wanted and changes is None:
        return None
    if not wanted and staging.armed is not None and staging.armed.changes is changes:
        return staging.armed
    staging.next_turn()
    tap = LiveTap(staging, wanted, changes)
    staging.armed = None if wanted else tap
    return tap


def _collect(span: Span, wanted: dict[tuple[Key, bool], _Wanted]) -> None:
    skip = max(span.plan.seen - span.start, 0)  # computed again after a preemption: delivered before
    span.plan.seen = max(span.plan.seen, span.start + len(span.token_ids))
    tokens = span.token_ids[skip:]
    if not len(tokens):
        return
    for job in span.plan.jobs:
        offsets = job.offsets(span.start + skip, tokens, span.prompt_len)
        if not len(offsets):
            continue
        positions = tuple(int(span.start + skip + offset) for offset in offsets)
        ids = tuple(int(tokens[offset]) for offset in offsets)
        prompt_rows = sum(position < span.prompt_len for position in positions)
        rows = [span.first_row + skip + int(offset) for offset in offsets]
        for key in job.keys:
            want = wanted.setdefault((key, job.after), _Wanted(key, job.after))
            want.shares.append(_Share(span.plan, job, len(want.rows), positions, ids, prompt_rows))
            want.rows += rows
