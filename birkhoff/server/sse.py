"""Server-sent events: formatting, heartbeats, and streams that end as soon as the client disconnects.

sse-starlette does not fit: it ends streams on SIGTERM, where this server lets them finish, and sends heartbeats on a
fixed timer, where this server sends them only into idle streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, cast

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PING = b": still here\n\n"
DONE = b"data: [DONE]\n\n"


def format_event(data: Any, event: str | None = None) -> bytes:
    """One event with `data` as JSON, and an `event:` line if it has a name."""
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n\n"


class EventStream(Response):
    """Sends the bytes that `events` yields.

    If the client disconnects, the iterator is cancelled at once, wherever it waits. `on_close` is called at the end in
    every case."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], on_close: Callable[[], None], media_type: str = media_type
    ):
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-store"
        self._events = cast(AsyncGenerator[bytes, None], events)
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send))
        try:
            disconnected = await wait_or_disconnect(sending, receive)
        finally:
            if not sending.done():
                sending.cancel()
                await asyncio.wait([sending])
            self._on_close()
        if disconnected:
            scope["state"].setdefault("note", "left")
        else:
            sending.result()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def wait_or_disconnect(work: asyncio.Future[Any], receive: Receive) -> bool:
    """Wait until `work` is done or the client disconnects. Returns True if it disconnected."""
    disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait([work, disconnect], return_when=asyncio.FIRST_COMPLETED)
        return not work.done()
    finally:
        disconnect.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
