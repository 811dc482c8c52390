"""Messages between the dispatcher and a consumer: the start and the end of a request, and results by request key.

A failed capture never raises into the engine: the failure is part of its `CaptureResult`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from birkhoff.hooks.results import CaptureResult, Status

__all__ = [
    "KEPT_RESULTS",
    "NOT_REQUESTED",
    "CaptureFinish",
    "CaptureRequest",
    "CaptureResult",
    "Results",
    "Status",
    "done",
]


@dataclass(frozen=True)
class CaptureRequest:
    """The start of a request. `key` is unique in the process; `request_id` is the caller's name for the request."""

    key: str
    request_id: str
    tag: str
    layout: str | None = None
    # Keys: model, capture_hash, capture_point, prompt_len, ...
    meta: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)  # the consumer's own fields of the request


@dataclass(frozen=True)
class CaptureFinish:
    """The end of a request. `error` and `dropped_rows` describe losses before the rows reached the consumer."""

    key: str
    finish_reason: str | None = None
    prompt_len: int | None = None
    dropped_rows: int = 0
    error: str | None = None


NOT_REQUESTED = CaptureResult("not_requested")
KEPT_RESULTS = 4096


def done(result: CaptureResult) -> Future[CaptureResult]:
    """A future that already has its result."""
    future: Future[CaptureResult] = Future()
    future.set_result(result)
    return future


class Results:
    """Results by request key: `pending` after `begin`, then the result. The last `kept` results are remembered."""

    def __init__(self, kept: int = KEPT_RESULTS):
        self._kept = kept
        self._lock = threading.Lock()
        self._pending: set[str] = set()
        self._futures: OrderedDict[str, Future[CaptureResult]] = OrderedDict()

    def begin(self, key: str) -> None:
        with self._lock:
            self._pending.add(key)
            self._futures.pop(key, None)

    def put(self, key: str, future: Future[CaptureResult]) -> Future[CaptureResult]:
        with self._lock:
            self._pending.discard(key)
            self._futures[key] = future
            while len(self._futures) > self._kept and next(iter(self._futures.values())).done():
                self._futures.popitem(last=False)
        return future

    def get(self, key: str, timeout: float = 0) -> CaptureResult:
        """The result, or `pending` if it is not known after `timeout` seconds."""
        with self._lock:
            future = self._futures.get(key)
            pending = key in self._pending
        if future is None:
            return CaptureResult("pending") if pending else NOT_REQUESTED
        try:
            return future.result(timeout)
        except TimeoutError:
            return CaptureResult("pending")
