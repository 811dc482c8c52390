"""Hostile traffic for `bench serve --hostile`: bodies that a server must refuse, beside honest clients.

Refused requests must leave nothing behind: the resident memory of the server is compared before, during and after
them, and honest clients keep their pace. Bodies are drawn from a seed: large numbers, malformed schemas, patterns, deep
nesting, long lists, unknown names.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from typing import Any

CHAT = "/v1/chat/completions"
NUMBERS = (0, -1, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**64, 1e38, 1e308)
JUNK: tuple[Any, ...] = (None, True, "", "x" * 3000, [], {}, [[]], {"a": {}}, [1] * 500, *NUMBERS)


def hostile_body(dice: random.Random) -> tuple[str, bytes]:
    """The route and the bytes of one body."""
    number, junk = dice.choice(NUMBERS), dice.choice(JUNK)
    messages = [{"role": "user", "content": f"Hi {dice.random()}"}]
    base: dict[str, Any] = {"messages": messages, "max_tokens": 1}
    where = dice.choice(({"generated": "all"}, {"generated": {"window": [0, number]}}, "all", [number], junk))
    edit = {"op": "patch", "at": {"hook": "mlp_out", "layers": [1]}, "source": "zeros", "where": where}
    schema = dice.choice(
        (
            {"properties": junk},
            {"type": "string", "pattern": f"((a{{1,{dice.randint(1, 99)}}}){{1,99}}b){{1,99}}"},
            {"enum": [f"{dice.random()}" for _ in range(dice.choice((1, 500, 5000)))]},
            {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, junk]}}},
            {"type": "object", "properties": {f"p{dice.random()}": {"type": "integer", "minimum": number}}},
        )
    )
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    bodies: tuple[dict[str, Any], ...] = (
        {**base, "max_tokens": number, "interventions": [edit]},
        {
            **base,
            "capture": {"memory": {"hooks": {"mlp_out": "all"}, "positions": where}},
            "max_tokens": number,
        },
        {**base, "tools": [tool], "tool_choice": "required", "temperature": junk},
        {**base, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}, "n": number},
        {
            **base,
            dice.choice(("stop", "logit_bias", "seed", "signals", "model", "user")): junk,
            "top_p": number,
        },
        {**base, **{f"field{dice.random()}": 1 for _ in range(100)}},
    )
    raw = json.dumps(dice.choice(bodies)).encode()
    if dice.random() < 0.1:
        raw = raw[: dice.randrange(len(raw))] + b"[" * dice.choice((1, 100, 10_000))
    return CHAT, raw


class HostileTraffic:
    """Threads that send hostile bodies until `stop`; a context manager."""

    def __init__(self, address: tuple[str, int], clients: int = 2, seed: int = 0):
        self._address = address
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.statuses: Counter[int] = Counter()
        self.slowest_refusal = 0.0
        self._threads = [
            threading.Thread(target=self._send, args=(random.Random(seed * 1000 + each),), daemon=True)
            for each in range(clients)
        ]

    def __enter__(self) -> HostileTraffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _send(self, dice: random.Random) -> None:
        while not self._stop.is_set():
            with closing(HTTPConnection(*self._address, timeout=120)) as connection:
                try:
                    for _ in range(200):
                        if self._stop.is_set():
                            return
                        path, raw = hostile_body(dice)
                        began = time.perf_counter()
                        connection.request("POST", path, raw, {"content-type": "application/json"})
                        answer = connection.getresponse()
                        answer.read()
                        self._count(answer.status, time.perf_counter() - began)
                except (OSError, HTTPException):
                    self._count(0, 0.0)

    def _count(self, status: int, seconds: float) -> None:
        with self._lock:
            self.statuses[status] += 1
            if 400 <= status < 500:
                self.slowest_refusal = max(self.slowest_refusal, seconds)
