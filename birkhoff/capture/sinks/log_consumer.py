"""Consumer that logs what it receives and stores nothing: one line per request, and one per chunk at level DEBUG.

Use it to try out a capture before storing it. A line names hooks, layers, rows and bytes, never a token or a value.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from birkhoff.capture.sinks.chunk import Chunk
from birkhoff.capture.sinks.consumer import CountingConsumer, RequestCounts
from birkhoff.capture.sinks.result import CaptureFinish, CaptureResult
from birkhoff.errors import OptionError, quoted

log = logging.getLogger("birkhoff.capture")


class LoggingConsumer(CountingConsumer):
    """`level` is the level of the line per request. With `hooks`, a name or `{hook: layers}`, it logs every request at
    `positions`; otherwise requests name it."""

    def __init__(
        self,
        level: str = "INFO",
        hooks: str | Mapping[str, Any] | None = None,
        positions: Any = "last_prompt",
    ):
        super().__init__()
        self._spec: dict[str, Any] | None = None
        if hooks is not None:
            by_hook = {hooks: "all"} if isinstance(hooks, str) else dict(hooks)
            self._spec = {"hooks": by_hook, "positions": positions}
            self.reads_client_spec = False
        levels = logging.getLevelNamesMapping()
        if level.upper() not in levels:
            raise OptionError(f"level is {quoted(level)}, expected one of {', '.join(levels)}.")
        self._level = levels[level.upper()]

    def global_capture_spec(self) -> Mapping[str, Any] | None:
        return self._spec

    def submit_chunk(self, chunk: Chunk) -> None:
        super().submit_chunk(chunk)
        log.debug(
            "capture %s: step %d, %s[%d], %d rows, %d bytes",
            chunk.request_id,
            chunk.step_index,
            chunk.hook,
            chunk.layer,
            chunk.num_rows,
            chunk.nbytes,
        )

    def _result(self, finish: CaptureFinish, counts: RequestCounts) -> CaptureResult:
        log.log(
            self._level,
            "capture %s finished (%s): %d rows, %d bytes, %d layers of %s",
            counts.request.request_id,
            finish.finish_reason,
            counts.rows,
            counts.nbytes,
            len({layer for _, layer in counts.keys}),
            ", ".join(sorted({hook for hook, _ in counts.keys})),
        )
        return super()._result(finish, counts)
