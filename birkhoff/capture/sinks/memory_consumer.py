"""The consumer that keeps rows in memory, to be handed back with the answer.

A ring bounded in bytes: when it is full, the captures of requests that finished longest ago go first. A request that
alone is larger than the ring loses its later rows and says so. Chunks are held as they came; rows are joined when they
are asked for.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from birkhoff.capture.sinks.chunk import PHASES, Chunk, plain_ints
from birkhoff.capture.sinks.consumer import Location, check_name
from birkhoff.capture.sinks.result import NOT_REQUESTED, CaptureFinish, CaptureRequest, CaptureResult, done
from birkhoff.capture.store.reader import Address, CaptureEntry
from birkhoff.errors import CaptureError, OptionError, quoted
from birkhoff.hooks.sites import BY_NAME

_MATRICES = frozenset(name for name, site in BY_NAME.items() if site.shape == "mm")
LABEL_BYTES = 24  # what the labels of a row cost, roughly


@dataclass(eq=False)
class _RequestRows:
    request: CaptureRequest
    chunks: dict[Address, list[Chunk]] = field(default_factory=dict)
    nbytes: int = 0
    charged: int = 0  # rows and their labels
    rows: int = 0
    lost_rows: int = 0
    result: CaptureResult | None = None


class MemoryConsumer:
    location: Location = "worker"
    reads_client_spec = True
    writer_threads = 1

    def __init__(self, max_bytes: int = 256 << 20):
        if type(max_bytes) is not int or max_bytes < 1:
            raise OptionError(f"max_bytes is {quoted(max_bytes)}, expected a whole number from 1 up.")
        self.max_bytes = max_bytes
        self.evicted = 0  # requests whose rows made room for others
        self._lock = threading.Lock()
        self._held: OrderedDict[str, _RequestRows] = (
            OrderedDict()
        )  # by age; finished requests move to the end when they finish
        self._bytes = 0

    @property
    def nbytes(self) -> int:
        return self._bytes

    def global_capture_spec(self) -> Mapping[str, Any] | None:
        return None

    def validate_client_spec(self, spec: Mapping[str, Any], path: str) -> None:
        for name in ("request_id", "tag"):
            check_name(spec, name, path, required=False)

    def begin(self, request: CaptureRequest) -> None:
        with self._lock:
            self._held[request.key] = _RequestRows(request)

    def submit_chunk(self, chunk: Chunk) -> None:
        with self._lock:
            key = chunk.request_id
            if key not in self._held:
                self._held[key] = _RequestRows(CaptureRequest(key, key, chunk.tag, meta=chunk.meta))
            held = self._held[key]
            needed = chunk.nbytes + LABEL_BYTES * chunk.num_rows
            self._make_room(needed)
            if self._bytes + needed > self.max_bytes:
                held.lost_rows += chunk.num_rows
                return
            self._bytes += needed
            held.charged += needed
            held.nbytes += chunk.nbytes
            held.rows += chunk.num_rows
            held.chunks.setdefault((chunk.layer, chunk.hook), []).append(chunk)

    def finalize(self, finish: CaptureFinish) -> Future[CaptureResult]:
        with self._lock:
            held = self._held.get(finish.key)
            if held is None:
                return done(NOT_REQUESTED)
            lost = held.lost_rows + finish.dropped_rows
            error = finish.error
            if held.lost_rows:
                error = f"{held.lost_rows} rows did not fit the {self.max_bytes} bytes of the memory consumer"
            elif lost:
                error = error or f"{lost} rows were dropped: the capture queue was full"
            held.result = CaptureResult(
                "partial_error" if error else "ok",
                held.request.request_id,
                error,
                held.rows,
                held.nbytes,
                len(held.chunks),
                lost,
            )
            self._held.move_to_end(finish.key)
            return done(held.result)

    def get_result(self, key: str) -> CaptureResult:
        with self._lock:
            held = self._held.get(key)
            return NOT_REQUESTED if held is None else held.result or CaptureResult("pending")

    def entries(self, key: str) -> dict[Address, CaptureEntry]:
        """What is held of a request, by (layer, hook), joined as a reader of files would."""
        with self._lock:
            held = self._held.get(key)
            if held is None:
                raise CaptureError(
                    f"nothing is held of request {quoted(key)}. It was not captured here, was taken already, or made "
                    "room for others: raise max_bytes, or take it sooner."
                )
            chunks = {address: list(parts) for address, parts in held.chunks.items()}
        return {address: _joined(parts) for address, parts in chunks.items()}

    def take(self, key: str) -> dict[Address, CaptureEntry]:
        """The same, and forget the request."""
        entries = self.entries(key)
        with self._lock:
            self._forget(key)
        return entries

    def shutdown(self) -> None:
        with self._lock:
            self._held.clear()
            self._bytes = 0

    def _make_room(self, needed: int) -> None:
        for key in [key for key, held in self._held.items() if held.result is not None]:
            if self._bytes + needed <= self.max_bytes:
                return
            self._forget(key)
            self.evicted += 1

    def _forget(self, key: str) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._bytes -= held.charged


def _joined(parts: list[Chunk]) -> CaptureEntry:
    first = parts[0]
    scales = [scale for part in parts if (scale := part.scales()) is not None]
    positions = [position for part in parts for position in plain_ints(part.positions)]
    token_ids = [token for part in parts for token in plain_ints(part.token_ids)]
    phases = [PHASES[letter] for part in parts for letter in part.letters() or ""]
    array = np.concatenate([part.array() for part in parts]).reshape(-1, *first.row_shape)
    return CaptureEntry(
        layer=first.layer,
        hook=first.hook,
        array=array,
        dtype=first.dtype,
        positions=positions
        if len(positions) == len(array)
        else None,  # half a list would label the wrong rows
        token_ids=token_ids if len(token_ids) == len(array) else None,
        phases=phases if len(phases) == len(array) else None,
        scale=np.concatenate(scales) if scales else None,
        axes=["from", "to"] if len(first.row_shape) == 2 and first.hook in _MATRICES else None,
        meta=dict(first.meta),
    )
