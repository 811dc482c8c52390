"""Connections and the life of the server process, where uvicorn's habits are not ours.

`Connection` adds to uvicorn's h11 protocol: a deadline for the head of a call, one for readers that take nothing, a
limit on connections, and our error shape for bytes that are no HTTP. `Server` stops on SIGTERM or SIGINT by letting
running answers end, at once on a second signal, and leaves the exit status to its caller.
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
    """uvicorn makes one of these for every connection."""

    class Connection(H11Protocol):
        def __init__(self, *arguments: Any, **keywords: Any):
            super().__init__(*arguments, **keywords)
            self._deadline: asyncio.TimerHandle | None = None
            self._stall: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > settings.max_connections:
                refusal = ApiError(503, "too many connections. Try again later.", code="connections")
                self._close_with(refusal, b"503 Service Unavailable")
            else:
                self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_is_here()
            self._end_stall()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            """The system takes no more, since the reader takes nothing: that may not last."""
            super().pause_writing()
            self._stall = self._stall or self.loop.call_later(settings.stall_seconds, self._drop)

        def resume_writing(self) -> None:
            self._end_stall()
            super().resume_writing()

        def _end_stall(self) -> None:
            if self._stall is not None:
                self._stall.cancel()
                self._stall = None

        def _drop(self) -> None:
            if self.cycle is not None:
                self.cycle.scope.setdefault("state", {})["note"] = STALLED
            self.transport.abort()

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._head_is_here()
            elif self.conn.their_state is h11.IDLE and not self.transport.is_closing():
                self._expect_head()

        def on_response_complete(self) -> None:
            self._head_is_here()
            super().on_response_complete()

        def send_400_response(self, msg: str) -> None:
            self._close_with(ApiError(400, msg, code="http-invalid"), b"400 Bad Request")

        def _expect_head(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(settings.header_seconds, self._too_slow)

        def _head_is_here(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _too_slow(self) -> None:
            self._close_with(
                ApiError(408, "the head of the call did not arrive in time.", code="head-too-slow"),
                b"408 Request Timeout",
            )

        def _close_with(self, problem: ApiError, status: bytes) -> None:
            """Answer without h11, which may be in no state to send, and close."""
            if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
                body = orjson.dumps(problem.as_json())
                head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
                self.transport.write(head % (status, len(body)) + body)
            self.transport.close()

    return Connection


class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(
                1
            )  # whoever asks twice does not want to wait; what captures have acknowledged is on disk
        self.should_exit = True
