"""A load generator that hardly uses the CPU: one thread, plain sockets, every byte inspected once.

A client requests one streamed answer and records when its tokens arrived. Requests are HTTP/1.0, so that an answer ends
with its connection and needs no chunked decoding. At thousands of tokens per second most of a core stays free, so
that a server can be measured on the same machine.
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
class LoadResult:
    """Latencies and outcomes of all requests."""

    first: list[float] = field(default_factory=list)  # milliseconds to the first token
    between: list[float] = field(default_factory=list)  # milliseconds between tokens
    tokens: int = 0
    ended: int = 0
    failed: list[str] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)


class Client:
    """One request and its progress."""

    def __init__(self, address: tuple[str, int], body: dict[str, Any], result: LoadResult):
        data = json.dumps({**body, "stream": True, "return_token_ids": True}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.0\r\nhost: {address[0]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n\r\n"
        )
        self._result = result
        self._rest = b""
        self._status = 0
        self._done = False
        self._first = True
        self._last = time.perf_counter()
        self.socket = socket.create_connection(address, timeout=120)
        self.socket.sendall(head.encode() + data)
        self.socket.setblocking(False)

    def read(self) -> bool:
        """Process available bytes; False at the end of the answer."""
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError as error:
            self._result.failed.append(repr(error))
            data = b""
        if data:
            self._process(data, time.perf_counter())
            return True
        self.socket.close()
        self._result.ended += self._done
        if self._status in (0, 200) and not self._done:
            self._result.failed.append("the stream broke off")
        return False

    def _process(self, data: bytes, now: float) -> None:
        self._rest += data
        if not self._status:
            head, separator, self._rest = self._rest.partition(b"\r\n\r\n")
            if not separator:
                self._rest = head
                return
            self._status = int(head.split(b" ", 2)[1])
            self._result.statuses[self._status] = self._result.statuses.get(self._status, 0) + 1
        frames, _, self._rest = self._rest.rpartition(b"\n\n")
        if self._status != 200 or not frames:
            return
        for frame in frames.split(b"\n\n"):
            if b'"delta":{' in frame and _TOKENS.search(frame):
                times = self._result.first if self._first else self._result.between
                times.append((now - self._last) * 1e3)
                self._first = False
                self._last = now
            elif frame.startswith(b'data: {"error"'):
                self._result.failed.append(frame.decode()[:200])
            elif frame == b"data: [DONE]":
                self._done = True
            elif match := _MADE.search(frame):
                self._result.tokens += int(match[1])


def run_load(
    address: tuple[str, int],
    bodies: Iterator[dict[str, Any]],
    concurrency: int,
    tick: Callable[[], None] = lambda: None,
    tick_seconds: float = 1.0,
) -> LoadResult:
    """Keep `concurrency` requests running while there are bodies, until the last one has ended."""
    result = LoadResult()
    with selectors.DefaultSelector() as selector:

        def start_client() -> None:
            body = next(bodies, None)
            if body is not None:
                client = Client(address, body, result)
                selector.register(client.socket, selectors.EVENT_READ, client)

        for _ in range(concurrency):
            start_client()
        next_tick = time.monotonic() + tick_seconds
        while selector.get_map():
            for key, _ in selector.select(max(next_tick - time.monotonic(), 0)):
                client: Client = key.data
                if not client.read():
                    selector.unregister(key.fileobj)
                    start_client()
            if time.monotonic() >= next_tick:
                tick()
                next_tick += tick_seconds
    return result
