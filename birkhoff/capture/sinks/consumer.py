"""The interface of a consumer of captured rows: the calls of the dispatcher, in their order.

    begin(request)          once, before the first chunk of a request
    submit_chunk(chunk)     any number of times, in the order the rows were computed
    finalize(finish)        once; the future is done when the consumer can guarantee what its result states
    get_result(key)         at any time after
    shutdown()              once, after everything else

Calls for one request come from one thread; calls for different requests may overlap if `writer_threads` is above one.
A consumer may raise: the dispatcher turns the exception into the request's result. `reads_client_spec` states whether
requests can name the consumer; `validate_client_spec` may then refuse a request. A consumer with parameters of its own
names them in an attribute `client_parameters`: a request gives them beside `hooks` and `positions`, and they reach
`validate_client_spec` with the other fields and `begin` as `request.parameters`. A consumer with a
`global_capture_spec` receives rows of every request, whether or not requests can name it. A consumer that is better
served in large pieces has an attribute `buffer_bytes`: rows are collected until they take that many bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from birkhoff.capture.sinks.chunk import Chunk
from birkhoff.capture.sinks.result import (
    NOT_REQUESTED,
    CaptureFinish,
    CaptureRequest,
    CaptureResult,
    Results,
    done,
)
from birkhoff.hooks.site_names import Address


@runtime_checkable
class Consumer(Protocol):
    reads_client_spec: bool
    writer_threads: int

    def global_capture_spec(self) -> Mapping[str, Any] | None: ...
    def validate_client_spec(self, spec: Mapping[str, Any], path: str) -> None: ...
    def begin(self, request: CaptureRequest) -> None: ...
    def submit_chunk(self, chunk: Chunk) -> None: ...
    def finalize(self, finish: CaptureFinish) -> Future[CaptureResult]: ...
    def get_result(self, key: str) -> CaptureResult: ...
    def shutdown(self) -> None: ...


@dataclass(eq=False)
class RequestCounts:
    """What a consumer received of one request."""

    request: CaptureRequest
    rows: int = 0
    nbytes: int = 0
    dropped_rows: int = 0  # by the consumer itself
    keys: set[Address] = field(default_factory=set)

    def add(self, chunk: Chunk) -> None:
        self.rows += chunk.num_rows
        self.nbytes += chunk.nbytes
        self.keys.add((chunk.hook, chunk.layer))


class CountingConsumer:
    """Base of consumers that store nothing: counts rows and bytes per request and derives the result from them."""

    reads_client_spec = True
    client_parameters: tuple[str, ...] = ()
    writer_threads = 1

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, RequestCounts] = {}
        self._results = Results()

    def global_capture_spec(self) -> Mapping[str, Any] | None:
        return None

    def validate_client_spec(self, spec: Mapping[str, Any], path: str) -> None:
        pass

    def begin(self, request: CaptureRequest) -> None:
        self._results.begin(request.key)
        with self._lock:
            self._counts[request.key] = RequestCounts(request)

    def submit_chunk(self, chunk: Chunk) -> None:
        with self._lock:
            self._counts_of(chunk).add(chunk)

    def finalize(self, finish: CaptureFinish) -> Future[CaptureResult]:
        with self._lock:
            counts = self._counts.pop(finish.key, None)
        if counts is None:
            return done(NOT_REQUESTED)
        return self._results.put(finish.key, done(self._result(finish, counts)))

    def get_result(self, key: str) -> CaptureResult:
        return self._results.get(key)

    def shutdown(self) -> None:
        pass

    def _counts_of(self, chunk: Chunk) -> RequestCounts:
        """The counts of a chunk's request, which may begin with its first chunk. The caller holds the lock."""
        key = chunk.request_id
        if key not in self._counts:
            self._counts[key] = RequestCounts(CaptureRequest(key, key, chunk.tag))
        return self._counts[key]

    def _result(self, finish: CaptureFinish, counts: RequestCounts) -> CaptureResult:
        result = CaptureResult(
            "ok", counts.request.request_id, None, counts.rows, counts.nbytes, len(counts.keys)
        )
        return result.with_losses(finish.dropped_rows + counts.dropped_rows, finish.error)
