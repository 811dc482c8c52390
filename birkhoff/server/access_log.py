"""The log of calls: one line each on stderr, as text for a person or JSON for a machine.

A line has the call's id, method, path, status and time. Prompts, keys and bodies are never written. A defect is written
with its stack under the id that its client was given.
"""

from __future__ import annotations

import sys
import time
import traceback
from contextlib import suppress
from typing import TextIO

import orjson


class AccessLog:
    def __init__(self, form: str = "text", stream: TextIO | None = None):
        self._form = form
        self._stream = stream or sys.stderr

    def call(
        self, request_id: str, method: str, path: str, status: int, seconds: float, note: str = ""
    ) -> None:
        if self._form == "off":
            return
        line = {
            "time": _now(),
            "id": request_id,
            "method": method[:16],
            "path": path[:200],
            "status": status,
            "ms": round(seconds * 1e3, 1),
            "note": note,
        }
        if self._form == "json":
            self._write(orjson.dumps(line).decode())
        else:
            tail = f"  {note}" if note else ""
            self._write(
                f"{_now()}  {status or '---'}  {method[:16]:<6} {path[:200]!a}  {line['ms']} ms  {request_id}{tail}"
            )

    def defect(self, request_id: str, error: BaseException) -> None:
        stack = "".join(traceback.format_exception(error))
        if self._form == "json":
            self._write(
                orjson.dumps(
                    {"time": _now(), "id": request_id, "defect": repr(error), "stack": stack}
                ).decode()
            )
        else:
            self._write(f"{_now()}  defect in {request_id}\n{stack.rstrip()}")

    def say(self, text: str) -> None:
        self._write(
            orjson.dumps({"time": _now(), "say": text}).decode()
            if self._form == "json"
            else f"birkhoff: {text}"
        )

    def _write(self, line: str) -> None:
        with suppress(OSError, ValueError):  # whoever read the log is gone; the server goes on
            print(line, file=self._stream, flush=True)


def _now() -> str:
    now = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
