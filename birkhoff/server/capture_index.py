"""Index of captures written to files, by the id that responses give them.

Ids are random and do not reveal a path. Paths come from the writer and are checked to be under the capture root before
anything is opened. The index keeps the most recent `MAX_KEPT` captures.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from birkhoff.hooks.results import CaptureOutcome, CaptureResult
from birkhoff.server.api_errors import ApiError

MAX_KEPT = 4096


class CaptureIndex:
    """Thread-safe map from capture id to capture.

    `roots` returns the capture root of every consumer that writes files, by consumer name."""

    def __init__(self, roots: Callable[[], Mapping[str, Path]]):
        self._roots = roots
        self._lock = threading.Lock()
        self._captures: OrderedDict[str, CaptureOutcome] = OrderedDict()

    def put(self, capture: CaptureOutcome) -> str:
        """Add a capture and return its id. A capture that is already present keeps its id."""
        with self._lock:
            for capture_id, known in self._captures.items():
                if known is capture:
                    return capture_id
            capture_id = "cap-" + secrets.token_hex(12)
            self._captures[capture_id] = capture
            if len(self._captures) > MAX_KEPT:
                self._captures.popitem(last=False)
            return capture_id

    def result(self, capture_id: str, seconds: float = 0.0) -> CaptureResult:
        """The state of a capture, after waiting up to `seconds` for its files. Raises 404 for an unknown id."""
        return self._get(capture_id).result(seconds)

    def _get(self, capture_id: str) -> CaptureOutcome:
        with self._lock:
            capture = self._captures.get(capture_id)
        if capture is None:
            raise ApiError(
                404,
                "there is no capture of this id. Ids are in the answer that made them.",
                code="capture-unknown",
            )
        return capture

    def ids(self) -> list[str]:
        """All ids, newest first."""
        with self._lock:
            return list(reversed(self._captures))

    def describe(self, capture_id: str, seconds: float = 0.0) -> dict[str, Any]:
        """The state of a capture as JSON fields."""
        return {**self.result(capture_id, seconds).to_json(), "id": capture_id}

    def directory(self, capture_id: str) -> Path:
        """Directory with the files of a finished capture. Raises 409 while pending, 404 if there are no files."""
        capture = self._get(capture_id)
        result = capture.result(0.0)
        root = self._roots().get(capture.consumer)
        if result.status == "pending":
            raise ApiError(
                409,
                "this capture is not on disk yet. Ask again, or with ?wait=10.",
                code="capture-pending",
                headers={"Retry-After": "1"},
            )
        if result.status not in ("ok", "partial_error") or not result.paths or root is None:
            raise ApiError(404, "this capture left no files.", code="capture-empty")
        root = root.resolve()
        first = (root / result.paths[0]).resolve()
        if not first.is_relative_to(root) or not first.exists():
            raise ApiError(404, "the files of this capture are gone.", code="capture-gone")
        return first.parent
