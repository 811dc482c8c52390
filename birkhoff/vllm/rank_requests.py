"""The requests of one rank: plans prepared by the front, the steps of vLLM announced to the hooks, reports at the end.

A request is prepared before vLLM has it (`prepare`), so that everything that can be refused is refused then. It starts
when the scheduler sends it to the workers under an id of its own. Its captures end when the front says how long the
answer is; its edits stay until the scheduler has dropped the request, because tokens that vLLM still computes are
stored in its cache. Nothing of vLLM is imported here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from birkhoff.capture.planner import FILES, MEMORY
from birkhoff.capture.sinks.job import CaptureJob
from birkhoff.errors import BirkhoffError, quoted
from birkhoff.hooks.plan import Edit, Job, Key, Plan, SiteRows, Span
from birkhoff.hooks.sites import Site
from birkhoff.hooks.step_hooks import StepHooks
from birkhoff.hooks.tap import Tap
from birkhoff.planning.request_planner import RequestPlanner
from birkhoff.sae.sae_fields import parse_intervention
from birkhoff.vllm.recorded_sites import RecordedSites, fits
from birkhoff.vllm.spec import (
    RankReport,
    RequestSpec,
    decode_edit,
    decode_vector,
    is_feature_edit,
    pack_rows,
    ranges,
)


class StepRows(NamedTuple):
    """The rows of one request in a step: tokens at positions `start..` are rows `first_row..`. With `drafted`, some of
    the tokens are drafts that may be rejected."""

    request_id: str
    first_row: int
    start: int
    token_ids: Sequence[int]
    prompt_len: int
    drafted: bool = False


class HeldJob:
    """A job whose rows of generated tokens are kept until the end: then those past the answer are left out."""

    def __init__(self, job: CaptureJob, prompt_len: int):
        self.job = job
        self.keys = job.keys
        self.after = job.after
        self._prompt_len = prompt_len
        self._held: list[SiteRows] = []

    def offsets(self, start: int, token_ids: Sequence[int], prompt_len: int) -> Sequence[int]:
        return self.job.offsets(start, token_ids, prompt_len)

    def open(self) -> None:
        self.job.open()

    def deliver(self, rows: SiteRows) -> None:
        if rows.positions[0] < self._prompt_len:
            self.job.deliver(rows)
        else:
            self._held.append(rows)

    def close(self, finish_reason: str, num_tokens: int) -> None:
        for rows in self._held:
            count = sum(position < num_tokens - 1 for position in rows.positions)
            if count:
                self.job.deliver(rows.part(0, count))
        self._held.clear()
        self.job.close(finish_reason, num_tokens)


@dataclass(eq=False)
class RankRequest:
    """`sent` are the captures whose rows go to the front, `written` the one that this rank writes."""

    spec: RequestSpec
    plan: Plan
    sent: list[CaptureJob] = field(default_factory=list)
    written: CaptureJob | None = None
    request_id: str | None = None  # of the scheduler, once it has started
    captured: bool = False  # its captures have ended
    recordable: bool = True  # whether the fixed operations of recorded graphs can run it

    @property
    def prompt_len(self) -> int:
        return len(self.spec.prompt_ids)


class RankRequests:
    """`captures`: whether this rank captures; other ranks of a tensor-parallel group have the same rows. `recorded` are
    the operations that graphs hold, where steps may be recorded graphs, and `in_graph` says whether the running forward
    pass is one."""

    def __init__(
        self,
        planner: RequestPlanner,
        device: torch.device | str = "cpu",
        captures: bool = True,
        recorded: RecordedSites | None = None,
        in_graph: Callable[[], bool] = lambda: False,
    ):
        self.planner = planner
        self.planner.captures.rules.max_request_bytes = None  # the front has checked
        self.planner.captures.rules.max_inline_bytes = None
        self.hooks = StepHooks(device)
        self._captures = captures
        self.recorded = recorded
        self._in_graph = in_graph
        self._vectors: dict[str, Any] = {}
        self._requests: dict[str, RankRequest] = {}  # by key: prepared, running, or waiting for `finish`
        self.running: dict[str, RankRequest] = {}  # by id of the scheduler
        # A request of the running step captures, here or on another rank of the group.
        self._capturing = False
        self.steps = 0
        self.hooked_steps = 0

    def add_vectors(self, vectors: Mapping[str, str]) -> None:
        for digest, text in vectors.items():
            if digest not in self._vectors:
                self._vectors[digest] = decode_vector(text)

    def drop_vectors(self, digests: Iterable[str]) -> None:
        for digest in digests:
            self._vectors.pop(digest, None)

    def prepare(self, text: str) -> dict[str, str] | None:
        """Plan a request and open its files; what refuses it is returned, as its error's code and message."""
        spec = RequestSpec.from_text(text)
        try:
            request = self._plan(spec)
            request.plan.open()
        except BirkhoffError as error:
            return {"code": error.code, "message": str(error)}
        self._requests[spec.key] = request
        return None

    def discard(self, key: str) -> None:
        """Forget a prepared request that is not going to start."""
        request = self._requests.pop(key, None)
        if request is not None:
            request.plan.close("cancelled", 0)
            if request.request_id is not None:
                request.plan.release()

    def start(self, request_id: str, key: str) -> None:
        """The scheduler sends the request for the first time, or again after `end`."""
        request = self._requests.get(key)
        if request is None or request.request_id is not None:
            return  # ended before it started, or preempted and sent again
        request.request_id = request_id
        reserved = request.plan.reserve()
        assert reserved, f"the front admitted {quoted(key)} within the same limits"
        self.running[request_id] = request

    def end(self, request_id: str) -> None:
        """The scheduler has dropped the request: no token of it is computed any more, unless it starts again."""
        request = self.running.pop(request_id, None)
        if request is not None:
            request.request_id = None
            request.plan.release()
            if request.captured:
                self._requests.pop(request.spec.key, None)

    def finish(self, key: str, reason: str, num_tokens: int) -> dict[str, Any]:
        """End the captures of a request whose text has `num_tokens` tokens, of which the last was never computed."""
        request = self._requests.get(key)
        if request is None:
            return asdict(RankReport(errors=[f"{key} is not known on this rank"]))
        plan = request.plan
        if not request.captured:
            plan.settle(num_tokens - 1)
            plan.close(reason, num_tokens)
            plan.jobs = ()
            request.captured = True
        steered = {position for position in plan.steered if position < num_tokens - 1}
        report = RankReport(ranges(steered))
        for job in request.sent:
            if job.error is None:
                report.rows.append(pack_rows(dict(job.rows()), num_tokens - 1))
            else:
                report.errors.append(job.error)
        if request.written is not None:
            report.files = request.written.result().to_json()
        if request.request_id is None:
            self._requests.pop(key, None)
        return asdict(report)

    def begin(self, rows: Iterable[StepRows], num_rows: int) -> list[Plan]:
        """Start a step; returns the plans with draft tokens, for `StepHooks.end`."""
        spans: list[Span] = []
        drafted: list[Plan] = []
        self._capturing = False
        for step in rows:
            request = self.running[step.request_id]
            plan = request.plan
            self._capturing |= request.spec.captures
            spans.append(Span(plan, step.first_row, step.start, step.token_ids, step.prompt_len))
            if step.drafted:
                drafted.append(plan)
        self.steps += 1
        tap = self.hooks.begin(spans, num_rows)
        self.hooked_steps += tap is not None
        if self._uses_graph():
            assert self.recorded is not None
            self.recorded.fill(tap)
        return drafted

    def skip(self) -> None:
        """Before the forward pass of a step without hooked requests, where it may be a recorded graph."""
        if self._uses_graph():
            assert self.recorded is not None
            self.recorded.fill(None)

    def end_step(self, drafted: Collection[Plan]) -> None:
        """After the forward pass of a step that `begin` started."""
        if self._uses_graph():
            assert self.recorded is not None
            self.recorded.stage(self.hooks.tap)
        self._capturing = False
        self.hooks.end(drafted)

    def fail_step(self) -> None:
        """The forward pass of a step that `begin` started has raised."""
        self._capturing = False
        self.hooks.fail()

    def _uses_graph(self) -> bool:
        return self.recorded is not None and self._in_graph()

    def recordable(self) -> bool:
        """Whether the next step may be a recorded graph: all running requests fit its operations."""
        return self.recorded is not None and all(request.recordable for request in self.running.values())

    def prompt_len(self, request_id: str) -> int:
        return self.running[request_id].prompt_len

    def at(self, layer: int) -> Tap:
        """The tap of a layer in the running step: while a graph is recorded, the one whose operations it holds."""
        if self._uses_graph():
            assert self.recorded is not None
            return self.recorded.at(layer)
        return self.hooks.at(layer)

    def idle(self) -> bool:
        """Whether nothing happens at any site of the running step. A graph that is recorded has every site.

        All ranks of a tensor-parallel group answer alike, whichever of them captures: vLLM's own compiled code may
        exchange sums in other places than the armed one."""
        return self.hooks.idle and not self._capturing and not self._uses_graph()

    def edit_in_place(self, x: torch.Tensor, layer: int, site: Site) -> None:
        """Capture and edit the rows of a site."""
        new = self.at(layer)(site, x)
        if new is not x:
            x.copy_(new)

    def counts(self) -> dict[str, int]:
        return {
            "steps": self.steps,
            "hooked_steps": self.hooked_steps,
            "requests": len(self._requests),
            "running": len(self.running),
            "vectors": len(self._vectors),
        }

    def close(self) -> None:
        """Close the captures that are open; what was acknowledged is in their files."""
        for request in list(self._requests.values()):
            if not request.captured:
                request.plan.close("cancelled", request.prompt_len)
        self._requests.clear()
        self.running.clear()
        self.planner.close()

    def _plan(self, spec: RequestSpec) -> RankRequest:
        vectors = [decode_edit(raw, self._vectors) for raw in spec.edits if not is_feature_edit(raw)]
        features = [parse_intervention(raw, "") for raw in spec.edits if is_feature_edit(raw)]
        planner = self.planner
        edits: tuple[Edit, ...] = (
            *planner.steering.edits(vectors or None, spec.prompt_ids, spec.max_tokens),
            *planner.saes.edits(features, spec.prompt_ids, spec.max_tokens),
        )
        jobs: list[Job] = []
        sent: list[CaptureJob] = []
        written = None
        if self._captures:
            for capture in spec.rows:
                sent.append(self._job({MEMORY: capture}, spec))
            jobs += sent
            if spec.files is not None:
                written = self._job({FILES: spec.files}, spec)
                jobs.append(HeldJob(written, len(spec.prompt_ids)) if spec.hold else written)
        plan = planner.plan(spec.prompt_ids, spec.max_tokens, edits, jobs=jobs) or Plan()
        after = any(capture.get("capture_point") == "after" for capture in (*spec.rows, spec.files or {}))
        return RankRequest(spec, plan, sent, written, recordable=fits(plan, after))

    def _job(self, capture: Mapping[str, Any], spec: RequestSpec) -> CaptureJob:
        (job,) = self.planner.captures.plan(capture, spec.prompt_ids, spec.max_tokens).jobs
        assert isinstance(job, CaptureJob)
        return job


def armed_keys(armed: Mapping[str, Sequence[int]], layers: Iterable[int]) -> list[Key]:
    """The armed sites among the layers of a rank."""
    own = set(layers)
    return [(hook, layer) for hook, at in armed.items() for layer in at if layer in own]
