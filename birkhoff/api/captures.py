"""Captures of an engine: who keeps which rows, and what became of them.

Rows go to memory (`output.acts`) unless a capture says `returns="file"` (or the wire form names a consumer): then they
go through the dispatcher to the consumers this engine was loaded with, and `output.capture_results` says, per consumer,
whether they are durable.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from birkhoff.capture.checks import ConsumerRules, Facts
from birkhoff.capture.chunk import DECODE, PREFILL, Chunk
from birkhoff.capture.consumers.filesystem import FilesystemConsumer
from birkhoff.capture.dispatch import Dispatcher
from birkhoff.capture.job import CaptureJob, MemoryKeeper
from birkhoff.capture.reduce import Stored
from birkhoff.capture.result import KEPT_RESULTS, CaptureRequest, CaptureResult
from birkhoff.capture.spec import Capture, ResolvedCapture, resolve_capture_request
from birkhoff.errors import OptionError
from birkhoff.hooks.names import Address
from birkhoff.hooks.plan import Plan, Rows
from birkhoff.hooks.schema import HookSchema

CaptureWish = Capture | Mapping[str, Any]  # a Capture, or the wire form keyed by consumer
MEMORY, FILES = "memory", "filesystem"
SECONDS_TO_DURABLE = 30.0


class CaptureDesk:
    """Turns wishes into plans and plans into results, for one engine."""

    def __init__(
        self, schema: Mapping[str, HookSchema], num_layers: int, model: str, root: str | Path | None = None,
        overload_policy: str = "spill", kept_results: int = KEPT_RESULTS,
    ):  # fmt: skip
        self._schema, self._num_layers, self._model = schema, num_layers, model
        self._rules: dict[str, ConsumerRules | None] = {MEMORY: ConsumerRules(), FILES: None}
        self._dispatcher: Dispatcher | None = None
        if root is not None:
            self._rules[FILES] = ConsumerRules(needs_ids=True, returns="file")
            files = FilesystemConsumer(str(root), kept_results=kept_results)
            self._dispatcher = Dispatcher({FILES: files}, overload_policy=overload_policy, kept_results=kept_results)

    def plan(self, wish: CaptureWish, prompt_ids: tuple[int, ...], max_tokens: int, choice: str = "") -> Plan:
        """One request's plan. `choice` keeps the file names of several prompts or answers apart."""
        facts = Facts(self._schema, self._num_layers, prompt_ids, max_tokens, self._rules)
        named = self._by_consumer(wish, choice)
        jobs = []
        for consumer, resolved in resolve_capture_request(named, facts).items():
            keeper = MemoryKeeper(resolved) if consumer == MEMORY else self._file_keeper(resolved, len(prompt_ids))
            jobs.append(CaptureJob(resolved, keeper))
        return Plan(tuple(jobs))

    def close(self) -> None:
        if self._dispatcher is not None:
            self._dispatcher.shutdown()

    def _by_consumer(self, wish: CaptureWish, choice: str) -> Mapping[str, Any]:
        if not isinstance(wish, Capture):
            return wish
        if wish.returns in (None, "inline"):
            return {MEMORY: wish.to_json()}
        if self._dispatcher is None:
            raise OptionError(
                f"capture.return is {wish.returns!r}, but this engine writes no files. "
                "Load it with capture_root=DIR, or leave 'return' out to get rows in output.acts."
            )
        fields = wish.to_json()
        fields["request_id"] = fields.get("request_id", uuid.uuid4().hex) + choice
        fields.setdefault("tag", "captures")
        return {FILES: fields}

    def _file_keeper(self, resolved: ResolvedCapture, prompt_len: int) -> DispatchKeeper:
        assert self._dispatcher is not None
        return DispatchKeeper(self._dispatcher, resolved, prompt_len, self._model)


class DispatchKeeper:
    """Passes rows on as chunks of one request."""

    def __init__(self, dispatcher: Dispatcher, resolved: ResolvedCapture, prompt_len: int, model: str):
        capture = resolved.capture
        self._dispatcher, self._consumer, self._prompt_len = dispatcher, resolved.consumer, prompt_len
        self._key, self._tag = uuid.uuid4().hex, capture.tag or "captures"
        self._row_shape = {hook: row.shape for hook, row in resolved.rows.items()}
        self._kept: dict[Address, int] = {}
        self._steps = 0
        meta = {"model": model, "capture_point": capture.capture_point, "prompt_len": prompt_len}
        request = CaptureRequest(self._key, capture.request_id or self._key, self._tag, capture.layout, meta)
        dispatcher.begin({self._consumer: request})

    def keep(self, address: Address, stored: Stored, rows: Rows) -> None:
        hook, layer = address
        count = stored.values.shape[0]
        placed = len(rows.positions) == count  # the mean of several tokens stands at none of them
        sides = "".join(PREFILL if position < self._prompt_len else DECODE for position in rows.positions)
        positions, token_ids, phases = (rows.positions, rows.token_ids, sides) if placed else (None, None, None)
        chunk = Chunk(
            self._key, self._tag, hook, layer, stored.values.flatten(1), stored.dtype, self._row_shape[hook],
            positions, token_ids, phases, self._kept.get(address, 0), self._steps, stored.scale,
        )  # fmt: skip
        self._kept[address] = self._kept.get(address, 0) + count
        self._steps += 1
        self._dispatcher.submit(chunk)

    def end(self, finish_reason: str, missing: list[int], error: str | None) -> None:
        self._dispatcher.finish(self._key, finish_reason, self._prompt_len, error)

    def results(self) -> dict[str, CaptureResult]:
        found = self._dispatcher.results(self._key, SECONDS_TO_DURABLE)
        return {self._consumer: found[self._consumer]}
