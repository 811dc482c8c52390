"""The tap of a running engine: rows of many requests leave one step, each to whoever asked for it.

Before a step, `arm` turns the plans of its spans into row indices per site; when nobody wants anything of this step it
answers None and the step runs with `NoTap`, so idle costs nothing. During the step a wanted site is one indexed copy
into its staging buffer. Index buffers and staging are kept between steps and come in a few fixed sizes; an index is
padded with the number of a row that nobody reads from the copy, so what requests want is data and never changes a
shape. After the step, `deliver` cuts the staged rows into what each job asked for.

Which rows of which sites go to whom is a `CaptureLayout`. While requests only decode it is the same step after step; then the
last one is used again, and all that is new are positions and tokens (`RowRequest`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple
from weakref import ref

import torch

from birkhoff.hooks.edit import SiteContext
from birkhoff.hooks.plan import Job, Key, Plan, SiteRows, Span
from birkhoff.hooks.sites import BY_NAME, MHC_ATTN_POST_MIX, MHC_FFN_POST_MIX, Site
from birkhoff.hooks.step_edits import StepEditBuilder, StepEdits, bucket
from birkhoff.hooks.tap import NoTap, Reads, Tap, together

RowObserver = Callable[[Plan, Job, SiteRows], None]  # sees rows on their way to a job
Landing = Callable[
    [int], Iterable[tuple[Key, torch.Tensor]]
]  # a take's rows on the host, by its number, when there
SENTINEL = 0  # padding reads this row; its copies are never delivered


class RowRequest(NamedTuple):
    """What one job wants of one step: rows of the step, in order of position."""

    plan: Plan
    job: Job
    rows: list[int]
    positions: tuple[int, ...]
    token_ids: tuple[int, ...]
    prompt_rows: int


class CaptureSite:
    """One site that somebody wants, and the rows wanted there."""

    def __init__(self, key: Key, after: bool):
        self.key = key
        self.after = after
        self.rows: list[int] = []
        self.index: torch.Tensor | None = None


class CaptureLayout:
    """Where the rows of takes lie. It keeps no job alive: what a job holds may be large, and it may have ended."""

    def __init__(self, takes: Sequence[RowRequest]):
        self._jobs = [ref(take.job) for take in takes]
        self.rows = [take.rows for take in takes]
        self.shares: list[
            list[tuple[CaptureSite, int]]
        ] = []  # of each take: its sites, and its first row there
        sites: dict[tuple[Key, bool], CaptureSite] = {}
        for take in takes:
            share, after = [], take.job.after
            for key in take.job.keys:
                want = sites.get((key, after))
                if want is None:
                    want = sites[key, after] = CaptureSite(key, after)
                share.append((want, len(want.rows)))
                want.rows += take.rows
            self.shares.append(share)
        self.wanted = list(sites.values())

    def fits(self, takes: Sequence[RowRequest]) -> bool:
        """Whether these are the jobs it was made for, wanting the same rows."""
        return len(takes) == len(self._jobs) and all(
            job() is take.job and rows == take.rows for job, rows, take in zip(self._jobs, self.rows, takes)
        )


class StepStaging:
    """Index and staging buffers that outlive a step; two of each site, so that one can be read while one is filled."""

    def __init__(self, device: torch.device | str = "cpu", depth: int = 2):
        self.device = torch.device(device)
        self.depth = depth
        self._turn = 0
        self.changes = StepEditBuilder(self.device)
        self.armed: BatchTap | None = None  # the last tap that only changed things, for as long as it does
        self._layout = CaptureLayout(())
        self._index: dict[tuple[Key, bool, int], torch.Tensor] = {}
        self._rows: dict[tuple[Key, bool, int, int], torch.Tensor] = {}

    def layout(self, takes: Sequence[RowRequest]) -> CaptureLayout:
        if not self._layout.fits(takes):
            self._layout = CaptureLayout(takes)
        return self._layout

    def next_turn(self) -> None:
        self._turn = (self._turn + 1) % self.depth

    def index(self, wanted: CaptureSite) -> torch.Tensor:
        size = bucket(len(wanted.rows))
        name = (wanted.key, wanted.after, size)
        if name not in self._index:
            self._index[name] = torch.full((size,), SENTINEL, dtype=torch.long, device=self.device)
        held = self._index[name]
        padded = wanted.rows + [SENTINEL] * (size - len(wanted.rows))
        held.copy_(torch.tensor(padded))
        return held

    def copy(self, wanted: CaptureSite, parts: Sequence[torch.Tensor]) -> torch.Tensor:
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


class BatchTap:
    """The sites of one step that somebody wants or changes, by layer."""

    def __init__(
        self,
        staging: StepStaging,
        layout: CaptureLayout,
        takes: Sequence[RowRequest],
        changes: StepEdits | None,
    ):
        self._staging = staging
        self.layout = layout
        self.takes = takes
        self.changes = changes
        self._staged: dict[CaptureSite, torch.Tensor] = {}
        self._copied: dict[CaptureSite, torch.Tensor] = {}
        self._landing: Landing | None = None  # the step ran elsewhere: where its rows come out
        self._layers: dict[int, Tap] | None = None
        self._unwatched: Tap = NoTap()

    @property
    def wanted(self) -> list[CaptureSite]:
        return self.layout.wanted

    def at(self, layer: int) -> Tap:
        if self._layers is None:
            self._layers = self._by_layer()
        return self._layers.get(layer, self._unwatched)

    def _by_layer(self) -> dict[int, Tap]:
        found: dict[int, _LayerTap] = {}
        written = _PostMix()

        def layer_tap(layer: int) -> _LayerTap:
            return found.setdefault(layer, _LayerTap(self._staging, self._staged, written))

        for want in self.wanted:
            layer_tap(want.key[1]).add(BY_NAME[want.key[0]], want)
        for hook, layer in self.changes.sites if self.changes is not None else ():
            layer_tap(layer).change(BY_NAME[hook], layer, self.changes)
        if self.changes is not None and self.changes.needs_post():
            # every sublayer's write-out weights are remembered
            self._unwatched = _LayerTap(self._staging, self._staged, written)
            written.wanted = True
        return {**found}

    def __call__(self, site: Site, x: torch.Tensor) -> torch.Tensor:
        return x

    def part(
        self, site: Site, x: torch.Tensor, reads: Reads | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x

    def see(self, site: Site, *parts: torch.Tensor) -> None:
        pass

    def hand_over(self, landing: Landing) -> None:
        """The step ran elsewhere: every take's rows come from there."""
        self._landing = landing

    @property
    def lands_later(self) -> bool:
        """Rows are on their way, and asking for them waits until they are there."""
        return self._landing is not None

    def deliver(self, waiting: Collection[Plan] = (), witness: RowObserver | None = None) -> None:
        """Hand every job its rows, copied out of the buffers, except jobs of plans that have to wait."""
        for number, take in enumerate(self.takes):
            if take.plan not in waiting:
                self._hand_out(number, len(take.positions), witness)

    def deliver_kept(self, plan: Plan, stop: int | None = None, witness: RowObserver | None = None) -> None:
        """Hand one plan its rows, or those before position `stop`: others were guesses that did not stay."""
        for number, take in enumerate(self.takes):
            if take.plan is plan:
                kept = (
                    sum(position < stop for position in take.positions)
                    if stop is not None
                    else len(take.positions)
                )
                self._hand_out(number, kept, witness)

    def _hand_out(self, number: int, count: int, witness: RowObserver | None) -> None:
        if not count:
            return
        take = self.takes[number]
        whole = count == len(take.positions)
        positions = take.positions[:count]
        token_ids = take.token_ids[:count]
        prompt_rows = min(take.prompt_rows, count)
        landing = self._landing or self._out_of_staging
        for (hook, layer), tensor in landing(number):
            rows = SiteRows(
                hook, layer, tensor if whole else tensor[:count], positions, token_ids, prompt_rows
            )
            if witness is not None:
                witness(take.plan, take.job, rows)
            take.job.deliver(rows)

    def _out_of_staging(self, number: int) -> Iterable[tuple[Key, torch.Tensor]]:
        count = len(self.takes[number].positions)
        for want, first in self.layout.shares[number]:
            if want in self._staged:
                yield want.key, self.on_host(want)[first : first + count]

    def on_host(self, want: CaptureSite) -> torch.Tensor:
        """The staged rows of a site, copied out of their buffer once for everybody who asked for some."""
        if want not in self._copied:
            self._copied[want] = self._staged[want][: len(want.rows)].to("cpu", copy=True)
        return self._copied[want]


class _PostMix:
    """The write-out weights of the sublayer that wrote the streams last."""

    wanted = False
    post: torch.Tensor | None = None


class _LayerTap:
    """One layer's share. At a site: capture, then the edits in their order, then captures of the edited tensor."""

    def __init__(self, staging: StepStaging, staged: dict[CaptureSite, torch.Tensor], written: _PostMix):
        self._staging = staging
        self._staged = staged
        self._written = written
        self._before: dict[int, CaptureSite] = {}
        self._after: dict[int, CaptureSite] = {}
        self._changes: dict[int, tuple[Key, StepEdits]] = {}

    def change(self, site: Site, layer: int, changes: StepEdits | None) -> None:
        assert changes is not None
        self._changes[site.id] = (site.name, layer), changes

    def add(self, site: Site, want: CaptureSite) -> None:
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
            x = changes.whole(key, x, SiteContext(self._written.post))
        self._stage(self._after, site, x)
        return x

    def part(
        self, site: Site, x: torch.Tensor, reads: Reads | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._stage(self._before, site, x)
        if site.id not in self._changes:
            self._stage(self._after, site, x)
            return x, x
        key, changes = self._changes[site.id]
        read, carried = changes.parted(key, x, SiteContext(self._written.post, reads))
        self._stage(self._after, site, carried if changes.sites[key].carries else read)
        return read, carried

    def _stage(self, sites: dict[int, CaptureSite], site: Site, *parts: torch.Tensor) -> None:
        want = sites.get(site.id)
        if want is not None:
            self._staged[want] = self._staging.copy(want, parts)


def arm(staging: StepStaging, spans: Sequence[Span], num_rows: int | None = None) -> BatchTap | None:
    """The tap of a step of `num_rows` tokens with these spans, or None when nothing of it is wanted or changed."""
    changes = staging.changes.of(spans, num_rows)
    takes = [take for span in spans if span.plan.jobs for take in _takes(span)]
    if not takes:
        if changes is None:
            return None
        if staging.armed is not None and staging.armed.changes is changes:
            return staging.armed
    staging.next_turn()
    tap = BatchTap(staging, staging.layout(takes), takes, changes)
    staging.armed = None if takes else tap
    return tap


def _takes(span: Span) -> list[RowRequest]:
    plan, first_row, start, tokens, prompt_len = span
    skip = max(plan.seen - start, 0)  # computed again after a preemption: delivered before
    plan.seen = max(plan.seen, start + len(tokens))
    if skip:
        tokens = tokens[skip:]
        start = start + skip
        first_row = first_row + skip
    if not len(tokens):
        return []
    found = []
    for job in plan.jobs:
        offsets = job.offsets(start, tokens, prompt_len)
        if len(offsets) and len(job.keys):
            places = [int(offset) for offset in offsets]
            positions = tuple(start + place for place in places)
            ids = tuple(int(tokens[place]) for place in places)
            prompt_rows = sum(position < prompt_len for position in positions)
            found.append(
                RowRequest(plan, job, [first_row + place for place in places], positions, ids, prompt_rows)
            )
    return found
