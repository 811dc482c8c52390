"""Captures that went to files, by the id an answer gave them: what became of them, and where they lie.

An id is random and says nothing about a path; paths come from the writer and are checked to lie under the capture root
before anything is opened. The last few thousand are remembered.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from birkhoff.capture.planner import DispatchSink
from birkhoff.capture.sinks.result import CaptureResult
from birkhoff.server.api_errors import ApiError

MOST_KEPT = 4096


class CaptureIndex:
    def __init__(self, root: str):
        self._root = Path(root).resolve() if root else None
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[DispatchSink, str]] = OrderedDict()

    def put(self, keeper: DispatchSink, consumer: str) -> str:
        with self._lock:
            for known, (held, name) in self._kept.items():
                if held is keeper and name == consumer:
                    return known
            made = "cap-" + secrets.token_hex(12)
            self._kept[made] = keeper, consumer
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            return made

    def result(self, capture_id: str, seconds: float = 0.0) -> CaptureResult:
        with self._lock:
            found = self._kept.get(capture_id)
        if found is None:
            raise ApiError(
                404,
                "there is no capture of this id. Ids are in the answer that made them.",
                code="capture-unknown",
            )
        keeper, consumer = found
        return keeper.results(seconds)[consumer]

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
        result = self.result(capture_id)
        if result.status == "pending":
            raise ApiError(
                409,
                "this capture is not on disk yet. Ask again, or with ?wait=10.",
                code="capture-pending",
                headers={"Retry-After": "1"},
            )
        if result.status not in ("ok", "partial_error") or not result.paths or self._root is None:
            raise ApiError(404, "this capture left no files.", code="capture-empty")
        first = (self._root / result.paths[0]).resolve()
        if not first.is_relative_to(self._root) or not first.exists():
            raise ApiError(404, "the files of this capture are gone.", code="capture-gone")
        return first.parent
