"""The consumer that hands rows on while they are made: subscribers iterate over chunks of one request or of all.

A subscription has a queue of bounded length. When its reader is too slow the oldest chunk is thrown away and counted
(`subscription.dropped_rows`), because a live view wants what is new; with `overflow="block"` the writer thread waits
instead, for at most `timeout_seconds`, and the dispatcher's own policy takes over from there. Without a subscriber rows
go nowhere, and that is not a loss.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from birkhoff.capture.sinks.chunk import Chunk
from birkhoff.capture.sinks.consumer import Location
from birkhoff.capture.sinks.result import (
    NOT_REQUESTED,
    CaptureFinish,
    CaptureRequest,
    CaptureResult,
    Results,
    done,
)
from birkhoff.errors import OptionError, quoted


class Subscription:
    """Iterate to get chunks; the iteration ends when the request finishes, or when either side closes."""

    def __init__(self, owner: StreamConsumer, key: str | None, depth: int):
        self._owner = owner
        self.key = key
        self._depth = depth
        self._chunks: deque[Chunk] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self.dropped_rows = 0

    def __iter__(self) -> Iterator[Chunk]:
        while (chunk := self.get()) is not None:
            yield chunk

    def get(self, timeout: float | None = None) -> Chunk | None:
        """The next chunk; None at the end. Raises TimeoutError when nothing came in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._chunks or self._ended, timeout):
                raise TimeoutError("no chunk came in time")
            if not self._chunks:
                return None
            chunk = self._chunks.popleft()
            self._changed.notify_all()
            return chunk

    def close(self) -> None:
        self._owner.unsubscribe(self)
        self.end()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def put(self, chunk: Chunk, block: bool, timeout: float) -> None:
        with self._changed:
            if block:
                self._changed.wait_for(lambda: len(self._chunks) < self._depth or self._ended, timeout)
            if self._ended:
                return
            while len(self._chunks) >= self._depth:
                self.dropped_rows += self._chunks.popleft().num_rows
            self._chunks.append(chunk)
            self._changed.notify_all()


class StreamConsumer:
    location: Location = "worker"
    reads_client_spec = True
    writer_threads = 1

    def __init__(self, depth: int = 64, overflow: str = "drop", timeout_seconds: float = 10.0):
        if type(depth) is not int or depth < 1:
            raise OptionError(f"depth is {quoted(depth)}, expected a whole number from 1 up.")
        if overflow not in ("drop", "block"):
            raise OptionError(f"overflow is {quoted(overflow)}, expected drop or block.")
        self._depth = depth
        self._block = overflow == "block"
        self._timeout = timeout_seconds
        self._lock = threading.Lock()
        self._subscriptions: list[Subscription] = []
        self._rows: dict[str, tuple[int, int, set[tuple[int, str]]]] = {}
        self._results = Results()
        self._closed = False

    def subscribe(self, key: str | None = None) -> Subscription:
        """Chunks from now on: of one request, by the engine's key, or of every request."""
        subscription = Subscription(self, key, self._depth)
        with self._lock:
            if self._closed:
                subscription.end()
            else:
                self._subscriptions.append(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        with self._lock:
            self._subscriptions = [other for other in self._subscriptions if other is not subscription]

    def global_capture_spec(self) -> Mapping[str, Any] | None:
        return None

    def validate_client_spec(self, spec: Mapping[str, Any], path: str) -> None:
        pass

    def begin(self, request: CaptureRequest) -> None:
        self._results.begin(request.key)
        with self._lock:
            self._rows[request.key] = (0, 0, set())

    def submit_chunk(self, chunk: Chunk) -> None:
        with self._lock:
            rows, nbytes, keys = self._rows.get(chunk.request_id, (0, 0, set()))
            keys.add((chunk.layer, chunk.hook))
            self._rows[chunk.request_id] = (rows + chunk.num_rows, nbytes + chunk.nbytes, keys)
            listeners = [other for other in self._subscriptions if other.key in (None, chunk.request_id)]
        for subscription in listeners:
            subscription.put(chunk, self._block, self._timeout)

    def finalize(self, finish: CaptureFinish) -> Future[CaptureResult]:
        with self._lock:
            seen = self._rows.pop(finish.key, None)
            ending = [other for other in self._subscriptions if other.key == finish.key]
            self._subscriptions = [other for other in self._subscriptions if other.key != finish.key]
        for subscription in ending:
            subscription.end()
        if seen is None:
            return done(NOT_REQUESTED)
        rows, nbytes, keys = seen
        lost = finish.dropped_rows + sum(subscription.dropped_rows for subscription in ending)
        error = finish.error or (f"{lost} rows were dropped: the subscriber was too slow" if lost else None)
        result = CaptureResult("ok", finish.key, None, rows, nbytes, len(keys)).with_losses(lost, error)
        return self._results.put(finish.key, done(result))

    def get_result(self, key: str) -> CaptureResult:
        return self._results.get(key)

    def shutdown(self) -> None:
        with self._lock:
            self._closed = True
            ending = self._subscriptions
            self._subscriptions = []
        for subscription in ending:
            subscription.end()
