"""Plans of requests in the front: checked as everywhere, then sent to the ranks that run them.

The plan of a request here has the jobs of its captures, whose rows come from the ranks when the request has ended. A
capture that goes to files is written by the ranks; its job here only receives the result."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from birkhoff.capture.planner import FILES, CapturePlanner, CaptureRequestSpec
from birkhoff.capture.sinks.captured_rows import Acts
from birkhoff.capture.sinks.job import CaptureJob
from birkhoff.capture.spec.request import ResolvedCapture
from birkhoff.capture.spec.validation import LAYOUTS, ConsumerRules
from birkhoff.errors import CaptureError, OptionError, SteeringError
from birkhoff.hooks.edit import SiteEdit
from birkhoff.hooks.plan import Edit, Job, Key, Plan, SiteRows
from birkhoff.hooks.results import CaptureResult
from birkhoff.hooks.schema import HookSchema
from birkhoff.hooks.signals import SignalJob
from birkhoff.planning.request_planner import RequestPlanner, cache_salt
from birkhoff.sae.resolver import Attachment, SaeResolver, split_edits
from birkhoff.steering.call import split_calls
from birkhoff.steering.modules import Identity
from birkhoff.vllm.armed_sites import check_armed
from birkhoff.vllm.spec import RequestMark, RequestSpec, encode_edit

Call = Callable[..., list[Any]]  # a method of all ranks: its name and arguments -> one result per rank
_RAW = ("hooks", "positions", "capture_point")  # the fields of a capture that a rank needs to select rows


class EncodedEdits(tuple[Edit, ...]):
    """Resolved edits, with their form for the ranks: `encoded` objects, and the vectors that these name by digest."""

    encoded: tuple[dict[str, Any], ...] = ()
    vectors: Mapping[str, str] = {}


class RankSink:
    """The part of a capture in the front whose rows the ranks write."""

    in_memory = False

    def __init__(self) -> None:
        self.finished = CaptureResult("pending")

    def open(self) -> None:
        pass

    def append(self, rows: SiteRows) -> None:
        raise AssertionError("the ranks write these rows")

    def close(self, finish_reason: str, missing: list[int], error: str | None) -> None:
        pass

    def rows(self) -> Acts:
        raise CaptureError("the ranks wrote the rows to files. Read them there.")

    def result(self, timeout: float) -> CaptureResult:
        return self.finished


@dataclass(eq=False)
class RemotePlan(Plan):
    """A plan that the ranks run. `collect` brings what they captured, with the finish reason and number of tokens."""

    spec: RequestSpec | None = None
    vectors: Mapping[str, str] = field(default_factory=dict)
    prompt_len: int = 0
    collect: Callable[[str, int], None] | None = None

    @property
    def received(self) -> list[CaptureJob]:
        """The jobs whose rows the ranks send, in the order of `RequestSpec.rows`."""
        return [job for job in self.capture_jobs if not isinstance(job.sink, RankSink)]

    @property
    def written(self) -> RankSink | None:
        sinks = (job.sink for job in self.capture_jobs)
        return next((sink for sink in sinks if isinstance(sink, RankSink)), None)

    @property
    def capture_jobs(self) -> list[CaptureJob]:
        return [job for job in self.jobs if isinstance(job, CaptureJob)]

    @property
    def mark(self) -> RequestMark:
        assert self.spec is not None
        return RequestMark(self.spec.key, cache_salt(self, self.prompt_len), not self.jobs)

    def lose(self, why: str) -> None:
        """The ranks have ended: nothing can be collected any more."""
        self.collect = None
        for job in self.received:
            job.error = job.error or why
        if self.written is not None:
            self.written.finished = CaptureResult("error", error=why)

    def finish(self, finish_reason: str, num_tokens: int) -> None:
        collect = self.collect
        self.collect = None
        if collect is not None:
            collect(finish_reason, num_tokens)
        super().finish(finish_reason, num_tokens)


class FrontCapturePlanner(CapturePlanner):
    """A planner whose files are written by the ranks, under `root`."""

    def __init__(
        self,
        schema: Mapping[str, HookSchema],
        num_layers: int,
        model: str,
        root: str | Path | None,
        **queues: Any,
    ):
        super().__init__(schema, num_layers, model, **queues)
        self._root = None if root is None else Path(root)
        if root is not None:
            self._rules_by_name[FILES] = ConsumerRules(True, LAYOUTS, "file")

    @property
    def file_roots(self) -> dict[str, Path]:
        own = {} if self._root is None else {FILES: self._root}
        return {**own, **super().file_roots}

    def _job(
        self,
        resolved: ResolvedCapture,
        prompt_len: int,
        digest: str,
        parameters: Mapping[str, Any] | None = None,
    ) -> CaptureJob:
        if resolved.consumer != FILES:
            return super()._job(resolved, prompt_len, digest, parameters)
        if resolved.capture.project is not None:
            raise OptionError(
                "a capture that the ranks write has 'project', and projections are known to the front only. Leave "
                "'return' out to get projected rows in output.acts."
            )
        return CaptureJob(resolved, RankSink(), None, digest)


class RemoteAttachment(Attachment):
    """The result of `engine.attach` on vLLM."""

    def __init__(self, attachment: Attachment, detach: Callable[[str], None]):
        super().__init__(attachment._registry, attachment.module)
        self._detach = detach

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, at)
        self._detach(self.name)


class FrontSaeResolver(SaeResolver):
    """Dictionaries are attached here, where requests are checked, and on every rank, from their files."""

    def __init__(self, schema: Mapping[str, HookSchema], num_layers: int, call: Call):
        super().__init__(schema, num_layers, "cpu")
        self._call = call

    def attach(
        self,
        name: str,
        sae: Any,
        kind: str = "delta",
        features: Iterable[int | str] | None = None,
        replace: bool = False,
    ) -> Attachment:
        attachment = super().attach(name, sae, kind, features, replace)
        try:
            if isinstance(sae, (str, Path)):
                self._call("birkhoff_attach", name, [str(Path(sae))], kind)
            else:
                with tempfile.TemporaryDirectory(prefix="birkhoff-sae-") as folder:
                    several = sae if isinstance(sae, Sequence) else [sae]
                    paths = [str(Path(folder, str(index))) for index in range(len(several))]
                    for path, each in zip(paths, several):
                        each.save(path, "manifest")
                    self._call("birkhoff_attach", name, paths, kind)
        except BaseException:
            self.registry.detach(name, drain=True)
            raise
        return RemoteAttachment(attachment, self._detach_remote)

    def detach(self, name: str, drain: bool = False) -> None:
        super().detach(name, drain)
        self._detach_remote(name)

    def _detach_remote(self, name: str) -> None:
        self._call("birkhoff_detach", name)


class VllmPlanner(RequestPlanner):
    """`armed` are layers by hook; `call` reaches the ranks."""

    def __init__(
        self,
        schema: Mapping[str, HookSchema],
        num_layers: int,
        model: str,
        armed: Mapping[str, Sequence[int]],
        call: Call,
        *,
        identity: Identity | None = None,
        capture_root: str | Path | None = None,
        **capture_queues: Any,
    ):
        captures = FrontCapturePlanner(schema, num_layers, model, capture_root, **capture_queues)
        super().__init__(schema, num_layers, model, identity=identity, captures=captures)
        self.saes = FrontSaeResolver(schema, num_layers, call)
        self._armed = armed
        self._next_key = 0

    def edits(self, steer: Any, prompt_ids: Sequence[int], max_tokens: int) -> tuple[Edit, ...]:
        others, calls = split_calls(steer)
        if calls:
            raise SteeringError(
                "steer has a function (Call), and functions are not sent to the ranks of vLLM. Use edits that are "
                "data, or the backend transformers or birkhoff."
            )
        edits = EncodedEdits(super().edits(others, prompt_ids, max_tokens))
        vectors, features = split_edits(steer)
        collected: dict[str, str] = {}
        edits.encoded = tuple(
            encode_edit(edit, collected)
            for edit in (*self.steering.contents(vectors), *self.saes.tier, *features)
        )
        edits.vectors = collected
        return edits

    def plan(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        edits: Sequence[Edit] = (),
        capture: CaptureRequestSpec | None = None,
        suffix: str = "",
        *,
        captures: CapturePlanner | None = None,
        jobs: Sequence[Job] = (),
        signals: SignalJob | None = None,
    ) -> Plan | None:
        base = super().plan(
            prompt_ids, max_tokens, edits, capture, suffix, captures=captures, jobs=jobs, signals=signals
        )
        if base is None:
            return None
        keys: set[Key] = {key for job in base.jobs for key in job.keys}
        keys |= {key for edit in base.edits for key in edit.sites}
        operations = [operation for edit in base.edits for operation in edit.sites.values()]
        keys |= {site.gate.key for site in operations if isinstance(site, SiteEdit) and site.gate is not None}
        check_armed(keys, self._armed)
        if any(getattr(site, "post_mix", False) for site in operations):
            raise SteeringError(
                "streams is 'post_mix', which the backend vllm does not have. Name the streams."
            )
        plan = RemotePlan(
            base.jobs,
            base.edits,
            reservations=base.reservations,
            table=base.table,
            results=base.results,
            prompt_len=len(prompt_ids),
        )
        raw = [job.resolved.capture.to_json() for job in plan.received]
        files = next(
            (job.resolved.capture for job in plan.capture_jobs if isinstance(job.sink, RankSink)), None
        )
        self._next_key += 1
        plan.spec = RequestSpec(
            f"r{self._next_key}",
            tuple(prompt_ids),
            max_tokens,
            edits.encoded if isinstance(edits, EncodedEdits) else (),
            tuple({name: each[name] for name in _RAW if name in each} for each in raw),
            None if files is None else files.to_json(),
        )
        plan.vectors = edits.vectors if isinstance(edits, EncodedEdits) else {}
        return plan
