"""Bounded queues between the engine and the consumers. Nothing here raises into the engine's step.

Every consumer has its own queue and threads. A request is assigned to one thread, so its chunks are delivered in
order. A queue holds `queue_size` chunks in memory; the overload policy decides about further ones:

    block   the engine waits; every row is kept
    drop    the chunk is dropped and counted, by request and in total
    spill   the chunk is stored on disk, at its place in the queue, up to `spill_max_bytes`; then as block

`submit` and `finish` never raise: a failure becomes the result of the request at that consumer and does not affect
other consumers or requests.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from birkhoff.capture.sinks.chunk import Chunk
from birkhoff.capture.sinks.consumer import Consumer
from birkhoff.capture.sinks.result import KEPT_RESULTS, CaptureFinish, CaptureRequest, CaptureResult, Results
from birkhoff.capture.sinks.spill_queue import Spill, Spilled
from birkhoff.capture.store.disk import Disk
from birkhoff.errors import CaptureError, OptionError, quoted
from birkhoff.option_checks import check_int

POLICIES = ("block", "drop", "spill")

log = logging.getLogger(__name__)

Item = CaptureRequest | Chunk | Spilled | CaptureFinish


@dataclass
class Counters:
    """Counters of one queue. Every submitted row is delivered, dropped or queued."""

    submitted_rows: int = 0
    delivered_rows: int = 0
    dropped_rows: int = 0
    spilled_chunks: int = 0
    blocked_seconds: float = 0.0


@dataclass(eq=False)
class _ThreadQueue:
    """Items for one thread, with its own condition: waking other threads would cost the engine time."""

    ready: threading.Condition
    items: deque[tuple[str, Item]] = field(default_factory=deque)


@dataclass(eq=False)
class _OpenRequest:
    """One request in one queue; `thread` delivers its items."""

    thread: _ThreadQueue
    promise: Future[CaptureResult] = field(default_factory=Future)
    dropped_rows: int = 0
    lost_rows: int = 0  # left the queue after the consumer had failed
    error: str | None = None


class ConsumerQueue:
    """The queue and the threads of one consumer."""

    def __init__(
        self,
        name: str,
        consumer: Consumer,
        queue_size: int,
        policy: str,
        spill: Spill,
        kept_results: int = KEPT_RESULTS,
    ):
        self.name = name
        self.consumer = consumer
        self.counters = Counters()
        self._limit = queue_size
        self._policy = policy
        self._spill = spill
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self._in_memory = 0
        self._closing = False
        self._open_requests: dict[str, _OpenRequest] = {}
        self.results = Results(kept_results)
        self._queues = [_ThreadQueue(threading.Condition(self._lock)) for _ in range(consumer.writer_threads)]
        self._turns = itertools.cycle(self._queues)
        self._threads = [
            threading.Thread(target=self._run, args=(queue,), name=f"capture-{name}-{number}", daemon=True)
            for number, queue in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, request: CaptureRequest) -> None:
        with self._lock:
            open_request = self._open_requests[request.key] = _OpenRequest(next(self._turns))
            self.results.put(request.key, open_request.promise)
            self._append(request.key, request)

    def put(self, chunk: Chunk) -> None:
        key = chunk.request_id
        with self._lock:
            self.counters.submitted_rows += chunk.num_rows
            if self._closing:
                return self._drop(key, chunk, "the capture was shut down")
            if self._in_memory < self._limit:
                return self._append(key, chunk)
            if self._policy == "drop":
                return self._drop(key, chunk, None)
        # The chunks of a request are submitted by one thread, so releasing the lock here cannot reorder them.
        spilled = self._spill.put(chunk) if self._policy == "spill" else None
        with self._lock:
            if spilled is not None:
                self.counters.spilled_chunks += 1
                return self._append(key, spilled)
            started = time.monotonic()
            self._room.wait_for(lambda: self._in_memory < self._limit or self._closing)
            self.counters.blocked_seconds += time.monotonic() - started
            if self._closing:
                return self._drop(key, chunk, "the capture was shut down")
            return self._append(key, chunk)

    def fail(self, key: str, rows: int, error: str) -> None:
        """Count rows of a request that could not be queued."""
        with self._lock:
            self.counters.submitted_rows += rows
            self.counters.dropped_rows += rows
            if key in self._open_requests:
                self._open_requests[key].dropped_rows += rows
                self._open_requests[key].error = self._open_requests[key].error or error

    def finish(self, finish: CaptureFinish) -> None:
        with self._lock:
            if finish.key in self._open_requests:
                self._append(finish.key, finish)

    def close(self) -> None:
        """Deliver what is queued, then shut the consumer down."""
        with self._lock:
            self._closing = True
            self._room.notify_all()
            for queue in self._queues:
                queue.ready.notify_all()
        for thread in self._threads:
            thread.join()
        try:
            self.consumer.shutdown()
        except Exception:
            log.exception("capture consumer %s did not shut down", self.name)

    @property
    def depth(self) -> int:
        """Number of queued chunks, in memory or on disk."""
        with self._lock:
            return sum(
                isinstance(item, (Chunk, Spilled)) for queue in self._queues for _, item in queue.items
            )

    def _append(self, key: str, item: Item) -> None:
        self._in_memory += isinstance(item, Chunk)
        queue = self._open_requests[key].thread
        queue.items.append((key, item))
        queue.ready.notify()

    def _drop(self, key: str, chunk: Chunk, error: str | None) -> None:
        self.counters.dropped_rows += chunk.num_rows
        open_request = self._open_requests.get(key)
        if open_request is not None:
            open_request.dropped_rows += chunk.num_rows
            open_request.error = open_request.error or error

    def _run(self, queue: _ThreadQueue) -> None:
        while True:
            with self._lock:
                queue.ready.wait_for(lambda: queue.items or self._closing)
                if not queue.items:
                    return
                key, item = queue.items.popleft()
                self._in_memory -= isinstance(item, Chunk)
                open_request = self._open_requests[key]
                self._room.notify_all()
            try:
                self._deliver(open_request, item)
            except Exception as error:
                self._record_failure(open_request, item, error)

    def _deliver(self, open_request: _OpenRequest, item: Item) -> None:
        if isinstance(item, CaptureRequest):
            self.consumer.begin(item)
        elif isinstance(item, CaptureFinish):
            self._finalize(open_request, item)
        elif open_request.lost_rows:
            rows = item.num_rows
            if isinstance(item, Spilled):
                self._spill.take(item)
            self._count_lost(open_request, rows)
        else:
            chunk = self._spill.take(item) if isinstance(item, Spilled) else item
            self.consumer.submit_chunk(chunk)
            with self._lock:
                self.counters.delivered_rows += chunk.num_rows

    def _record_failure(self, open_request: _OpenRequest, item: Item, error: Exception) -> None:
        """Record an exception of the consumer: later rows of the request are not delivered."""
        text = _error_text(error)
        log.warning("capture consumer %s failed: %s", self.name, text)
        open_request.error = open_request.error or text
        if isinstance(item, CaptureFinish):
            self._resolve(item.key, open_request, CaptureResult("error", error=text))
        else:
            self._count_lost(open_request, 1 if isinstance(item, CaptureRequest) else item.num_rows)

    def _count_lost(self, open_request: _OpenRequest, rows: int) -> None:
        with self._lock:
            open_request.lost_rows += rows
            self.counters.dropped_rows += rows

    def _finalize(self, open_request: _OpenRequest, finish: CaptureFinish) -> None:
        with self._lock:
            lost = open_request.dropped_rows + open_request.lost_rows
            error = finish.error or open_request.error
        finish_with_losses = CaptureFinish(finish.key, finish.finish_reason, finish.prompt_len, lost, error)

        def settled(future: Future[CaptureResult]) -> None:
            failed = future.exception()
            result = (
                CaptureResult("error", error=_error_text(failed)) if failed is not None else future.result()
            )
            self._resolve(finish.key, open_request, result.with_losses(lost, error))

        self.consumer.finalize(finish_with_losses).add_done_callback(settled)

    def _resolve(self, key: str, open_request: _OpenRequest, result: CaptureResult) -> None:
        with self._lock:
            if self._open_requests.get(key) is open_request:
                del self._open_requests[key]
        if not open_request.promise.done():
            open_request.promise.set_result(result)


class Dispatcher:
    """Distributes chunks to consumers and collects results. `consumers` are instances by name."""

    def __init__(
        self,
        consumers: Mapping[str, Consumer],
        *,
        queue_size: int = 256,
        overload_policy: str = "spill",
        spill_dir: str | None = None,
        spill_max_bytes: int = 4 << 30,
        disk: Disk | None = None,
        kept_results: int = KEPT_RESULTS,
    ):
        if overload_policy not in POLICIES:
            raise OptionError(
                f"overload_policy is {quoted(overload_policy)}, expected one of {', '.join(POLICIES)}."
            )
        for name, value, lowest in (("queue_size", queue_size, 1), ("spill_max_bytes", spill_max_bytes, 0)):
            check_int(name, value, lowest)
        self._spill = Spill(spill_dir, spill_max_bytes, disk)
        self._queue_size = queue_size
        self._policy = overload_policy
        self._kept_results = kept_results
        self.queues: dict[str, ConsumerQueue] = {}
        self._lock = threading.Lock()
        self._open: dict[str, ConsumerQueue] = {}  # by key of an open request
        self._closed = False
        for name, consumer in consumers.items():
            self.add(name, consumer)

    def add(self, name: str, consumer: Consumer) -> None:
        """Add a consumer for requests that begin later."""
        with self._lock:
            if self._closed or name in self.queues:
                why = "the capture is shut down" if self._closed else "there is one of this name"
                raise CaptureError(f"consumer {quoted(name)} cannot be added: {why}.")
            queue = ConsumerQueue(
                name, consumer, self._queue_size, self._policy, self._spill, self._kept_results
            )
            self.queues = {**self.queues, name: queue}  # a new mapping, so that concurrent iteration is safe

    def begin(self, consumer: str, request: CaptureRequest) -> None:
        """Announce a request to a consumer. Raises if the key is in use or the consumer is unknown."""
        if consumer not in self.queues:
            raise CaptureError(
                f"there is no consumer {quoted(consumer)}, expected one of: {', '.join(sorted(self.queues)) or 'none'}."
            )
        with self._lock:
            if self._closed:
                raise CaptureError("the capture is shut down. Start another engine.")
            if request.key in self._open:
                raise CaptureError(
                    f"request {quoted(request.key)} is being captured already. Give every request its own key."
                )
            self._open[request.key] = self.queues[consumer]
        self.queues[consumer].begin(request)

    def submit(self, chunk: Chunk) -> None:
        """Queue a chunk for the consumer of its request; ignored after a shutdown, while the engine may still run."""
        queue = self._open.get(chunk.request_id)
        if queue is None:
            return
        try:
            chunk.check()
            queue.put(chunk)
        except Exception as error:
            log.warning("a chunk of %s was not captured: %s", quoted(chunk.request_id), error)
            queue.fail(chunk.request_id, _rows(chunk), _error_text(error))

    def finish(
        self,
        key: str,
        finish_reason: str | None = None,
        prompt_len: int | None = None,
        error: str | None = None,
    ) -> None:
        """Mark the end of a request. Does not wait."""
        with self._lock:
            queue = self._open.pop(key, None)
        if queue is not None:
            queue.finish(CaptureFinish(key, finish_reason, prompt_len, 0, error))

    def result(self, key: str, consumer: str, timeout: float = 0) -> CaptureResult:
        """The result of a request at its consumer, `pending` if it is not known after `timeout` seconds."""
        return self.queues[consumer].results.get(key, timeout)

    def shutdown(self) -> None:
        """Deliver what is queued, finish open requests, and shut all consumers down."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            unfinished = list(self._open)
        for key in unfinished:
            self.finish(key, error="the capture was shut down before the request finished")
        for queue in self.queues.values():
            queue.close()
        self._spill.close()

    def __enter__(self) -> Dispatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _error_text(error: BaseException) -> str:
    """The text of an error in a result; errors of other packages include their class name."""
    return str(error) if isinstance(error, CaptureError) else f"{type(error).__name__}: {error}"


def _rows(chunk: Chunk) -> int:
    try:
        return chunk.num_rows
    except (AttributeError, IndexError, TypeError, ValueError):
        return 0
