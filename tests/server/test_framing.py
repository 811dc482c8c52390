"""Streams: concatenated deltas equal the unstreamed output for every packet split, and markers never leak."""

from __future__ import annotations

import json
import random
import socket

import pytest

from tests.server.conftest import user
from tests.sizes import scaled

CHAT = "/v1/chat/completions"


class Reader:
    """A minimal event stream parser."""

    def __init__(self):
        self.data, self._bytes = [], b""

    def feed(self, piece: bytes) -> None:
        self._bytes += piece
        while b"\n\n" in self._bytes:
            event, self._bytes = self._bytes.split(b"\n\n", 1)
            for line in event.split(b"\n"):
                if line.startswith(b"data: "):
                    self.data.append(line[6:].decode())


def read(raw: bytes, cuts: list[int]) -> list[str]:
    reader, start = Reader(), 0
    for cut in [*sorted(cuts), len(raw)]:
        reader.feed(raw[start:cut])
        start = cut
    return reader.data


def content(data: list[str]) -> str:
    chunks = [json.loads(each) for each in data if each != "[DONE]"]
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


ASKS = [
    {"messages": user("Hello, who are you?"), "temperature": 0, "max_tokens": 24},
    {
        "messages": user("Say something with an emoji 🦊 é 漢."),
        "temperature": 1.5,
        "seed": 2,
        "max_tokens": 40,
    },
    {"messages": user("Count."), "temperature": 2, "seed": 9, "max_tokens": 60, "ignore_eos": True},
]


@pytest.mark.parametrize("index", range(len(ASKS)))
def test_r16_every_split_gives_the_unstreamed_text(served, index):
    request_body = ASKS[index]
    whole = served.post(CHAT, request_body).json()["choices"][0]["message"]["content"]
    raw = served.post(CHAT, {**request_body, "stream": True}).content
    assert content(read(raw, [])) == whole
    for cut in range(len(raw)):  # every possible packet boundary
        if cut % scaled(1, 17) == 0:
            assert content(read(raw, [cut])) == whole
    dice = random.Random(index)
    for _ in range(scaled(200, 20)):
        assert content(read(raw, dice.sample(range(len(raw)), 9))) == whole
    assert content(read(raw, list(range(len(raw))))) == whole
    assert raw.endswith(b"data: [DONE]\n\n")


def test_r16_every_chunk_contains_complete_characters(served):
    """At high temperature tokens are parts of characters; no chunk contains an incomplete one."""
    for seed in range(scaled(40, 3)):
        request_body = {"prompt": "🦊", "temperature": 2, "seed": seed, "max_tokens": 40, "ignore_eos": True}
        whole = served.post("/v1/completions", request_body).json()["choices"][0]["text"]
        chunks = served.events("/v1/completions", request_body)
        assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == whole


def test_r16_a_client_that_reads_one_byte_at_a_time(served):
    body = json.dumps({**ASKS[0], "stream": True}).encode()
    whole = served.post(CHAT, ASKS[0]).json()["choices"][0]["message"]["content"]
    head = (
        f"POST {CHAT} HTTP/1.0\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode()
    with socket.create_connection(("127.0.0.1", served.port), timeout=300) as connection:
        connection.sendall(head + body)
        raw = b""
        while piece := connection.recv(1):
            raw += piece
    assert content(read(raw.partition(b"\r\n\r\n")[2], [])) == whole


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_tool_markers_never_leak(served, choice):
    schema = {
        "type": "object",
        "properties": {"what": {"type": "string", "maxLength": 5}},
        "required": ["what"],
    }
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    request_body = {
        "messages": user("Look."),
        "tools": [tool],
        "tool_choice": choice,
        "max_tokens": 120,
        "seed": 1,
    }
    chunks = served.events(CHAT, request_body)
    deltas = [each["delta"] for chunk in chunks for each in chunk["choices"]]
    assert not any("DSML" in json.dumps(delta, ensure_ascii=False) for delta in deltas)
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    if choice == "required":
        assert all("index" in call for call in calls) and sum("id" in call for call in calls) >= 1
        first = [call for call in calls if call["index"] == 0]
        assert first[0]["function"] == {"name": "look", "arguments": ""}
        assert all(set(call) == {"index", "function"} for call in first[1:])
        assert set(json.loads("".join(call["function"]["arguments"] for call in first))) == {"what"}
