"""The tap of an eager step: captures and edits of all requests of a batch.

Before a step, `arm` turns the plans of its spans into row indices per site. If no request captures or edits
anything in this step it returns None and the step runs with `NoTap`, so an idle engine pays nothing. During the
step, a captured site is one copy of its rows, for all requests; nothing waits for the device. Rows of ragged sites
are computed for the captured tokens alone and are kept as they are. After the step, `deliver` gives each job its part
of the copied rows.

Which rows of which sites belong to which job is a `CaptureLayout`. While requests only decode it is the same from
step to step and is reused; only the tokens (`RowRequest`) are new."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property, partial
from typing import NamedTuple
from weakref import ref

import torch

from birkhoff.hooks.capture_buffer import CaptureBuffer
from birkhoff.hooks.plan import Job, Key, Plan, SiteRows, Span, on_device
from birkhoff.hooks.site_runner import LayerTap, PostMix, RaggedRunner, SiteRunner
from birkhoff.hooks.sites import BY_NAME
from birkhoff.hooks.step_edits import StepEditBuilder, StepEdits
from birkhoff.hooks.tap import NoTap, RowReader, Tap, stack_parts

RowObserver = Callable[[Plan, Job, SiteRows], None]  # called with rows before they are delivered to a job
RowSource = Callable[[int], Iterable[tuple[Key, torch.Tensor]]]  # rows of a request on the host, by its index


class RowRequest(NamedTuple):
    """The tokens of a span that one job captures, by their offsets in it; `rows` are their rows of the step."""

    span: Span
    job: Job
    offsets: list[int]
    rows: list[int]

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(self.span.start + offset for offset in self.offsets)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(int(self.span.token_ids[offset]) for offset in self.offsets)


class CaptureSite:
    """A captured site and its rows, before (`after` false) or after the edits."""

    def __init__(self, key: Key, after: bool):
        self.key = key
        self.after = after
        self.rows: list[int] = []
        self._on_device: torch.Tensor | None = None

    def copy(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The rows of the site in memory of their own."""
        first, count = self.rows[0], len(self.rows)
        if self._consecutive:
            rows = [part[first : first + count] for part in parts]
            return (
                stack_parts(*rows) if len(rows) > 1 else rows[0].clone(memory_format=torch.contiguous_format)
            )
        return stack_parts(*(part.index_select(0, self._index(part.device)) for part in parts))

    @cached_property
    def _consecutive(self) -> bool:
        """Whether the rows follow each other, as those of prompts that are captured as a whole do."""
        return self.rows == list(range(self.rows[0], self.rows[0] + len(self.rows)))

    def _index(self, device: torch.device) -> torch.Tensor:
        """The rows on a device; the copy to a GPU is from pinned memory and does not wait for it."""
        if self._on_device is None:
            index = torch.tensor(self.rows, pin_memory=device.type == "cuda")
            self._on_device = index.to(device, non_blocking=True)
        return self._on_device


class CaptureLayout:
    """Maps row requests to rows of captured sites. Holds jobs by weak reference: a job may be large and may end."""

    def __init__(self, requests: Sequence[RowRequest]):
        self._jobs = [ref(request.job) for request in requests]
        self.rows = [request.rows for request in requests]
        # Per request: its sites, and its first row in each.
        self.sites_of: list[list[tuple[CaptureSite, int]]] = []
        sites: dict[tuple[Key, bool], CaptureSite] = {}
        for request in requests:
            own_sites = []
            after = request.job.after
            for key in request.job.keys:
                site = sites.get((key, after))
                if site is None:
                    site = sites[key, after] = CaptureSite(key, after)
                own_sites.append((site, len(site.rows)))
                site.rows += request.rows
            self.sites_of.append(own_sites)
        self.sites = list(sites.values())

    def fits(self, requests: Sequence[RowRequest]) -> bool:
        """Whether these are the jobs it was made for, with the same rows."""
        return len(requests) == len(self._jobs) and all(
            job() is request.job and rows == request.rows
            for job, rows, request in zip(self._jobs, self.rows, requests)
        )


class StepStaging:
    """What persists between steps: the builder of edits, and the last layout and tap, which are reused where they
    fit."""

    def __init__(self, device: torch.device | str = "cpu"):
        self.edit_builder = StepEditBuilder(torch.device(device))
        # The last tap, if it captured nothing: reused while edits stay.
        self.last_edit_tap: BatchTap | None = None
        self._layout = CaptureLayout(())

    def layout(self, requests: Sequence[RowRequest]) -> CaptureLayout:
        if not self._layout.fits(requests):
            self._layout = CaptureLayout(requests)
        return self._layout


class BatchTap(NoTap):
    """The captures and edits of one step. The model gets its layers' taps from `at`."""

    def __init__(self, layout: CaptureLayout, requests: Sequence[RowRequest], edits: StepEdits | None):
        self.layout = layout
        self.requests = requests
        self.edits = edits
        self._staged: dict[CaptureSite, torch.Tensor] = {}  # on the device
        self._on_host: dict[CaptureSite, torch.Tensor] = {}
        self._ragged: dict[CaptureSite, list[torch.Tensor]] = {}  # for each captured token, its rows
        self._source: RowSource | None = None
        self._layers: dict[int, Tap] | None = None
        self._default: Tap = NoTap()

    def at(self, layer: int) -> Tap:
        if self._layers is None:
            self._layers = self._by_layer()
        return self._layers.get(layer, self._default)

    def _by_layer(self) -> dict[int, Tap]:
        runners: dict[Key, SiteRunner] = {}
        ragged: dict[Key, RaggedRunner] = {}
        edits = self.edits
        for key, site_edits in edits.sites.items() if edits is not None else ():
            assert edits is not None
            if BY_NAME[key[0]].ragged:
                ragged[key] = RaggedRunner(site_edits.changes)
                continue
            runners[key] = SiteRunner(stages=partial(edits.stages, key), paths=site_edits.paths)
        for key, gates in edits.gates.items() if edits is not None else ():
            runners.setdefault(key, SiteRunner()).probes.append(gates)
        for site in self.layout.sites:
            if BY_NAME[site.key[0]].ragged:
                self._read_with(ragged.setdefault(site.key, RaggedRunner()), site)
                continue
            runner = runners.setdefault(site.key, SiteRunner())
            if site.after:
                runner.after = partial(self._stage, site)
            else:
                runner.before = partial(self._stage, site)
        post_mix = PostMix()
        layers: defaultdict[int, LayerTap] = defaultdict(lambda: LayerTap(post_mix, edits is not None))
        for (hook, layer), runner in runners.items():
            layers[layer].sites[BY_NAME[hook].id] = runner
        for (hook, layer), reader in ragged.items():
            layers[layer].ragged_sites[BY_NAME[hook].id] = reader
        if edits is not None and edits.needs_post:
            self._default = LayerTap(post_mix)  # every layer's write-out weights are recorded
        return {**layers}

    def _stage(self, site: CaptureSite, parts: Sequence[torch.Tensor]) -> None:
        self._staged[site] = site.copy(parts)

    def _read_with(self, runner: RaggedRunner, site: CaptureSite) -> None:
        def capture(reader: RowReader) -> None:
            self._ragged[site] = [rows.to("cpu", copy=True) for rows in reader(site.rows)]

        if site.after:
            runner.after = capture
        else:
            runner.before = capture

    def stage_from(self, buffer: CaptureBuffer) -> None:
        """Stage the captured rows of a step that ran as a recorded graph, which copied all rows into `buffer`."""
        for site in self.layout.sites:
            self._stage(site, [buffer.site((site.key, site.after))])

    def set_source(self, source: RowSource) -> None:
        """Deliver rows from `source` instead of the staging buffers: the step ran as a recorded graph."""
        self._source = source

    @property
    def is_pending(self) -> bool:
        """Whether rows are still being copied; delivering them waits for the copy."""
        return self._source is not None

    def deliver(self, excluded: Collection[Plan] = (), observer: RowObserver | None = None) -> None:
        """Deliver to every job its rows, copied out of the buffers, except to jobs of excluded plans."""
        for index, request in enumerate(self.requests):
            if request.span.plan not in excluded:
                self._deliver(index, len(request.rows), observer)

    def deliver_plan(self, plan: Plan, stop: int | None = None, observer: RowObserver | None = None) -> None:
        """Deliver one plan's rows, or those before position `stop`: the others are of rejected draft tokens."""
        for index, request in enumerate(self.requests):
            if request.span.plan is plan:
                count = len(request.rows)
                if stop is not None:
                    count = sum(position < stop for position in request.positions)
                self._deliver(index, count, observer)

    def _deliver(self, index: int, count: int, observer: RowObserver | None) -> None:
        if not count:
            return
        request = self.requests[index]
        whole = count == len(request.rows)
        positions, token_ids = request.positions, request.token_ids
        source = self._source or self._staged_rows
        for (hook, layer), tensor in source(index):
            rows = SiteRows(hook, layer, tensor, positions, token_ids)
            if not whole:
                rows = rows.part(0, count)
            if observer is not None and not on_device(request.job):
                observer(request.span.plan, request.job, rows)
            request.job.deliver(rows)
        for ragged_rows in self._ragged_rows(index, count):
            request.job.deliver(ragged_rows)

    def _ragged_rows(self, index: int, count: int) -> Iterable[SiteRows]:
        """The rows of ragged sites of a request's first `count` tokens. Every row has the labels of its token."""
        if not self._ragged:
            return
        request = self.requests[index]
        labels = list(zip(request.positions, request.token_ids))  # of every token, once for all sites
        for site, first in self.layout.sites_of[index]:
            parts = self._ragged[site][first : first + count] if site in self._ragged else []
            if not any(len(part) for part in parts):
                continue
            repeated = (label for label, part in zip(labels, parts) for _ in range(len(part)))
            positions, token_ids = zip(*repeated)
            yield SiteRows(*site.key, torch.cat(parts), positions, token_ids)

    def _staged_rows(self, index: int) -> Iterable[tuple[Key, torch.Tensor]]:
        count = len(self.requests[index].rows)
        stays = on_device(self.requests[index].job)
        for site, first in self.layout.sites_of[index]:
            if site in self._staged:
                rows = self._staged[site] if stays else self.on_host(site)
                yield site.key, rows[first : first + count]

    def on_host(self, site: CaptureSite) -> torch.Tensor:
        """The captured rows of a site, copied to the host once for all jobs."""
        if site not in self._on_host:
            self._on_host[site] = self._staged[site].cpu()
        return self._on_host[site]


def arm(staging: StepStaging, spans: Sequence[Span], num_rows: int | None = None) -> BatchTap | None:
    """The tap of a step of `num_rows` tokens with these spans, or None if nothing is captured or edited."""
    edits = staging.edit_builder.build(spans, num_rows)
    requests = [request for span in spans if span.plan.jobs for request in _row_requests(span)]
    if not requests:
        if edits is None:
            return None
        if staging.last_edit_tap is not None and staging.last_edit_tap.edits is edits:
            return staging.last_edit_tap
    tap = BatchTap(staging.layout(requests), requests, edits)
    staging.last_edit_tap = None if requests else tap
    return tap


def _row_requests(span: Span) -> list[RowRequest]:
    plan, first_row, start, tokens, prompt_len = span
    skip = max(plan.delivered_until - start, 0)  # recomputed after a preemption: already delivered
    plan.delivered_until = max(plan.delivered_until, start + len(tokens))
    if skip:
        span = Span(plan, first_row + skip, start + skip, tokens[skip:], prompt_len)
    if not len(span.token_ids):
        return []
    requests = []
    for job in plan.jobs:
        offsets = [int(offset) for offset in job.offsets(span.start, span.token_ids, prompt_len)]
        if offsets and len(job.keys):
            rows = [span.first_row + offset for offset in offsets]
            requests.append(RowRequest(span, job, offsets, rows))
    return requests
