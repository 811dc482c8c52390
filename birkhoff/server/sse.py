"""Server-sent events: frames, signs of life, and an end as soon as the reader is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PING = b": still here\n\n"
DONE = b"data: [DONE]\n\n"
OPTIONS = orjson.OPT_SERIALIZE_NUMPY


def frame(data: Any, event: str | None = None) -> bytes:
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + orjson.dumps(data, option=OPTIONS) + b"\n\n"


class EventStream(Response):
    """Sends what `frames` yields; a reader that leaves ends it at once, wherever it waits. `leave` is called at the
    end, whatever it was."""

    media_type = "text/event-stream"

    def __init__(
        self, frames: AsyncIterator[bytes], leave: Callable[[], None], media_type: str | None = None
    ):
        super().__init__(media_type=media_type or self.media_type)
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-store"
        self._frames = frames
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._send_all(send))
        try:
            left = await first_of(work, receive)
        finally:
            if not work.done():
                work.cancel()
                await asyncio.wait([work])
            self._leave()
        if left:
            scope["state"].setdefault("note", "left")
        else:
            work.result()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._frames) as frames:  # type: ignore[type-var]
            async for data in frames:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def first_of(work: asyncio.Future[Any], receive: Receive) -> bool:
    """Wait for `work` or for the client to leave; True when it left."""
    watch = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
        return not work.done()
    finally:
        watch.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
