"""The consumer that hands rows to a training process on the same host, through a ring in shared memory.

The ring holds `max_bytes`; the process at its other end reads with `RingReader` (see `ring.py`). When the ring is full,
`overflow="block"` waits for the reader, for at most `timeout_seconds`, and then throws the chunk away; `"drop"` throws
it away at once. What was thrown away is counted for its request, in the ring, and makes the result `partial_error`. A
reader that has died is not waited for. `ok` means that every row was put into the ring, not that somebody used it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
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
from birkhoff.capture.sinks.shm_ring import RingWriter, encoded
from birkhoff.errors import OptionError, quoted

LABEL_BYTES = 64  # what a row's labels take as JSON, at most
HEAD_BYTES = 1024


@dataclass(eq=False)
class _Sent:
    announced: bool = True
    rows: int = 0
    nbytes: int = 0
    lost_rows: int = 0
    keys: set[tuple[int, str]] = field(default_factory=set)


class ShmConsumer:
    location: Location = "worker"
    reads_client_spec = True
    writer_threads = 1

    def __init__(
        self, name: str, max_bytes: int = 64 << 20, overflow: str = "block", timeout_seconds: float = 10.0
    ):
        if overflow not in ("block", "drop"):
            raise OptionError(f"overflow is {quoted(overflow)}, expected block or drop.")
        if (
            isinstance(timeout_seconds, bool)
            or not isinstance(timeout_seconds, (int, float))
            or timeout_seconds < 0
        ):
            raise OptionError(f"timeout_seconds is {quoted(timeout_seconds)}, expected a number of seconds.")
        self.ring = RingWriter(name, max_bytes)
        self._seconds = timeout_seconds if overflow == "block" else 0.0
        self._lock = threading.Lock()
        self._sent: dict[str, _Sent] = {}
        self._results = Results()

    def global_capture_spec(self) -> Mapping[str, Any] | None:
        return None

    def validate_client_spec(self, spec: Mapping[str, Any], path: str) -> None:
        pass

    def begin(self, request: CaptureRequest) -> None:
        self._results.begin(request.key)
        with self._lock:
            sent = self._sent[request.key] = _Sent()
        sent.announced = self.ring.put(*encoded(request), self._seconds)

    def submit_chunk(self, chunk: Chunk) -> None:
        with self._lock:
            sent = self._sent.setdefault(chunk.request_id, _Sent())
        for part in self._parts(chunk):
            if self.ring.put(*encoded(part), self._seconds):
                sent.rows += part.num_rows
                sent.nbytes += part.nbytes
                sent.keys.add((part.layer, part.hook))
            else:
                sent.lost_rows += part.num_rows
                self.ring.drop(part.num_rows)

    def finalize(self, finish: CaptureFinish) -> Future[CaptureResult]:
        with self._lock:
            sent = self._sent.pop(finish.key, None)
        if sent is None:
            return done(NOT_REQUESTED)
        lost = finish.dropped_rows + sent.lost_rows
        told = self.ring.put(*encoded(replace(finish, dropped_rows=lost)), self._seconds)
        error = finish.error
        if error is None and not (sent.announced and told and not sent.lost_rows):
            error = (
                f"{sent.lost_rows} rows were dropped: nobody read shared memory {self.ring.name!r} in time"
            )
        result = CaptureResult("ok", finish.key, None, sent.rows, sent.nbytes, len(sent.keys))
        return self._results.put(finish.key, done(result.with_losses(lost, error)))

    def get_result(self, key: str) -> CaptureResult:
        return self._results.get(key)

    def shutdown(self) -> None:
        self.ring.close()

    def _parts(self, chunk: Chunk) -> Iterator[Chunk]:
        """A chunk in pieces of which several fit the ring, so that its reader can work while it is filled."""
        row_bytes = max(chunk.nbytes // max(chunk.num_rows, 1), 1) + LABEL_BYTES
        most = max((self.ring.capacity // 4 - HEAD_BYTES) // row_bytes, 1)
        if chunk.num_rows <= most:
            yield chunk
            return
        for first in range(0, chunk.num_rows, most):
            yield chunk.part(first, first + most)
