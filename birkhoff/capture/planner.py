"""Captures of an engine: who keeps which rows, and what became of them.

Rows go to memory (`output.acts`) unless a capture says `returns="file"` or the wire form names another consumer: then
they go through the dispatcher to the consumers that this engine has, and `output.capture_results` says, per consumer,
what became of them. What a request may store is limited in bytes, and `project` names matrices that were registered;
both belong to the engine, so that every desk of it (a harvest has its own) goes by the same rules.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from birkhoff.capture.sinks.chunk import DECODE, PREFILL, Chunk
from birkhoff.capture.sinks.consumer import Consumer
from birkhoff.capture.sinks.dispatcher import Dispatcher
from birkhoff.capture.sinks.filesystem import FilesystemConsumer
from birkhoff.capture.sinks.job import CaptureJob, MemorySink
from birkhoff.capture.sinks.reduce import StoredRows
from birkhoff.capture.sinks.result import KEPT_RESULTS, CaptureRequest, CaptureResult
from birkhoff.capture.spec.estimate import Estimate
from birkhoff.capture.spec.projections import Projections
from birkhoff.capture.spec.request import Capture, ResolvedCapture, capture_hash, resolve_capture_request
from birkhoff.capture.spec.validation import LAYOUTS, CaptureContext, ConsumerRules
from birkhoff.errors import OptionError, quoted
from birkhoff.hooks.plan import Plan, SiteRows
from birkhoff.hooks.schema import HookSchema
from birkhoff.hooks.site_names import Address

CaptureRequestSpec = Capture | Mapping[str, Any]  # a Capture, or the wire form keyed by consumer
MEMORY, FILES = "memory", "filesystem"
SECONDS_TO_DURABLE = 30.0
ROW_OVERHEAD = 64  # what the labels of a waiting row cost, roughly


@dataclass
class CaptureRules:
    """What requests of one engine may ask for; None lifts a limit. Changes hold from the next request on."""

    projections: Projections
    max_request_bytes: int | None = 32 << 30  # all consumers of a request together
    max_inline_bytes: int | None = 4 << 30  # rows that stay in memory until the caller drops them

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "projections" and value is not None and (type(value) is not int or value < 0):
            raise OptionError(f"{name} is {quoted(value)}, expected a number of bytes, or None for no limit.")
        super().__setattr__(name, value)


class CapturePlanner:
    """Turns wishes into plans and plans into results, for one engine."""

    def __init__(
        self,
        schema: Mapping[str, HookSchema],
        num_layers: int,
        model: str,
        root: str | Path | None = None,
        overload_policy: str = "spill",
        kept_results: int = KEPT_RESULTS,
        rules: CaptureRules | None = None,
    ):
        self._schema = schema
        self._num_layers = num_layers
        self._model = model
        self.rules = rules or CaptureRules(Projections(schema))
        self._consumers: dict[str, ConsumerRules | None] = {MEMORY: ConsumerRules(), FILES: None}
        self._patience: dict[str, int] = {}
        self._dispatcher = Dispatcher({}, overload_policy=overload_policy, kept_results=kept_results)
        if root is not None:
            self.add_consumer(FILES, FilesystemConsumer(str(root), kept_results=kept_results))

    def add_consumer(self, name: str, consumer: Consumer) -> None:
        """Requests may send rows to `consumer` under this name from now on. Closing the desk shuts it down."""
        if not isinstance(name, str) or not name or self._consumers.get(name) is not None:
            taken = ", ".join(sorted(known for known, rules in self._consumers.items() if rules is not None))
            raise OptionError(
                f"a consumer is called {quoted(name)}, expected a name that is not taken: {taken}."
            )
        self._dispatcher.add(name, consumer)
        self._patience[name] = getattr(consumer, "patience_bytes", 0)  # a live view wants every step at once
        files = isinstance(consumer, FilesystemConsumer)
        self._consumers[name] = ConsumerRules(files, LAYOUTS if files else (), "file" if files else "handle")

    def plan(
        self, wish: CaptureRequestSpec, prompt_ids: tuple[int, ...], max_tokens: int, choice: str = ""
    ) -> Plan:
        """One request's plan. `choice` keeps the file names of several prompts or answers apart."""
        projections = self.rules.projections
        found = resolve_capture_request(self._by_consumer(wish, choice), self._facts(prompt_ids, max_tokens))
        captures = {consumer: resolved.capture for consumer, resolved in found.items()}
        named = {capture.project for capture in captures.values() if capture.project is not None}
        matrices = {name: projections.find(name) for name in named}
        digest = capture_hash(captures, {name: matrix.digest for name, matrix in matrices.items()})
        jobs = []
        for consumer, resolved in found.items():
            matrix = matrices[resolved.capture.project] if resolved.capture.project is not None else None
            if consumer == MEMORY:
                keeper: MemorySink | DispatchSink = MemorySink(resolved)
            else:
                facts_of_file = {"model": self._model, "capture_hash": digest}
                if matrix is not None:
                    facts_of_file |= {
                        "project": str(resolved.capture.project),
                        "project_digest": matrix.digest,
                    }
                keeper = DispatchSink(
                    self._dispatcher, resolved, len(prompt_ids), facts_of_file, self._patience[consumer]
                )
            jobs.append(CaptureJob(resolved, keeper, None if matrix is None else matrix.matrix, digest))
        return Plan(tuple(jobs))

    def estimate(
        self, wish: CaptureRequestSpec, prompt_ids: tuple[int, ...], max_tokens: int
    ) -> dict[str, Estimate]:
        """What a capture would store at most, by consumer; nothing is begun."""
        found = resolve_capture_request(self._by_consumer(wish, ""), self._facts(prompt_ids, max_tokens))
        return {consumer: resolved.estimate for consumer, resolved in found.items()}

    def _facts(self, prompt_ids: tuple[int, ...], max_tokens: int) -> CaptureContext:
        return CaptureContext(
            self._schema,
            self._num_layers,
            prompt_ids,
            max_tokens,
            self._consumers,
            self.rules.projections.shapes,
            self.rules.max_request_bytes,
            self.rules.max_inline_bytes,
        )

    def close(self) -> None:
        self._dispatcher.shutdown()

    def _by_consumer(self, wish: CaptureRequestSpec, choice: str) -> Mapping[str, Any]:
        if not isinstance(wish, Capture):
            return {name: _renamed(spec, choice) for name, spec in wish.items()} if choice else wish
        if wish.returns in (None, "inline"):
            return {MEMORY: wish.to_json()}
        if self._consumers[FILES] is None:
            raise OptionError(
                f"capture.return is {wish.returns!r}, but this engine writes no files. "
                "Load it with capture_root=DIR, or leave 'return' out to get rows in output.acts."
            )
        fields = wish.to_json()
        fields["request_id"] = fields.get("request_id", uuid.uuid4().hex) + choice
        fields.setdefault("tag", "captures")
        return {FILES: fields}


def _renamed(spec: Any, choice: str) -> Any:
    """One consumer's part of the wire form, with a request id of its own."""
    if not isinstance(spec, Mapping) or not isinstance(spec.get("request_id"), str):
        return spec  # nothing to tell apart, or refused in a moment
    return {**spec, "request_id": spec["request_id"] + choice}


class DispatchSink:
    """Passes rows on as chunks of one request; `facts` go into its sidecar.

    Rows of many steps wait here until `patience` bytes of them have come: what crosses to another thread costs the
    engine a turn whatever its size, and a decoding step has a row for every site of every request."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        resolved: ResolvedCapture,
        prompt_len: int,
        facts: Mapping[str, Any],
        patience: int = 0,
    ):
        capture = resolved.capture
        self._dispatcher = dispatcher
        self._consumer = resolved.consumer
        self._prompt_len = prompt_len
        self._key = uuid.uuid4().hex
        self._tag = capture.tag or "captures"
        self._row_shape = {hook: row.shape for hook, row in resolved.rows.items()}
        self._sent: dict[Address, tuple[int, int]] = {}  # rows and steps so far
        self._waiting: dict[Address, list[tuple[StoredRows, SiteRows]]] = {}
        self._weight = 0
        self._patience = patience
        meta = {**facts, "capture_point": capture.capture_point, "prompt_len": prompt_len}
        if capture.streams is not None:
            meta["streams"] = list(capture.streams)
        request = CaptureRequest(self._key, capture.request_id or self._key, self._tag, capture.layout, meta)
        dispatcher.begin({self._consumer: request})

    def keep(self, address: Address, stored: StoredRows, rows: SiteRows) -> None:
        self._waiting.setdefault(address, []).append((stored, rows))
        self._weight += stored.values.nbytes + ROW_OVERHEAD * stored.values.shape[0]
        if self._weight >= self._patience:
            self._send()

    def end(self, finish_reason: str, missing: list[int], error: str | None) -> None:
        self._send()
        self._dispatcher.finish(self._key, finish_reason, self._prompt_len, error)

    def results(self, seconds: float = SECONDS_TO_DURABLE) -> dict[str, CaptureResult]:
        found = self._dispatcher.results(self._key, seconds)
        return {self._consumer: found[self._consumer]}

    def _send(self) -> None:
        waiting = self._waiting
        self._waiting = {}
        self._weight = 0
        for address, parts in waiting.items():
            self._dispatcher.submit(self._chunk(address, parts))

    def _chunk(self, address: Address, parts: list[tuple[StoredRows, SiteRows]]) -> Chunk:
        (hook, layer), (first, _) = address, parts[0]
        values, scale = first.values, first.scale
        if len(parts) > 1:
            values = torch.cat([stored.values for stored, _ in parts])
            scale = None if scale is None else torch.cat([s.scale for s, _ in parts if s.scale is not None])
        positions = tuple(position for _, rows in parts for position in rows.positions)
        token_ids = tuple(token for _, rows in parts for token in rows.token_ids)
        phases = "".join(PREFILL if position < self._prompt_len else DECODE for position in positions)
        placed = len(positions) == len(values)  # the mean of several tokens stands at none of them
        offset, step = self._sent.get(address, (0, 0))
        self._sent[address] = offset + len(values), step + len(parts)
        return Chunk(
            self._key,
            self._tag,
            hook,
            layer,
            values.flatten(1),
            first.dtype,
            self._row_shape[hook],
            positions if placed else None,
            token_ids if placed else None,
            phases if placed else None,
            offset,
            step,
            scale,
            num_steps=len(parts),
        )
