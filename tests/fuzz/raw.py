"""Mutated HTTP connections: request lines, header fields, lengths and chunks that are not as they should be."""

from __future__ import annotations

import json
import random
import socket

from tests.fuzz.bodies import CHAT, USER

BODY = json.dumps({"messages": USER, "max_tokens": 1}).encode()
HEAD = b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n" % CHAT.encode()
SEEDS = [
    HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /v1/models HTTP/1.0\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: http://127.0.0.1\r\n\r\n",
    b"GET /v1/interp/captures/%2e%2e/data HTTP/1.1\r\nHost: 127.0.0.1\r\nRange: bytes=0-9999999999\r\n\r\n",
    b"GET /v1/interp/features/delta/3 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
]
PIECES = [
    b"\r\n",
    b"\n",
    b"\0",
    b" ",
    b"\t",
    b":",
    b"Content-Length: -1\r\n",
    b"Content-Length: 99999999999999999999\r\n",
    b"Content-Length: 1\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip\r\n",
    b"Connection: close\r\n",
    b"Expect: 100-continue\r\n",
    b"Upgrade: h2c\r\n",
    b"Host: evil\r\n",
    b"X-Request-Id: " + b"a" * 200 + b"\r\n",
    b"ffffffffffffffff\r\n",
    b"%00",
    b"%ff",
    b"../" * 50,
    b"a" * 20_000,
    b"\xff\xfe",
]


def random_connection(dice: random.Random) -> bytes:
    """The bytes of one hostile connection: a seed with one to four pieces inserted, cut out or replaced."""
    raw = bytearray(dice.choice(SEEDS))
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(raw) + 1)
        what = dice.random()
        if what < 0.4:
            raw[at:at] = dice.choice(PIECES)
        elif what < 0.6:
            del raw[at : at + dice.randint(1, 40)]
        elif what < 0.8 and raw:
            raw[at % len(raw)] = dice.randrange(256)
        else:
            raw[at:at] = raw[dice.randrange(len(raw) + 1) :][:200]
    return bytes(raw)


def exchange(port: int, raw: bytes, seconds: float = 5.0) -> bytes:
    """Send bytes and close the sending side; what the server answers until it closes, or is silent."""
    with socket.create_connection(("127.0.0.1", port), seconds) as connection:
        connection.settimeout(seconds)
        parts = []
        try:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                parts.append(part)
        except (TimeoutError, ConnectionError):
            pass
    return b"".join(parts)


def verdict(port: int, raw: bytes) -> str:
    """What is wrong with the answer to a connection, or nothing: every answer is HTTP, and none is 5xx."""
    answer = exchange(port, raw)
    if answer and not answer.startswith(b"HTTP/1."):
        return f"not HTTP: {answer[:100]!r}"
    statuses = [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]]
    bad = [status for status in statuses if status.startswith(b"5") and status not in (b"501", b"505")]
    return f"answered {bad[0]!r}" if bad else ""
