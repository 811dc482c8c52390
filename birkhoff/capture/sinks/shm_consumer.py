"""Consumer that passes rows to a process on the same host, such as a trainer, through a ring in shared memory.

The ring holds `max_bytes`; the other process reads with `RingReader` (see `shm_ring.py`). If the ring is full,
`overflow="block"` waits for the reader, for at most `timeout_seconds`, and then drops the chunk; `"drop"` drops it at
once. Dropped rows are counted in the ring and in the request's result, which becomes `partial_error`. The writer does
not wait for a reader that has died. `ok` means that every row was put into the ring, not that it was read.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

from birkhoff.capture.sinks.chunk import Chunk
from birkhoff.capture.sinks.consumer import CountingConsumer
from birkhoff.capture.sinks.result import NOT_REQUESTED, CaptureFinish, CaptureRequest, CaptureResult, done
from birkhoff.capture.sinks.shm_ring import RingWriter, encoded
from birkhoff.errors import OptionError, quoted
from birkhoff.option_checks import check_float

LABEL_BYTES = 64  # upper bound of a row's labels as JSON
HEAD_BYTES = 1024


class ShmConsumer(CountingConsumer):
    """`name` is the name of the shared memory segment."""

    def __init__(
        self, name: str, max_bytes: int = 64 << 20, overflow: str = "block", timeout_seconds: float = 10.0
    ):
        super().__init__()
        if overflow not in ("block", "drop"):
            raise OptionError(f"overflow is {quoted(overflow)}, expected block or drop.")
        check_float("timeout_seconds", timeout_seconds, 0, 1e9)
        self.ring = RingWriter(name, max_bytes)
        self._seconds = timeout_seconds if overflow == "block" else 0.0
        self._unannounced: set[str] = set()  # requests whose start did not fit the ring

    def begin(self, request: CaptureRequest) -> None:
        super().begin(request)
        if not self.ring.put(*encoded(request), self._seconds):
            self._unannounced.add(request.key)

    def submit_chunk(self, chunk: Chunk) -> None:
        with self._lock:
            counts = self._counts_of(chunk)
        for part in self._parts(chunk):
            if self.ring.put(*encoded(part), self._seconds):
                counts.add(part)
            else:
                counts.dropped_rows += part.num_rows
                self.ring.drop(part.num_rows)

    def finalize(self, finish: CaptureFinish) -> Future[CaptureResult]:
        with self._lock:
            counts = self._counts.pop(finish.key, None)
        if counts is None:
            return done(NOT_REQUESTED)
        lost = finish.dropped_rows + counts.dropped_rows
        written = self.ring.put(*encoded(replace(finish, dropped_rows=lost)), self._seconds)
        announced = finish.key not in self._unannounced
        self._unannounced.discard(finish.key)
        if finish.error is None and not (announced and written and not counts.dropped_rows):
            error = f"{counts.dropped_rows} rows were dropped: no reader read shared memory {self.ring.name!r} in time"
            finish = replace(finish, error=error)
        return self._results.put(finish.key, done(self._result(finish, counts)))

    def shutdown(self) -> None:
        self.ring.close()

    def _parts(self, chunk: Chunk) -> Iterator[Chunk]:
        """The chunk in pieces of a quarter of the ring, so that the reader can work while the ring is filled."""
        row_bytes = max(chunk.nbytes // max(chunk.num_rows, 1), 1) + LABEL_BYTES
        rows = max((self.ring.capacity // 4 - HEAD_BYTES) // row_bytes, 1)
        if chunk.num_rows <= rows:
            yield chunk
            return
        for first in range(0, chunk.num_rows, rows):
            yield chunk.part(first, first + rows)
