"""Callers of a server that cost the machine next to nothing: one thread, plain sockets, bytes that are looked at once.

A caller asks for one streamed answer and notes when its tokens came. Calls are HTTP/1.0, so that an answer ends with
its connection and nothing has to be taken out of chunks. Thousands of tokens a second leave most of a core free: what
a measurement says of a server on the same machine is then said of the server.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

_TOKENS = re.compile(rb'"token_ids":\[')
_MADE = re.compile(rb'"output_tokens":(\d+)')


@dataclass
class Seen:
    """What callers saw."""

    first: list[float] = field(default_factory=list)  # milliseconds to the first token
    between: list[float] = field(default_factory=list)  # milliseconds between tokens
    tokens: int = 0
    ended: int = 0
    failed: list[str] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)


class Caller:
    """One call and what has come of it."""

    def __init__(self, address: tuple[str, int], body: dict[str, Any], seen: Seen):
        data = json.dumps({**body, "stream": True, "return_token_ids": True}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.0\r\nhost: {address[0]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n\r\n"
        )
        self._seen = seen
        self._rest = b""
        self._status = 0
        self._done = False
        self._first = True
        self._last = time.perf_counter()
        self.socket = socket.create_connection(address, timeout=120)
        self.socket.sendall(head.encode() + data)
        self.socket.setblocking(False)

    def read(self) -> bool:
        """Take what has come; False when that was all."""
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError as error:
            self._seen.failed.append(repr(error))
            data = b""
        if data:
            self._take(data, time.perf_counter())
            return True
        self.socket.close()
        self._seen.ended += self._done
        if self._status in (0, 200) and not self._done:
            self._seen.failed.append("the stream broke off")
        return False

    def _take(self, data: bytes, now: float) -> None:
        self._rest += data
        if not self._status:
            head, found, self._rest = self._rest.partition(b"\r\n\r\n")
            if not found:
                self._rest = head
                return
            self._status = int(head.split(b" ", 2)[1])
            self._seen.statuses[self._status] = self._seen.statuses.get(self._status, 0) + 1
        whole, _, self._rest = self._rest.rpartition(b"\n\n")
        if self._status != 200 or not whole:
            return
        for frame in whole.split(b"\n\n"):
            if b'"delta":{' in frame and _TOKENS.search(frame):
                times = self._seen.first if self._first else self._seen.between
                times.append((now - self._last) * 1e3)
                self._first = False
                self._last = now
            elif frame.startswith(b'data: {"error"'):
                self._seen.failed.append(frame.decode()[:200])
            elif frame == b"data: [DONE]":
                self._done = True
            elif made := _MADE.search(frame):
                self._seen.tokens += int(made[1])


def call_all(
    address: tuple[str, int],
    bodies: Iterator[dict[str, Any]],
    at_once: int,
    tick: Callable[[], None] = lambda: None,
    tick_seconds: float = 1.0,
) -> Seen:
    """Keep so many calls going for as long as there are bodies, and see the last of them end."""
    seen = Seen()
    with selectors.DefaultSelector() as waiting:

        def begin() -> None:
            body = next(bodies, None)
            if body is not None:
                caller = Caller(address, body, seen)
                waiting.register(caller.socket, selectors.EVENT_READ, caller)

        for _ in range(at_once):
            begin()
        due = time.monotonic() + tick_seconds
        while waiting.get_map():
            for key, _ in waiting.select(max(due - time.monotonic(), 0)):
                caller: Caller = key.data
                if not caller.read():
                    waiting.unregister(key.fileobj)
                    begin()
            if time.monotonic() >= due:
                tick()
                due += tick_seconds
    return seen
