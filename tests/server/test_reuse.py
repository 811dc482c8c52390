"""Prefix reuse over HTTP: named contexts, cached tokens in usage, and reuse after a restart."""

from __future__ import annotations

import json

from tests.server.conftest import serving, user

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


def test_usage_counts_what_was_cached_in_every_api(served):
    """The cache holds whole pages of 128 tokens of a prompt that was seen before."""
    book = "A red kite flew over the hill and came down on the roof of a barn. " * 20
    ask = {"prompt": book, "max_tokens": 2}
    length = served.post("/v1/completions", ask).json()["usage"]["prompt_tokens"]
    cached = (length - 1) // 128 * 128
    assert cached >= 128

    names = [f"birkhoff_{name}_total" for name in ("prompt_tokens", "cached_tokens", "shared_pages")]
    before = [served.metric(name) for name in names]
    usage = served.post("/v1/completions", {**ask, "prompt": ["Hi", book, book], "n": 2}).json()["usage"]
    short = usage["prompt_tokens"] - 2 * length
    assert 0 < short < 8 and usage["prompt_tokens_details"]["cached_tokens"] == 2 * cached
    assert usage["completion_tokens"] == 12 and usage["total_tokens"] == short + 2 * length + 12
    counted = [served.metric(name) - old for name, old in zip(names, before)]
    assert counted == [short + 2 * length, 2 * cached, 2 * cached // 128]  # a prompt once, as in usage
    line = json.loads([line for line in served.log.read_text().splitlines() if "/v1/completions" in line][-1])
    assert (line["prompt_tokens"], line["output_tokens"]) == (usage["prompt_tokens"], 12)

    before = served.metric(names[0])
    steered = {**ask, "n": 2, "baseline": True, "interventions": [{"op": "add", "vector": "@spooky"}]}
    usage = served.post("/v1/completions", steered).json()["usage"]
    assert served.metric(names[0]) - before == usage["prompt_tokens"] == length  # nor with unsteered twins

    answer = served.post("/completion", {"prompt": book, "n_predict": 2}).json()
    assert (answer["tokens_evaluated"], answer["tokens_cached"]) == (length, cached)
    assert (answer["timings"]["cache_n"], answer["timings"]["prompt_n"]) == (cached, length - cached)

    chat = {"messages": user(book), "max_tokens": 2}
    counted = served.post("/v1/messages/count_tokens", {"messages": user(book)}).json()["input_tokens"]
    for first in (True, False):
        usage = served.post("/v1/messages", chat).json()["usage"]
        read = 0 if first else (counted - 1) // 128 * 128
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (counted - read, read)
    last = served.events("/v1/messages", chat)[-2]["usage"]
    assert (last["input_tokens"], last["cache_read_input_tokens"]) == (counted - read, read)
