"""Captures that went to files, by the id an answer gave them: what became of them, and where they lie.

An id is random and says nothing about a path; paths come from the writer and are checked to lie under the capture root
before anything is opened. The last few thousand are remembered.
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

MOST_KEPT = 4096


class CaptureIndex:
    """`roots` returns the capture root of every consumer that writes files, by consumer name."""

    def __init__(self, roots: Callable[[], Mapping[str, Path]]):
        self._roots = roots
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, CaptureOutcome] = OrderedDict()

    def put(self, capture: CaptureOutcome) -> str:
        with self._lock:
            for known, kept in self._kept.items():
                if kept is capture:
                    return known
            made = "cap-" + secrets.token_hex(12)
            self._kept[made] = capture
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            return made

    def result(self, capture_id: str, seconds: float = 0.0) -> CaptureResult:
        return self._find(capture_id).result(seconds)

    def _find(self, capture_id: str) -> CaptureOutcome:
        with self._lock:
            found = self._kept.get(capture_id)
        if found is None:
            raise ApiError(
                404,
                "there is no capture of this id. Ids are in the answer that made them.",
                code="capture-unknown",
            )
        return found

    def ids(self) -> list[str]:
        """Newest first."""
        with self._lock:
            return list(reversed(self._kept))

    def told(self, capture_id: str, seconds: float = 0.0) -> dict[str, Any]:
        return {**self.result(capture_id, seconds).to_json(), "id": capture_id}

    def forget(self, capture_id: str) -> None:
        self.result(capture_id)
        with self._lock:
            self._kept.pop(capture_id, None)

    def directory(self, capture_id: str) -> Path:
        """Where a finished capture lies."""
        capture = self._find(capture_id)
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
