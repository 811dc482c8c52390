"""Results of a request: what its captures and its signals produced, with types, for every caller that reads them.

The jobs of a plan only receive rows. The parts of a job that a caller reads afterwards are listed here, so that callers
do not search the jobs of a plan for the right class. Nothing here imports a capture or an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from birkhoff import notebook

if TYPE_CHECKING:
    from birkhoff.hooks.plan import Key, SiteRows
    from birkhoff.hooks.signals import SignalJob

Status = Literal["pending", "ok", "partial_error", "error", "not_requested"]


@dataclass(frozen=True)
class CaptureResult:
    """Result of one request's capture at one consumer.

    `ok`: every row is stored as the consumer promises; for files, synced to disk (`durable` is False if syncing is
    off). `partial_error`: rows were dropped. `error`: the capture does not exist. Paths are relative to the root.
    """

    status: Status
    id: str = ""
    error: str | None = None
    rows: int = 0
    bytes: int = 0
    keys: int = 0  # number of distinct (hook, layer)
    dropped_rows: int = 0
    paths: tuple[str, ...] = ()
    sha256: Mapping[str, str] = field(default_factory=dict)  # per path, of this request's bytes in file order
    durable: bool = False
    payload: Any = None  # what the consumer returns beside this: plain JSON data

    @property
    def finished(self) -> bool:
        return self.status != "pending"

    def with_losses(self, dropped_rows: int, error: str | None) -> CaptureResult:
        """This result, marked `partial_error` if rows were lost before they reached the consumer."""
        if not (dropped_rows or error) or self.status == "error":
            return self
        error = error or f"{dropped_rows} rows were dropped: the capture queue was full"
        return replace(self, status="partial_error", error=error, dropped_rows=dropped_rows)

    def _repr_html_(self) -> str:
        shown = {name: value for name, value in self.to_json().items() if value not in (None, [], {}, "")}
        return notebook.facts("Capture", shown)

    def to_json(self) -> dict[str, Any]:
        paths = list(self.paths)
        payload = paths if self.payload is None and paths else self.payload
        return vars(self) | {"paths": paths, "sha256": dict(self.sha256), "payload": payload}


class CaptureOutcome(Protocol):
    """One capture of a request: the rows that go to one consumer."""

    @property
    def consumer(self) -> str: ...

    @property
    def capture_hash(self) -> str:
        """Digest of all captures of the request."""
        ...

    @property
    def in_memory(self) -> bool:
        """Whether `rows` returns the rows; otherwise the consumer has them."""
        ...

    @property
    def missing(self) -> list[int]:
        """Positions that were listed one by one and never computed. Known when the request has ended."""
        ...

    def rows(self) -> Mapping[Key, SiteRows]:
        """The rows of a capture in memory. Raises `CaptureError` if the capture failed."""
        ...

    def result(self, timeout: float = 30.0) -> CaptureResult:
        """The result, `pending` if it is not known after `timeout` seconds."""
        ...


@dataclass(frozen=True, eq=False)
class RequestResults:
    """What the caller of a request asked to receive. Captures of global consumers are not listed."""

    captures: tuple[CaptureOutcome, ...] = ()
    signals: SignalJob | None = None
