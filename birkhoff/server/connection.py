"""Additions to uvicorn: connection limits and deadlines, and graceful shutdown.

`Connection` extends uvicorn's h11 protocol with a deadline for the request head, a timeout for clients that stop
reading, a limit on connections, and JSON errors for bytes that are not HTTP. `Server` drains on SIGTERM or SIGINT: it
lets running requests finish, exits at once on a second signal, and leaves the exit status to its caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import h11
import orjson
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from birkhoff.server.api_errors import ApiError
from birkhoff.server.middleware import STALLED
from birkhoff.server.server_settings import ServerSettings


def connection_class(settings: ServerSettings) -> type[H11Protocol]:
    """The protocol class for these settings; uvicorn creates one instance per connection."""

    class Connection(H11Protocol):
        def __init__(self, *arguments: Any, **keywords: Any):
            super().__init__(*arguments, **keywords)
            self._head_timer: asyncio.TimerHandle | None = None
            self._stall_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > settings.max_connections:
                refusal = ApiError(
                    503,
                    f"{settings.max_connections} connections are open, the most this server takes. Close some, or try "
                    "again in a second; --max-connections allows more.",
                    code="connections",
                    headers={"Retry-After": "1"},
                )
                self._close_with(refusal, b"503 Service Unavailable")
            else:
                self._start_head_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_head_timer()
            self._stop_stall_timer()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            """The send buffer is full because the client does not read; drop it after `stall_seconds`."""
            super().pause_writing()
            self._stall_timer = self._stall_timer or self.loop.call_later(
                settings.stall_seconds, self._drop_stalled
            )

        def resume_writing(self) -> None:
            self._stop_stall_timer()
            super().resume_writing()

        def _stop_stall_timer(self) -> None:
            if self._stall_timer is not None:
                self._stall_timer.cancel()
                self._stall_timer = None

        def _drop_stalled(self) -> None:
            if self.cycle is not None:
                self.cycle.scope.setdefault("state", {})["note"] = STALLED
            self.transport.abort()

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_head_timer()
            elif self.conn.their_state is h11.IDLE and not self.transport.is_closing():
                self._start_head_timer()

        def on_response_complete(self) -> None:
            self._stop_head_timer()
            super().on_response_complete()

        def send_400_response(self, msg: str) -> None:
            self._close_with(ApiError(400, msg, code="http-invalid"), b"400 Bad Request")

        def _start_head_timer(self) -> None:
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(settings.header_seconds, self._head_timed_out)

        def _stop_head_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _head_timed_out(self) -> None:
            self._close_with(
                ApiError(408, "the head of the call did not arrive in time.", code="head-too-slow"),
                b"408 Request Timeout",
            )

        def _close_with(self, error: ApiError, status: bytes) -> None:
            """Write an error directly, since h11 may be in a state that cannot send, and close."""
            if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
                body = orjson.dumps(error.as_json())
                head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\nconnection: close\r\n" % status
                head += b"".join(f"{name}: {value}\r\n".encode() for name, value in error.headers.items())
                self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            self.transport.close()

    return Connection


class Server(uvicorn.Server):
    """uvicorn's server, with `handle_exit` installed for SIGINT and SIGTERM while it serves."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {
            signum: signal.signal(signum, self.handle_exit) for signum in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(1)  # second signal: do not wait. Acknowledged captures are already on disk.
        self.should_exit = True
