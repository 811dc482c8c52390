"""The sink of captures that go to a consumer: buffers the rows of one request and submits them as chunks."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from birkhoff.capture.sinks.captured_rows import Acts
from birkhoff.capture.sinks.chunk import DECODE, PREFILL, Chunk
from birkhoff.capture.sinks.dispatcher import Dispatcher
from birkhoff.capture.sinks.pinned_copy import PinnedCopy
from birkhoff.capture.sinks.result import CaptureRequest, CaptureResult
from birkhoff.capture.spec.request import ResolvedCapture
from birkhoff.errors import CaptureError
from birkhoff.hooks.plan import SiteRows
from birkhoff.hooks.site_names import Address

ROW_OVERHEAD = 64  # approximate bytes for the labels of a buffered row


class DispatchSink:
    """Sends the rows of one request to a consumer, as chunks; `meta` is written to its sidecar.

    Rows are buffered until they take `buffer_bytes`: passing a chunk to another thread has a fixed cost for the engine,
    and a decode step has one row per site and request.
    """

    in_memory = False

    def __init__(
        self,
        dispatcher: Dispatcher,
        resolved: ResolvedCapture,
        prompt_len: int,
        meta: Mapping[str, Any],
        buffer_bytes: int = 0,
        parameters: Mapping[str, Any] | None = None,
        pinned_copy: PinnedCopy | None = None,
    ):
        capture = resolved.capture
        self._pinned_copy = pinned_copy or PinnedCopy()
        self._dispatcher = dispatcher
        self._consumer = resolved.consumer
        self._prompt_len = prompt_len
        self._key = uuid.uuid4().hex
        self._tag = capture.tag or "captures"
        self._rows = resolved.rows
        self._sent: dict[Address, tuple[int, int]] = {}  # rows and steps sent so far
        self._buffered: dict[Address, list[SiteRows]] = {}
        self._nbytes = 0
        self._buffer_bytes = buffer_bytes
        meta = {**meta, "capture_point": capture.capture_point, "prompt_len": prompt_len}
        if capture.streams is not None:
            meta["streams"] = list(capture.streams)
        request_id = capture.request_id or self._key
        self._request = CaptureRequest(
            self._key, request_id, self._tag, capture.layout, meta, parameters or {}
        )

    def open(self) -> None:
        self._dispatcher.begin(self._consumer, self._request)

    def append(self, rows: SiteRows) -> None:
        rows = self._pinned_copy(rows)
        self._buffered.setdefault((rows.hook, rows.layer), []).append(rows)
        self._nbytes += rows.tensor.nbytes + ROW_OVERHEAD * len(rows)
        if self._nbytes >= self._buffer_bytes:
            self._flush()

    def close(self, finish_reason: str, missing: list[int], error: str | None) -> None:
        self._flush()
        self._dispatcher.finish(self._key, finish_reason, self._prompt_len, error)

    def rows(self) -> Acts:
        raise CaptureError(f"the rows went to {self._consumer!r}, not to memory.")

    def result(self, timeout: float) -> CaptureResult:
        return self._dispatcher.result(self._key, self._consumer, timeout)

    def _flush(self) -> None:
        buffered = self._buffered
        self._buffered = {}
        self._nbytes = 0
        for address, parts in buffered.items():
            self._dispatcher.submit(self._chunk(address, parts))

    def _chunk(self, address: Address, parts: list[SiteRows]) -> Chunk:
        hook, layer = address
        rows = parts[0] if len(parts) == 1 else SiteRows.concatenate(parts)
        phases = "".join(PREFILL if position < self._prompt_len else DECODE for position in rows.positions)
        labelled = len(rows.positions) == len(rows)  # the mean of several tokens has no position
        offset, step = self._sent.get(address, (0, 0))
        self._sent[address] = offset + len(rows), step + len(parts)
        return Chunk(
            self._key,
            self._tag,
            hook,
            layer,
            rows.tensor.flatten(1),
            self._rows[hook].dtype,
            self._rows[hook].shape,
            rows.positions if labelled else None,
            rows.token_ids if labelled else None,
            phases if labelled else None,
            offset,
            step,
            rows.scale,
            num_steps=len(parts),
            ready=rows.ready,
        )
