"""Between the engine's step and the consumers: queues that are bounded, ordered and never raise.

Every consumer has a lane: its own queue and its own threads. A request belongs to one thread of a lane, so its chunks
arrive in the order they were made. A lane holds `queue_size` chunks in memory; what happens to the next one is the
overload policy:

    block   the engine waits; every row is kept
    drop    the chunk is thrown away and counted, by request and in total
    spill   the chunk waits on disk, in its place in the queue, up to `spill_max_bytes`; then as block

`submit` and `finish` never raise: whatever goes wrong becomes the result of the request at that consumer, and the other
consumers and requests do not notice.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterable, Mapping
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
    """What a lane has seen. Every submitted row is delivered, dropped or still waiting."""

    submitted_rows: int = 0
    delivered_rows: int = 0
    dropped_chunks: int = 0
    dropped_rows: int = 0
    spilled_chunks: int = 0
    spilled_bytes: int = 0
    blocked_seconds: float = 0.0
    failed_requests: int = 0


@dataclass(eq=False)
class _OpenRequest:
    """One request in one lane."""

    promise: Future[CaptureResult] = field(default_factory=Future)
    dropped_rows: int = 0
    lost_rows: int = 0  # came through the queue, and the consumer had failed
    error: str | None = None


@dataclass(eq=False)
class _ThreadQueue:
    """What waits for one thread; others are not woken for it, because each waking costs the engine a turn."""

    ready: threading.Condition
    items: deque[tuple[str, Item]] = field(default_factory=deque)


class ConsumerQueue:
    """The queue and threads in front of one consumer."""

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
        self._tickets: dict[str, _OpenRequest] = {}
        self.results = Results(kept_results)
        self._queues = [_ThreadQueue(threading.Condition(self._lock)) for _ in range(consumer.writer_threads)]
        self._threads = [
            threading.Thread(target=self._run, args=(queue,), name=f"capture-{name}-{number}", daemon=True)
            for number, queue in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, request: CaptureRequest) -> None:
        with self._lock:
            ticket = self._tickets[request.key] = _OpenRequest()
            self.results.put(request.key, ticket.promise)
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
        # One thread submits the chunks of a request, so leaving the lock here cannot change their order.
        spilled = self._spill.put(chunk) if self._policy == "spill" else None
        with self._lock:
            if spilled is not None:
                self.counters.spilled_chunks += 1
                self.counters.spilled_bytes += spilled.nbytes
                return self._append(key, spilled)
            started = time.monotonic()
            self._room.wait_for(lambda: self._in_memory < self._limit or self._closing)
            self.counters.blocked_seconds += time.monotonic() - started
            if self._closing:
                return self._drop(key, chunk, "the capture was shut down")
            return self._append(key, chunk)

    def fail(self, key: str, rows: int, error: str) -> None:
        """Rows of a request that could not even be queued."""
        with self._lock:
            self.counters.submitted_rows += rows
            self.counters.dropped_rows += rows
            self.counters.dropped_chunks += 1
            if key in self._tickets:
                self._tickets[key].dropped_rows += rows
                self._tickets[key].error = self._tickets[key].error or error

    def finish(self, finish: CaptureFinish) -> None:
        with self._lock:
            if finish.key in self._tickets:
                self._append(finish.key, finish)

    def close(self) -> None:
        """Let the queue run empty, then stop the consumer."""
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
        """Chunks that wait, in memory or on disk."""
        with self._lock:
            return sum(
                isinstance(item, (Chunk, Spilled)) for queue in self._queues for _, item in queue.items
            )

    def _append(self, key: str, item: Item) -> None:
        self._in_memory += isinstance(item, Chunk)
        queue = self._queues[zlib.crc32(key.encode("utf-8", "surrogatepass")) % len(self._queues)]
        queue.items.append((key, item))
        queue.ready.notify()

    def _drop(self, key: str, chunk: Chunk, error: str | None) -> None:
        self.counters.dropped_chunks += 1
        self.counters.dropped_rows += chunk.num_rows
        ticket = self._tickets.get(key)
        if ticket is not None:
            ticket.dropped_rows += chunk.num_rows
            ticket.error = ticket.error or error

    def _run(self, queue: _ThreadQueue) -> None:
        while True:
            with self._lock:
                queue.ready.wait_for(lambda: queue.items or self._closing)
                if not queue.items:
                    return
                key, item = queue.items.popleft()
                self._in_memory -= isinstance(item, Chunk)
                ticket = self._tickets[key]
                self._room.notify_all()
            try:
                self._deliver(ticket, item)
            except Exception as error:
                self._note(ticket, item, error)

    def _deliver(self, ticket: _OpenRequest, item: Item) -> None:
        if isinstance(item, CaptureRequest):
            self.consumer.begin(item)
        elif isinstance(item, CaptureFinish):
            self._finalize(ticket, item)
        elif ticket.lost_rows:
            rows = item.num_rows
            if isinstance(item, Spilled):
                self._spill.take(item)
            self._lose(ticket, rows)
        else:
            chunk = self._spill.take(item) if isinstance(item, Spilled) else item
            self.consumer.submit_chunk(chunk)
            with self._lock:
                self.counters.delivered_rows += chunk.num_rows

    def _note(self, ticket: _OpenRequest, item: Item, error: Exception) -> None:
        """A consumer raised: the request is told, and its later rows are not offered again."""
        text = _words(error)
        log.warning("capture consumer %s failed: %s", self.name, text)
        ticket.error = ticket.error or text
        with self._lock:
            self.counters.failed_requests += not ticket.lost_rows
        if isinstance(item, CaptureFinish):
            self._resolve(item.key, ticket, CaptureResult("error", error=text))
        else:
            self._lose(ticket, 1 if isinstance(item, CaptureRequest) else item.num_rows)

    def _lose(self, ticket: _OpenRequest, rows: int) -> None:
        with self._lock:
            ticket.lost_rows += rows
            self.counters.dropped_rows += rows

    def _finalize(self, ticket: _OpenRequest, finish: CaptureFinish) -> None:
        with self._lock:
            lost = ticket.dropped_rows + ticket.lost_rows
            error = finish.error or ticket.error
        told = CaptureFinish(finish.key, finish.finish_reason, finish.prompt_len, lost, error)

        def settled(future: Future[CaptureResult]) -> None:
            failed = future.exception()
            result = CaptureResult("error", error=_words(failed)) if failed is not None else future.result()
            self._resolve(finish.key, ticket, result.with_losses(lost, error))

        self.consumer.finalize(told).add_done_callback(settled)

    def _resolve(self, key: str, ticket: _OpenRequest, result: CaptureResult) -> None:
        with self._lock:
            if self._tickets.get(key) is ticket:
                del self._tickets[key]
        if not ticket.promise.done():
            ticket.promise.set_result(result)


class Dispatcher:
    """Chunks in, results out. `consumers` are named instances; a request addresses them by these names."""

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
        self.lanes: dict[str, ConsumerQueue] = {}
        self._lock = threading.Lock()
        self._open: dict[str, tuple[str, ...]] = {}  # requests that have begun -> the lanes they go to
        self._closed = False
        for name, consumer in consumers.items():
            self.add(name, consumer)

    def add(self, name: str, consumer: Consumer) -> None:
        """One more consumer, for requests that begin from now on."""
        with self._lock:
            if self._closed or name in self.lanes:
                why = "the capture is shut down" if self._closed else "there is one of this name"
                raise CaptureError(f"consumer {quoted(name)} cannot be added: {why}.")
            lane = ConsumerQueue(
                name, consumer, self._queue_size, self._policy, self._spill, self._kept_results
            )
            self.lanes = {**self.lanes, name: lane}  # whoever is going through the others goes on undisturbed

    def begin(self, requests: Mapping[str, CaptureRequest]) -> None:
        """Announce a request to the consumers it names. Refused when the key is in use or a consumer is unknown."""
        keys = {request.key for request in requests.values()}
        unknown = [name for name in requests if name not in self.lanes]
        if unknown or len(keys) != 1:
            raise CaptureError(
                f"a request must have one key and known consumers; got keys {sorted(keys)} and unknown {unknown}. "
                f"This server has: {', '.join(sorted(self.lanes)) or 'none'}."
            )
        (key,) = keys
        with self._lock:
            if self._closed:
                raise CaptureError("the capture is shut down. Start another engine.")
            if key in self._open:
                raise CaptureError(
                    f"request {quoted(key)} is being captured already. Give every request its own key."
                )
            self._open[key] = tuple(requests)
        for name, request in requests.items():
            self.lanes[name].begin(request)

    def submit(self, chunk: Chunk, consumers: Iterable[str] | None = None) -> None:
        """Queue a chunk for the consumers of its request, or some of them. A request may begin with its first chunk."""
        key = chunk.request_id
        lanes = self._open.get(key)
        if lanes is None:
            try:
                self.begin(
                    {name: CaptureRequest(key, key, chunk.tag, meta=chunk.meta) for name in self.lanes}
                )
            except CaptureError as error:
                for lane in self.lanes.values():
                    lane.fail(key, _rows(chunk), str(error))
                return
            lanes = self._open[key]
        wanted = lanes if consumers is None else tuple(name for name in lanes if name in set(consumers))
        try:
            chunk.check()
            for name in wanted:
                self.lanes[name].put(chunk)
        except Exception as error:
            log.warning("a chunk of %s was not captured: %s", quoted(key), error)
            for name in wanted:
                self.lanes[name].fail(key, _rows(chunk), _words(error))

    def finish(
        self,
        key: str,
        finish_reason: str | None = None,
        prompt_len: int | None = None,
        error: str | None = None,
    ) -> None:
        """No more chunks of this request will come. Does not wait."""
        with self._lock:
            lanes = self._open.pop(key, ())
        for name in lanes:
            self.lanes[name].finish(CaptureFinish(key, finish_reason, prompt_len, 0, error))

    def result(self, key: str, consumer: str, timeout: float = 0) -> CaptureResult:
        """The result of a request at one consumer, `pending` if it is not known after `timeout` seconds."""
        return self.lanes[consumer].results.get(key, timeout)

    def results(self, key: str, timeout: float = 0) -> dict[str, CaptureResult]:
        """The result of a request at every consumer, after at most `timeout` seconds for all of them."""
        deadline = time.monotonic() + timeout
        return {name: self.result(key, name, max(deadline - time.monotonic(), 0)) for name in self.lanes}

    def shutdown(self) -> None:
        """Deliver what waits, finish what has not finished, and stop every consumer."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            unfinished = list(self._open)
        for key in unfinished:
            self.finish(key, error="the capture was shut down before the request finished")
        for lane in self.lanes.values():
            lane.close()
        self._spill.close()

    def __enter__(self) -> Dispatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _words(error: BaseException) -> str:
    """An error as a result says it; one that is not ours says its kind too."""
    return str(error) if isinstance(error, CaptureError) else f"{type(error).__name__}: {error}"


def _rows(chunk: Chunk) -> int:
    try:
        return chunk.num_rows
    except (AttributeError, IndexError, TypeError, ValueError):
        return 0
