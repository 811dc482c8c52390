"""Access log: one line per HTTP request on stderr, as text or as JSON.

A line holds the request's id, method, path, status and duration. Prompts, keys and bodies are never written. An
unexpected exception is logged with its traceback under the request id that the client received.
"""

from __future__ import annotations

import sys
import time
import traceback
from contextlib import suppress
from typing import TextIO

import orjson


class AccessLog:
    """Writes log lines to `stream`. `format` is `text`, `json` or `off` (exceptions are logged even when off)."""

    def __init__(self, format: str = "text", stream: TextIO | None = None):
        self._format = format
        self._stream = stream or sys.stderr

    def log_request(
        self, request_id: str, method: str, path: str, status: int, seconds: float, note: str = ""
    ) -> None:
        if self._format == "off":
            return
        method, path, milliseconds = method[:16], path[:200], round(seconds * 1e3, 1)
        if self._format == "json":
            line = {"time": _now(), "id": request_id, "method": method, "path": path, "status": status}
            self._write(orjson.dumps({**line, "ms": milliseconds, "note": note}).decode())
        else:
            suffix = f"  {note}" if note else ""
            self._write(
                f"{_now()}  {status or '---'}  {method:<6} {path!a}  {milliseconds} ms  {request_id}{suffix}"
            )

    def log_exception(self, request_id: str, error: BaseException) -> None:
        stack = "".join(traceback.format_exception(error))
        if self._format == "json":
            line = {"time": _now(), "id": request_id, "defect": repr(error), "stack": stack}
            self._write(orjson.dumps(line).decode())
        else:
            self._write(f"{_now()}  defect in {request_id}\n{stack.rstrip()}")

    def _write(self, line: str) -> None:
        with suppress(OSError, ValueError):  # a closed log stream must not stop the server
            print(line, file=self._stream, flush=True)


def _now() -> str:
    now = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
