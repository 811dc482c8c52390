"""Prefix reuse over HTTP: named contexts, cached tokens in usage, and reuse after a restart."""

from __future__ import annotations

from tests.server.conftest import serving

BOOK = "Once upon a time there was a small boat that wanted to see the other side of the lake. " * 12


def test_a_named_prompt_is_reused_and_survives_a_restart(tmp_path):
    flags = ["--context-root", str(tmp_path / "pages"), "--no-speculative"]
    request_body = {"prompt": BOOK, "max_tokens": 4, "temperature": 0, "context": "boat"}
    with serving(tmp_path / "first", *flags) as served:
        answers = [served.post("/v1/completions", request_body).json() for _ in range(2)]
        assert (
            served.metric("birkhoff_cached_tokens_total") >= 128
            and served.metric("birkhoff_drafted_tokens_total") == 0
        )
    with serving(tmp_path / "second", *flags) as served:
        answers.append(served.post("/v1/completions", request_body).json())
        refused = served.post("/v1/completions", {**request_body, "context": ""})
        assert refused.status_code == 400 and "context" in refused.text
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    known = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    length = answers[0]["usage"]["prompt_tokens"]
    assert known == [0] + [(length - 1) // 128 * 128] * 2 and known[1] >= 128
    assert answers[2]["interp"]["reuse"]["pages_shared"] == known[1] // 128
