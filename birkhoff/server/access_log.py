"""Access log: one line per HTTP request on stderr, as text or as JSON.

A line holds the request's id, method, path, status, duration and client: its address, or `key-N` if it sent the N-th
key. If it generated, also the tokens of prompt and output and the time to the first token. Prompts, keys and bodies are
never written. An unexpected exception is logged with its traceback under the request id that the client received.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TextIO

import orjson

from birkhoff.engine.request import Request


@dataclass(frozen=True)
class Generated:
    """What a request generated: tokens of its prompts and outputs, and milliseconds to its first token."""

    prompt_tokens: int
    output_tokens: int
    first_token_ms: float | None

    @classmethod
    def of(cls, requests: Sequence[Request], first_choices: Sequence[Request]) -> Generated | None:
        """Sum over the engine requests of an HTTP request; None if it had none. `first_choices` has one request of
        each prompt, which counts once."""
        if not requests:
            return None
        times = [request.timings for request in requests]
        first = [(t.first_token - t.submitted) * 1e3 for t in times if t.first_token is not None]
        return cls(
            sum(len(request.prompt_ids) for request in first_choices),
            sum(len(request.output_ids) for request in requests),
            round(min(first), 1) if first else None,
        )


class AccessLog:
    """Writes log lines to `stream`. `format` is `text`, `json` or `off` (exceptions are logged even when off)."""

    def __init__(self, format: str = "text", stream: TextIO | None = None):
        self._format = format
        self._stream = stream or sys.stderr

    def log_request(
        self,
        request_id: str,
        method: str,
        path: str,
        status: int,
        seconds: float,
        note: str = "",
        client: str = "",
        generated: Generated | None = None,
    ) -> None:
        if self._format == "off":
            return
        method, path, milliseconds = method[:16], path[:200], round(seconds * 1e3, 1)
        if self._format == "json":
            line = {"time": _now(), "id": request_id, "method": method, "path": path, "status": status}
            counts = {} if generated is None else asdict(generated)
            self._write(
                orjson.dumps({**line, "ms": milliseconds, "client": client, **counts, "note": note}).decode()
            )
        else:
            suffix = f"  {client}" if client else ""
            if generated is not None:
                first = generated.first_token_ms
                suffix += f"  {generated.prompt_tokens}+{generated.output_tokens} tokens"
                suffix += "" if first is None else f", first after {first} ms"
            suffix += f"  {note}" if note else ""
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
