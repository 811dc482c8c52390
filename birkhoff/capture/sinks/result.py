"""What becomes of one request's capture at one consumer, and how the consumer is told about the request.

`ok` means that every row is where the consumer promises to keep it: for files, on the disk and there after a power cut
(`durable` is False when syncing was switched off). Rows that were dropped make `partial_error`; a capture that is not
there at all is `error`. Paths are relative to the capture root. A failed capture never raises into the engine: it ends
here.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Status = Literal["pending", "ok", "partial_error", "error", "not_requested"]


@dataclass(frozen=True)
class CaptureRequest:
    """One request as one consumer sees it. `key` is the engine's name for it, `request_id` the caller's."""

    key: str
    request_id: str
    tag: str
    layout: str | None = None
    meta: Mapping[str, Any] = field(
        default_factory=dict
    )  # model, steering_hash, capture_point, prompt_len, ...


@dataclass(frozen=True)
class CaptureFinish:
    """How a request ended. `error` and `dropped_rows` are what went wrong before the consumer was reached."""

    key: str
    finish_reason: str | None = None
    prompt_len: int | None = None
    dropped_rows: int = 0
    error: str | None = None


@dataclass(frozen=True)
class CaptureResult:
    status: Status
    id: str = ""
    error: str | None = None
    rows: int = 0
    bytes: int = 0
    keys: int = 0  # distinct (layer, hook)
    dropped_rows: int = 0
    paths: tuple[str, ...] = ()
    sha256: Mapping[str, str] = field(default_factory=dict)  # per path, of this request's bytes in file order
    durable: bool = False

    @property
    def finished(self) -> bool:
        return self.status != "pending"

    def with_losses(self, dropped_rows: int, error: str | None) -> CaptureResult:
        """The same result when rows were lost before they reached the consumer."""
        if not (dropped_rows or error) or self.status == "error":
            return self
        error = error or f"{dropped_rows} rows were dropped: the capture queue was full"
        return replace(self, status="partial_error", error=error, dropped_rows=dropped_rows)

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "id": self.id,
            "error": self.error,
            "rows": self.rows,
            "bytes": self.bytes,
            "keys": self.keys,
            "dropped_rows": self.dropped_rows,
            "paths": list(self.paths),
            "sha256": dict(self.sha256),
            "durable": self.durable,
        }


NOT_REQUESTED = CaptureResult("not_requested")
KEPT_RESULTS = 4096


def done(result: CaptureResult) -> Future[CaptureResult]:
    """A result that nobody has to wait for."""
    future: Future[CaptureResult] = Future()
    future.set_result(result)
    return future


class Results:
    """Answers by request key: `pending` from `begin` on, then the result, kept for the last few thousand requests."""

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
        """The result, or `pending` when it is not there after `timeout` seconds."""
        with self._lock:
            future = self._futures.get(key)
            pending = key in self._pending
        if future is None:
            return CaptureResult("pending") if pending else NOT_REQUESTED
        try:
            return future.result(timeout)
        except TimeoutError:
            return CaptureResult("pending")
