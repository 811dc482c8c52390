"""The consumer that keeps nothing and says what it saw: one line per request, one per chunk when asked for more.

For trying out a capture before paying for it. A line names hooks, layers, rows and bytes, and never a token or a value.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
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

log = logging.getLogger("birkhoff.capture")


class LoggingConsumer:
    location: Location = "worker"
    reads_client_spec = True
    writer_threads = 1

    def __init__(self, level: str = "INFO"):
        levels = logging.getLevelNamesMapping()
        if level.upper() not in levels:
            raise OptionError(f"level is {quoted(level)}, expected one of {', '.join(levels)}.")
        self._level = levels[level.upper()]
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[CaptureRequest, dict[tuple[int, str], int], int]] = {}
        self._results = Results()

    def global_capture_spec(self) -> Mapping[str, Any] | None:
        return None

    def validate_client_spec(self, spec: Mapping[str, Any], path: str) -> None:
        pass

    def begin(self, request: CaptureRequest) -> None:
        self._results.begin(request.key)
        with self._lock:
            self._seen[request.key] = (request, {}, 0)

    def submit_chunk(self, chunk: Chunk) -> None:
        with self._lock:
            key = chunk.request_id
            request, rows, nbytes = self._seen.get(key) or (CaptureRequest(key, key, chunk.tag), {}, 0)
            address = (chunk.layer, chunk.hook)
            rows[address] = rows.get(address, 0) + chunk.num_rows
            self._seen[key] = (request, rows, nbytes + chunk.nbytes)
        log.debug(
            "capture %s: step %d, %s[%d], %d rows, %d bytes",
            chunk.request_id,
            chunk.step_index,
            chunk.hook,
            chunk.layer,
            chunk.num_rows,
            chunk.nbytes,
        )

    def finalize(self, finish: CaptureFinish) -> Future[CaptureResult]:
        with self._lock:
            seen = self._seen.pop(finish.key, None)
        if seen is None:
            return done(NOT_REQUESTED)
        request, rows, nbytes = seen
        hooks = sorted({hook for _, hook in rows})
        log.log(
            self._level,
            "capture %s finished (%s): %d rows, %d bytes, %d layers of %s",
            request.request_id,
            finish.finish_reason,
            sum(rows.values()),
            nbytes,
            len({layer for layer, _ in rows}),
            ", ".join(hooks),
        )
        result = CaptureResult("ok", request.request_id, None, sum(rows.values()), nbytes, len(rows))
        return self._results.put(finish.key, done(result.with_losses(finish.dropped_rows, finish.error)))

    def get_result(self, key: str) -> CaptureResult:
        return self._results.get(key)

    def shutdown(self) -> None:
        with self._lock:
            self._seen.clear()
