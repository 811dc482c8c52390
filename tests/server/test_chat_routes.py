"""Chat completions over HTTP, complete and streamed, equal the output of the Python API."""

from __future__ import annotations

import pytest

import birkhoff
from tests.server.conftest import user

ASK = {"messages": user("Hello, who are you?"), "temperature": 0, "max_tokens": 30}


@pytest.fixture(scope="module")
def engine():
    with birkhoff.load("nano") as loaded:
        yield loaded


def test_a_response_equals_the_python_output(served, engine):
    answer = served.post("/v1/chat/completions", ASK)
    expected = engine.chat(ASK["messages"], temperature=0, max_tokens=30)
    body = answer.json()
    assert answer.status_code == 200 and answer.headers["x-request-id"].startswith("req-")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert body["choices"][0]["finish_reason"] == expected.finish_reason
    assert body["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert body["usage"]["completion_tokens"] == len(expected.token_ids)
    assert (
        body["object"] == "chat.completion" and body["model"] == "nano" and body["timings"]["decode_ms"] > 0
    )


def test_a_stream_follows_the_protocol_and_joins_to_the_response(served):
    whole = served.chat(**ASK | {"text": "Hello, who are you?"} | {"messages": ASK["messages"]})
    chunks = served.events("/v1/chat/completions", {**ASK, "stream_options": {"include_usage": True}})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""} and all(
        "role" not in delta for delta in deltas[1:]
    )
    assert "".join(delta.get("content", "") for delta in deltas) == whole["choices"][0]["message"]["content"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]]
    assert reasons[:-1] == [None] * (len(reasons) - 1) and reasons[-1] == whole["choices"][0]["finish_reason"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert len({chunk["id"] for chunk in chunks}) == 1
