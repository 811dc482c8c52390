"""Consumer that passes rows on while the request runs: subscribers iterate over the chunks of one request or of all.

    stream = StreamConsumer()
    engine.add_consumer("live", stream)
    for chunk in stream.subscribe(): ...

A subscription has a bounded queue. If its reader is too slow, the oldest chunk is dropped and counted
(`subscription.dropped_rows`); with `overflow="block"` the writer thread waits instead, for at most `timeout_seconds`,
and the overload policy of the dispatcher applies. Without a subscriber rows are discarded, which is not a loss.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

from birkhoff.capture.sinks.chunk import Chunk
from birkhoff.capture.sinks.consumer import CountingConsumer, RequestCounts
from birkhoff.capture.sinks.result import CaptureFinish, CaptureResult
from birkhoff.option_checks import check_choice, check_int


class Subscription:
    """Iterator over chunks. It ends when the request finishes, or when the subscription or the consumer is closed."""

    def __init__(self, owner: StreamConsumer, request_id: str | None, depth: int):
        self._owner = owner
        self.request_id = request_id
        self._depth = depth
        self._chunks: deque[Chunk] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self.dropped_rows = 0

    def __iter__(self) -> Iterator[Chunk]:
        while (chunk := self.get()) is not None:
            yield chunk

    def get(self, timeout: float | None = None) -> Chunk | None:
        """The next chunk; None at the end. Raises TimeoutError if none arrives within `timeout` seconds."""
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


class StreamConsumer(CountingConsumer):
    """`depth` is the number of chunks a subscription can hold."""

    def __init__(self, depth: int = 64, overflow: str = "drop", timeout_seconds: float = 10.0):
        super().__init__()
        self._depth = check_int("depth", depth)
        self._block = check_choice("overflow", overflow, ("drop", "block")) == "block"
        self._timeout = timeout_seconds
        self._subscriptions: list[Subscription] = []
        self._closed = False

    def subscribe(self, request_id: str | None = None) -> Subscription:
        """Later chunks of the request that the caller named `request_id`, or of every request."""
        subscription = Subscription(self, request_id, self._depth)
        with self._lock:
            if self._closed:
                subscription.end()
            else:
                self._subscriptions.append(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        with self._lock:
            self._subscriptions = [other for other in self._subscriptions if other is not subscription]

    def submit_chunk(self, chunk: Chunk) -> None:
        with self._lock:
            counts = self._counts_of(chunk)
            counts.add(chunk)
            names = (None, counts.request.request_id)
            subscribers = [other for other in self._subscriptions if other.request_id in names]
        for subscription in subscribers:
            subscription.put(chunk, self._block, self._timeout)

    def finalize(self, finish: CaptureFinish) -> Future[CaptureResult]:
        with self._lock:
            counts = self._counts.get(finish.key)
            name = None if counts is None else counts.request.request_id
            ending = [other for other in self._subscriptions if name is not None and other.request_id == name]
            self._subscriptions = [other for other in self._subscriptions if other not in ending]
            if counts is not None:
                counts.dropped_rows = sum(subscription.dropped_rows for subscription in ending)
        for subscription in ending:
            subscription.end()
        return super().finalize(finish)

    def _result(self, finish: CaptureFinish, counts: RequestCounts) -> CaptureResult:
        if counts.dropped_rows and finish.error is None:
            dropped = finish.dropped_rows + counts.dropped_rows
            finish = replace(finish, error=f"{dropped} rows were dropped: the subscriber was too slow")
        return super()._result(finish, counts)

    def shutdown(self) -> None:
        with self._lock:
            self._closed = True
            ending = self._subscriptions
            self._subscriptions = []
        for subscription in ending:
            subscription.end()
