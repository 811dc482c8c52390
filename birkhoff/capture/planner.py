"""Captures of one engine: consumers, limits, and the plan of each request.

Rows stay in memory (`output.acts`) unless a capture has `returns="file"` or the wire form names another consumer; then
they pass through the dispatcher to the consumers of this engine, and `output.capture_results` has one result per
consumer. Planning returns data and has no side effect: files are opened and names are claimed when an engine accepts
the request (`Plan.open`).

A consumer with a `global_capture_spec` receives rows of every request, requests without a capture included. Its jobs
are added by `global_jobs`; its results are not part of the request's results, and the byte limits of requests do not
apply to it.

Limits and projections are shared by all planners of an engine (a harvest has its own planner) through `CaptureRules`.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from birkhoff.capture.sinks.consumer import Consumer
from birkhoff.capture.sinks.dispatch_sink import DispatchSink
from birkhoff.capture.sinks.dispatcher import Counters, Dispatcher
from birkhoff.capture.sinks.filesystem import FilesystemConsumer
from birkhoff.capture.sinks.job import CaptureJob, CaptureSink, MemorySink
from birkhoff.capture.sinks.pinned_copy import PinnedCopy
from birkhoff.capture.sinks.result import KEPT_RESULTS
from birkhoff.capture.spec.estimate import Estimate
from birkhoff.capture.spec.projections import Projections
from birkhoff.capture.spec.request import Capture, ResolvedCapture, capture_hash, resolve_capture_request
from birkhoff.capture.spec.validation import LAYOUTS, CaptureContext, ConsumerRules
from birkhoff.errors import CaptureValidationError, OptionError, quoted
from birkhoff.hooks.plan import Plan
from birkhoff.hooks.positions import parse_positions
from birkhoff.hooks.results import RequestResults
from birkhoff.hooks.schema import Schema
from birkhoff.option_checks import as_int

CaptureRequestSpec = Capture | Mapping[str, Any]  # a Capture, or the wire form keyed by consumer
MEMORY, FILES = "memory", "filesystem"

log = logging.getLogger(__name__)


@dataclass
class CaptureRules:
    """Limits and projections of one engine; None means no limit. Changes apply to later requests."""

    projections: Projections
    max_request_bytes: int | None = 32 << 30  # all consumers of a request together
    max_inline_bytes: int | None = 4 << 30  # rows in memory, held until the caller drops them

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "projections" and value is not None and (as_int(value) is None or value < 0):
            raise OptionError(f"{name} is {quoted(value)}, expected a number of bytes, or None for no limit.")
        super().__setattr__(name, value)


class CapturePlanner:
    """Checks capture requests against one engine and makes the plans of its requests.

    `file_options` are fields of `FileOptions` for the consumer that writes under `root`, such as the rank of a pipeline
    stage; `layers` are the layers that this process computes, None for all: rows of others are captured elsewhere.
    With `on_device`, rows of a GPU are selected, projected, reduced and cast there; those for memory stay there, and
    those for consumers are copied to the host asynchronously. `queues` are options of `Dispatcher`."""

    def __init__(
        self,
        schema: Schema,
        num_layers: int,
        model: str,
        root: str | Path | None = None,
        kept_results: int = KEPT_RESULTS,
        rules: CaptureRules | None = None,
        file_options: Mapping[str, Any] | None = None,
        layers: Collection[int] | None = None,
        on_device: bool = False,
        **queues: Any,
    ):
        self._schema = schema
        self._num_layers = num_layers
        self._model = model
        self._layers = None if layers is None else frozenset(layers)
        self._on_device = on_device
        self._pinned_copy = PinnedCopy()
        self.rules = rules or CaptureRules(Projections(schema))
        self._rules_by_name: dict[str, ConsumerRules | None] = {MEMORY: ConsumerRules(), FILES: None}
        self._consumers: dict[str, Consumer] = {}
        self._global_captures: dict[str, Capture] = {}
        self._dispatcher = Dispatcher({}, kept_results=kept_results, **queues)
        if root is not None:
            files = FilesystemConsumer(str(root), kept_results=kept_results, **(file_options or {}))
            self.add_consumer(FILES, files)

    def add_consumer(self, name: str, consumer: Consumer) -> None:
        """Make `consumer` available to later requests under `name`. `close` shuts it down."""
        taken = {MEMORY, *self._consumers}
        if not isinstance(name, str) or not name or name in taken:
            names = ", ".join(sorted(taken))
            raise OptionError(
                f"a consumer is called {quoted(name)}, expected a name that is not taken: {names}."
            )
        if not isinstance(consumer, Consumer):
            raise OptionError(
                f"the consumer {quoted(name)} is {quoted(consumer)}, expected an object with the methods of "
                "birkhoff/capture/sinks/consumer.py, such as FilesystemConsumer(root)."
            )
        spec = consumer.global_capture_spec()
        capture = None if spec is None else Capture.from_json(spec)
        if capture is not None:  # a hook or layer that the model lacks is refused now, not at every request
            self._resolve_global(
                name, capture.replace(positions=parse_positions("all", "positions")), (0,), 1
            )
        self._dispatcher.add(name, consumer)
        self._consumers = {**self._consumers, name: consumer}
        if capture is not None:
            self._global_captures = {**self._global_captures, name: capture}
        if consumer.reads_client_spec:
            files = isinstance(consumer, FilesystemConsumer)
            rules = ConsumerRules(files, LAYOUTS if files else (), "file" if files else "handle")
            self._rules_by_name[name] = rules

    @property
    def file_roots(self) -> dict[str, Path]:
        """Capture root of every consumer that writes files, by consumer name."""
        files = {name: each for name, each in self._consumers.items() if isinstance(each, FilesystemConsumer)}
        return {name: Path(consumer.writer.root) for name, consumer in files.items()}

    @property
    def queue_counters(self) -> dict[str, Counters]:
        """Rows submitted, delivered and dropped since the engine was loaded, by consumer name."""
        return {name: queue.counters for name, queue in self._dispatcher.queues.items()}

    def plan(
        self, spec: CaptureRequestSpec, prompt_ids: tuple[int, ...], max_tokens: int, suffix: str = ""
    ) -> Plan:
        """The plan of one request, unopened. `suffix` keeps the ids of several prompts or choices apart."""
        specs, parameters = self._split_parameters(self._by_consumer(spec, suffix))
        resolved = resolve_capture_request(specs, self._context(prompt_ids, max_tokens))
        for name in resolved.keys() & self._consumers.keys():
            fields = resolved[name].capture.to_json() | parameters.get(name, {})
            self._consumers[name].validate_client_spec(fields, f"capture.{name}")
        captures = {name: each.capture for name, each in resolved.items()}
        projects = {capture.project for capture in captures.values() if capture.project is not None}
        digests = {name: self.rules.projections.find(name).digest for name in projects}
        digest = capture_hash(captures, digests)
        jobs = tuple(
            self._job(each, len(prompt_ids), digest, parameters.get(name)) for name, each in resolved.items()
        )
        return Plan(jobs, results=RequestResults(jobs))

    def global_jobs(self, prompt_ids: tuple[int, ...], max_tokens: int) -> tuple[CaptureJob, ...]:
        """Jobs of the consumers that receive rows of every request.

        A global spec that does not fit a request, such as a position beyond its end, is logged and skipped: it must
        not fail a request that did not name it.
        """
        jobs = []
        for name, capture in self._global_captures.items():
            try:
                resolved = self._resolve_global(name, capture, prompt_ids, max_tokens)
            except CaptureValidationError as error:
                log.warning("capture consumer %s receives no rows of a request: %s", name, error)
                continue
            jobs.append(self._job(resolved, len(prompt_ids), capture_hash({name: capture})))
        return tuple(jobs)

    def estimate(
        self, spec: CaptureRequestSpec, prompt_ids: tuple[int, ...], max_tokens: int
    ) -> dict[str, Estimate]:
        """Upper bound of what a capture stores, by consumer."""
        specs, _ = self._split_parameters(self._by_consumer(spec, ""))
        resolved = resolve_capture_request(specs, self._context(prompt_ids, max_tokens))
        return {name: each.estimate for name, each in resolved.items()}

    def close(self) -> None:
        self._dispatcher.shutdown()

    def _context(self, prompt_ids: tuple[int, ...], max_tokens: int) -> CaptureContext:
        return CaptureContext(
            self._schema,
            self._num_layers,
            prompt_ids,
            max_tokens,
            self._rules_by_name,
            self.rules.projections.shapes,
            self.rules.max_request_bytes,
            self.rules.max_inline_bytes,
        )

    def _resolve_global(
        self, name: str, capture: Capture, prompt_ids: tuple[int, ...], max_tokens: int
    ) -> ResolvedCapture:
        return capture.resolve(
            self._schema,
            self._num_layers,
            prompt_ids,
            max_tokens,
            projections=self.rules.projections.shapes,
            path=f"capture.{name}",
        )

    def _by_consumer(self, spec: CaptureRequestSpec, suffix: str) -> Mapping[str, Any]:
        """Captures, or their wire forms, by consumer; request ids end with `suffix`."""
        if not isinstance(spec, Capture):
            return {name: _with_suffix(part, suffix) for name, part in spec.items()} if suffix else spec
        if spec.returns in (None, "inline"):
            return {MEMORY: spec}
        if self._rules_by_name[FILES] is None:
            raise OptionError(
                f"capture.return is {spec.returns!r}, but this engine writes no files. "
                "Load it with capture_root=DIR, or leave 'return' out to get rows in output.acts."
            )
        request_id = uuid.uuid4().hex if spec.request_id is None else spec.request_id
        return {FILES: spec.replace(request_id=request_id + suffix, tag=spec.tag or "captures")}

    def _split_parameters(
        self, specs: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, dict[str, Any]]]:
        """The captures without the fields that belong to a consumer itself, and these fields by consumer."""
        plain: dict[str, Any] = {}
        parameters: dict[str, dict[str, Any]] = {}
        for name, part in specs.items() if isinstance(specs, Mapping) else ():
            own = getattr(self._consumers.get(name), "client_parameters", ())
            if own and isinstance(part, Mapping):
                parameters[name] = {key: value for key, value in part.items() if key in own}
                part = {key: value for key, value in part.items() if key not in own}
            plain[name] = part
        return plain if parameters else specs, parameters

    def _job(
        self,
        resolved: ResolvedCapture,
        prompt_len: int,
        digest: str,
        parameters: Mapping[str, Any] | None = None,
    ) -> CaptureJob:
        project = resolved.capture.project
        projection = None if project is None else self.rules.projections.find(project)
        sink: CaptureSink
        if resolved.consumer == MEMORY:
            sink = MemorySink(resolved, shared=self._on_device)
        else:
            meta = {"model": self._model, "capture_hash": digest}
            if projection is not None:
                meta |= {"project": str(project), "project_digest": projection.digest}
            # Consumers that write files accept rows in large pieces; a live view receives every step at once.
            buffer_bytes = getattr(self._consumers[resolved.consumer], "buffer_bytes", 0)
            sink = DispatchSink(
                self._dispatcher, resolved, prompt_len, meta, buffer_bytes, parameters, self._pinned_copy
            )
        matrix = None if projection is None else projection.matrix
        return CaptureJob(resolved, sink, matrix, digest, self._layers, self._on_device)


def _with_suffix(part: Any, suffix: str) -> Any:
    """One consumer's part of the wire form with `suffix` appended to its request id."""
    if not isinstance(part, Mapping) or not isinstance(part.get("request_id"), str):
        return part  # no id, or refused by the check that follows
    return {**part, "request_id": part["request_id"] + suffix}
