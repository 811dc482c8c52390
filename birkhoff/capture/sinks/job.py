"""A capture as a job of a plan: selects rows step by step, transforms them as requested and passes them to a sink.

The order of operations is that of `reduce.py`: stream subset, projection, reduction, storage cast. An exception here
becomes the result of the capture and never reaches the engine: a failed capture does not fail its generation.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch

from birkhoff.capture.sinks.captured_rows import Acts
from birkhoff.capture.sinks.reduce import Accumulator, Transform, accumulator, store
from birkhoff.capture.spec.request import ResolvedCapture
from birkhoff.capture.spec.selection import Selection
from birkhoff.errors import CaptureError
from birkhoff.hooks.plan import SiteRows
from birkhoff.hooks.results import CaptureResult
from birkhoff.hooks.site_names import Address
from birkhoff.hooks.sites import BY_NAME

SECONDS_TO_DURABLE = 30.0


class CaptureSink(Protocol):
    """Destination of the rows of one request at one consumer."""

    in_memory: bool  # whether `rows` returns the rows

    def open(self) -> None: ...
    def append(self, rows: SiteRows) -> None: ...
    def close(self, finish_reason: str, missing: list[int], error: str | None) -> None: ...
    def rows(self) -> Acts: ...
    def result(self, timeout: float) -> CaptureResult: ...


class CaptureJob:
    """`matrix` is the projection named by the capture; `capture_hash` identifies all captures of the request. With
    `layers`, only rows of these layers are captured. With `on_device`, rows are received and processed on the device
    that computed them."""

    def __init__(
        self,
        resolved: ResolvedCapture,
        sink: CaptureSink,
        matrix: torch.Tensor | None = None,
        capture_hash: str = "",
        layers: Collection[int] | None = None,
        on_device: bool = False,
    ):
        self.keys = tuple(key for key in resolved.addresses if layers is None or key[1] in layers)
        self.after = resolved.capture.capture_point == "after"
        self.on_device = on_device
        self.consumer = resolved.consumer
        self.resolved = resolved
        self.sink = sink
        self.capture_hash = capture_hash
        self.error: str | None = None
        self.missing: list[int] = []  # positions listed one by one that were never computed; set by `close`
        self._transforms = {hook: Transform(row.streams, matrix) for hook, row in resolved.rows.items()}
        self._selection = Selection(resolved.selector)
        self._reductions: dict[Address, Accumulator] = {}

    @property
    def in_memory(self) -> bool:
        return self.sink.in_memory

    def rows(self) -> Acts:
        """The captured rows of an in-memory capture. Raises `CaptureError` if the capture failed."""
        return self.sink.rows()

    def result(self, timeout: float = SECONDS_TO_DURABLE) -> CaptureResult:
        """The result at the consumer, `pending` if it is not known after `timeout` seconds."""
        return self.sink.result(timeout)

    def open(self) -> None:
        self.sink.open()

    def offsets(self, start: int, token_ids: Sequence[int], prompt_len: int) -> Sequence[int]:
        return self._selection.rows(start, token_ids)  # type: ignore[return-value]

    def deliver(self, rows: SiteRows) -> None:
        if self.error is not None:
            return
        try:
            self._process(rows)
        except Exception as error:  # the generation continues
            self.error = f"{type(error).__name__}: {error}"

    def close(self, finish_reason: str, num_tokens: int) -> None:
        try:
            if self.error is None:
                self._flush_reductions()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        self.missing = self._selection.never_computed(num_tokens)
        self.sink.close(finish_reason, self.missing, self.error)

    def _process(self, rows: SiteRows) -> None:
        reduce = self.resolved.capture.reduce
        tensor = self._transforms[rows.hook](rows.tensor)
        if reduce is None:
            self._append(rows, tensor)
        else:
            reduction = self._reductions.setdefault((rows.hook, rows.layer), accumulator(reduce))
            reduction.add(tensor, rows.positions, rows.token_ids)

    def _append(self, rows: SiteRows, tensor: torch.Tensor) -> None:
        values, scale = store(tensor, self.resolved.rows[rows.hook].dtype)
        self.sink.append(SiteRows(rows.hook, rows.layer, values, rows.positions, rows.token_ids, scale))

    def _flush_reductions(self) -> None:
        for (hook, layer), reduction in self._reductions.items():
            reduced = reduction.result()
            if reduced is not None:
                positions = () if reduced.position is None else (reduced.position,)
                token_ids = () if reduced.token_id is None else (reduced.token_id,)
                self._append(SiteRows(hook, layer, reduced.row, positions, token_ids), reduced.row)


class MemorySink:
    """Keeps rows in memory until the caller reads them as `Acts`: in memory of their own, or with `shared`, for readers
    that copy them at once, beside those of other requests where they come from one step."""

    in_memory = True

    def __init__(self, resolved: ResolvedCapture, shared: bool = False):
        self._resolved = resolved
        self._shared = shared
        self._parts: dict[Address, list[SiteRows]] = {}
        self.missing: list[int] = []
        self.error: str | None = None

    def open(self) -> None:
        pass

    def append(self, rows: SiteRows) -> None:
        self._parts.setdefault((rows.hook, rows.layer), []).append(rows)

    def close(self, finish_reason: str, missing: list[int], error: str | None) -> None:
        self.missing = missing
        self.error = error

    def result(self, timeout: float) -> CaptureResult:
        """`ok` if all rows are in memory."""
        if self.error is not None:
            return CaptureResult("error", error=self.error)
        parts = [part for parts in self._parts.values() for part in parts]
        nbytes = sum(part.tensor.nbytes + (0 if part.scale is None else part.scale.nbytes) for part in parts)
        return CaptureResult("ok", rows=sum(map(len, parts)), bytes=nbytes, keys=len(self._parts))

    def rows(self) -> Acts:
        """The rows. Raises if the capture failed: an incomplete set would look like a complete one."""
        if self.error is not None:
            raise CaptureError(f"{self._resolved.consumer}: {self.error}")
        rows = {
            key: parts[0] if self._shared and len(parts) == 1 else SiteRows.concatenate(parts)
            for key, parts in self._parts.items()
        }
        shapes = {hook: row.shape for hook, row in self._resolved.rows.items() if BY_NAME[hook].ragged}
        return Acts(self._resolved.names, rows, self.missing, shapes)
