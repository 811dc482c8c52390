"""A capture as a job of a plan: asks for rows step by step, shapes them as requested and passes them on.

The order is that of `reduce.py`: stream subset, projection, reduction, storage cast. Whatever goes wrong here is kept
as the job's `error` and never reaches the engine: a failed capture does not fail its generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from birkhoff.capture.sinks.captured_rows import Acts, CapturedRows
from birkhoff.capture.sinks.reduce import Accumulator, StoredRows, Transform, accumulator, store
from birkhoff.capture.sinks.result import CaptureResult
from birkhoff.capture.spec.request import ResolvedCapture
from birkhoff.capture.spec.selection import Selection
from birkhoff.errors import CaptureError
from birkhoff.hooks.plan import SiteRows
from birkhoff.hooks.site_names import Address


class CaptureSink(Protocol):
    """Where shaped rows go."""

    def keep(self, address: Address, stored: StoredRows, rows: SiteRows) -> None: ...
    def end(self, finish_reason: str, missing: list[int], error: str | None) -> None: ...

    def results(self) -> dict[str, CaptureResult]:
        """By consumer, what became of rows that were passed on."""
        ...


class CaptureJob:
    """`matrix` is the one that the capture's `project` names; `capture_hash` stands for all captures of the request."""

    def __init__(
        self,
        resolved: ResolvedCapture,
        keeper: CaptureSink,
        matrix: torch.Tensor | None = None,
        capture_hash: str = "",
    ):
        self.keys = resolved.addresses
        self.after = resolved.capture.capture_point == "after"
        self.resolved = resolved
        self.keeper = keeper
        self.matrix = matrix
        self.capture_hash = capture_hash
        self.error: str | None = None
        self.missing: list[int] = []  # positions asked for one by one that never came; known at the end
        self._selection = Selection(resolved.selector)
        self._sums: dict[Address, Accumulator] = {}

    def offsets(self, start: int, token_ids: Sequence[int], prompt_len: int) -> Sequence[int]:
        return self._selection.rows(start, token_ids)  # type: ignore[return-value]

    def deliver(self, rows: SiteRows) -> None:
        if self.error is not None:
            return
        try:
            self._take(rows)
        except Exception as error:  # the generation goes on
            self.error = f"{type(error).__name__}: {error}"

    def close(self, finish_reason: str, num_tokens: int) -> None:
        try:
            if self.error is None:
                self._flush_sums()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        self.missing = self._selection.never_came(num_tokens)
        self.keeper.end(finish_reason, self.missing, self.error)

    def _take(self, rows: SiteRows) -> None:
        capture = self.resolved.capture
        address = (rows.hook, rows.layer)
        kept = self.resolved.rows[rows.hook]
        tensor = Transform.of(kept, self.matrix)(rows.tensor)
        if capture.reduce is not None:
            self._sums.setdefault(address, accumulator(capture.reduce)).add(
                tensor, rows.positions, rows.token_ids
            )
        else:
            self.keeper.keep(address, store(tensor, kept.dtype), rows)

    def _flush_sums(self) -> None:
        for (hook, layer), sums in self._sums.items():
            found = sums.result()
            if found is not None:
                positions = () if found.position is None else (found.position,)
                ids = () if found.token_id is None else (found.token_id,)
                stored = store(found.row, self.resolved.rows[hook].dtype)
                self.keeper.keep((hook, layer), stored, SiteRows(hook, layer, found.row, positions, ids, 0))


class MemorySink:
    """Rows stay in memory until the caller takes them as `Acts`."""

    def __init__(self, resolved: ResolvedCapture):
        self._resolved = resolved
        self._parts: dict[Address, list[tuple[StoredRows, SiteRows]]] = {}
        self.missing: list[int] = []
        self.error: str | None = None

    def keep(self, address: Address, stored: StoredRows, rows: SiteRows) -> None:
        self._parts.setdefault(address, []).append((stored, rows))

    def end(self, finish_reason: str, missing: list[int], error: str | None) -> None:
        self.missing = missing
        self.error = error

    def results(self) -> dict[str, CaptureResult]:
        """`ok` means here: all of it is in memory."""
        if self.error is not None:
            return {self._resolved.consumer: CaptureResult("error", error=self.error)}
        kept = [stored for parts in self._parts.values() for stored, _ in parts]
        rows = sum(stored.values.shape[0] for stored in kept)
        nbytes = sum(
            stored.values.nbytes + (0 if stored.scale is None else stored.scale.nbytes) for stored in kept
        )
        return {self._resolved.consumer: CaptureResult("ok", rows=rows, bytes=nbytes, keys=len(self._parts))}

    def acts(self) -> Acts:
        """The rows. Raises when the capture failed: half of them would read like all of them."""
        if self.error is not None:
            raise CaptureError(f"{self._resolved.consumer}: {self.error}")
        found = {}
        for address, parts in self._parts.items():
            scales = [stored.scale for stored, _ in parts if stored.scale is not None]
            found[address] = CapturedRows(
                torch.cat([stored.values for stored, _ in parts]),
                tuple(position for _, rows in parts for position in rows.positions),
                tuple(token for _, rows in parts for token in rows.token_ids),
                torch.cat(scales) if scales else None,
            )
        return Acts(self._resolved, found, self.missing)
