"""`echo` with `logprobs`: the log-probabilities of a prompt are those of the model as the call steers it."""

from __future__ import annotations

import json

import openai
import pytest
import torch

import birkhoff
from birkhoff import Add, AttentionEdit, ExpertSet, Patch, SaeSet
from tests.server.conftest import serving

PROMPT = "Tom had a red ball. Mary had a blue hat. Tom lost his"
VECTOR = torch.linspace(-1, 1, 384)
ADD = {"op": "add", "at": {"hook": "mlp_out", "layers": [4]}, "vector": VECTOR.tolist(), "scale": 3.0}
EDITS = {
    "vector": ([ADD], [Add(VECTOR, "mlp_out", [4], scale=3.0)]),
    "some tokens": ([{**ADD, "where": [3, 4]}], [Add(VECTOR, "mlp_out", [4], scale=3.0, where=[3, 4])]),
    "generated tokens": ([{**ADD, "phase": "decode"}], []),
    "zeros": (
        [{"op": "patch", "at": {"hook": "mlp_out", "layers": [3]}, "source": "zeros"}],
        [Patch(0, "mlp_out", [3])],
    ),
    "experts": ([{"op": "experts", "at": {"layers": [4]}, "ban": [0, 5]}], [ExpertSet([4], ban=[0, 5])]),
    "head": ([{"op": "attention", "at": {"layers": [6]}, "heads": [1]}], [AttentionEdit([6], heads=[1])]),
    "feature": ([{"op": "sae", "module": "delta", "set": {"7": 9.0}}], [SaeSet("delta", {7: 9.0})]),
}


@pytest.fixture(scope="module")
def engine(dictionary):
    with birkhoff.load("nano") as loaded:
        loaded.attach("delta", dictionary)
        yield loaded


def of_prompt(engine, steer) -> torch.Tensor:
    """The log-probability of every token of the prompt but the first."""
    ids = torch.tensor(engine.prompt_ids(PROMPT))
    return engine.logits(PROMPT, steer=steer)[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def echoed(served, **fields) -> dict:
    body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1, **fields}
    answer = served.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("name", EDITS)
def test_prompt_logprobs_are_those_of_the_steered_model(served, engine, name):
    wire, steer = EDITS[name]
    choice = echoed(served, interventions=wire)["choices"][0]
    expected, plain = of_prompt(engine, steer), of_prompt(engine, None)
    found = torch.tensor(choice["logprobs"]["token_logprobs"][1:-1])
    assert (found - expected).abs().max() < 1e-4
    assert bool(steer) == bool((found - plain).abs().max() > 1e-2)


def test_the_unsteered_twin_and_every_choice_have_their_own(served, engine):
    steer = EDITS["vector"][1]
    answer = echoed(served, interventions=[ADD], baseline=True, n=2, seed=1, temperature=1)
    steered, plain = of_prompt(engine, steer), of_prompt(engine, None)
    for part, expected in (("choices", steered), ("baseline", plain)):
        assert len(answer[part]) == 2
        for choice in answer[part]:
            found = torch.tensor(choice["logprobs"]["token_logprobs"][1 : len(expected) + 1])
            assert (found - expected).abs().max() < 1e-4


def test_edits_of_every_request_count(served, engine):
    assert served.post("/v1/steering/set", {"interventions": [ADD]}).status_code == 200
    try:
        choice = echoed(served)["choices"][0]
    finally:
        assert served.post("/v1/steering/clear", {}).status_code == 200
    found = torch.tensor(choice["logprobs"]["token_logprobs"][1:-1])
    assert (found - of_prompt(engine, EDITS["vector"][1])).abs().max() < 1e-4


def test_no_tokens_are_the_prompt_alone(served, engine):
    """As evaluation harnesses score texts: log-probabilities of the prompt, nothing after it, nothing counted."""
    answer = echoed(served, max_tokens=0)
    (choice,) = answer["choices"]
    one = echoed(served, max_tokens=1)["choices"][0]
    count = len(engine.prompt_ids(PROMPT))
    assert choice["text"] == PROMPT and choice["finish_reason"] == "length" and choice["stop_reason"] is None
    found = choice["logprobs"]
    assert found["token_logprobs"][0] is None
    assert (torch.tensor(found["token_logprobs"][1:]) - of_prompt(engine, None)).abs().max() < 1e-4
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert len(found[name]) == count and found[name] == one["logprobs"][name][:count]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (count, 0, count)
    steered = echoed(served, max_tokens=0, interventions=[ADD])["choices"][0]["logprobs"]["token_logprobs"]
    assert (torch.tensor(steered[1:]) - of_prompt(engine, EDITS["vector"][1])).abs().max() < 1e-4


def test_no_tokens_of_several_prompts_and_choices(served, engine):
    prompts = [PROMPT, "Once upon a time", engine.prompt_ids("The fox")]
    for some in (prompts[:2], prompts[2:]):
        answer = echoed(served, prompt=some, n=2, max_tokens=0, return_token_ids=True, logprobs=0)
        texts = [text for text in some for _ in range(2)]
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
        for text, choice in zip(texts, answer["choices"]):
            assert (
                choice["text"] == (text if isinstance(text, str) else "The fox") and choice["token_ids"] == []
            )
            assert len(choice["logprobs"]["tokens"]) == len(engine.prompt_ids(text))
        count = sum(len(engine.prompt_ids(text)) for text in some)
        assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == count
    plain = echoed(served, max_tokens=0, logprobs=None)["choices"][0]
    assert plain["text"] == PROMPT and plain["logprobs"] is None


def test_no_tokens_in_a_stream(served, engine):
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "n": 2, "stream": True}
    answer = served.post("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in range(2):
        own = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == PROMPT
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["length"]
    assert chunks[-1]["usage"]["completion_tokens"] == 0
    assert chunks[-1]["usage"]["total_tokens"] == len(engine.prompt_ids(PROMPT))


def test_no_tokens_need_echo(served):
    for fields in ({}, {"echo": False}, {"logprobs": 1}):
        answer = served.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 0, **fields})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_tokens"
        assert "Set echo to score the prompt" in answer.json()["error"]["message"]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 0}
    assert served.post("/v1/chat/completions", chat).status_code == 400


def test_no_tokens_are_computed_or_counted(served, engine):
    """Nothing is sampled after the prompt: neither metrics nor the log have a token, or a time to the first one."""
    names = ("birkhoff_generated_tokens_total", "birkhoff_time_to_first_token_seconds_count")
    before, prompts = [served.metric(name) for name in names], served.metric("birkhoff_prompt_tokens_total")
    answer = served.post(
        "/v1/completions", {"prompt": PROMPT, "max_tokens": 0, "echo": True, "n": 3, "return_token_ids": True}
    )
    assert [choice["token_ids"] for choice in answer.json()["choices"]] == [[]] * 3
    assert [served.metric(name) for name in names] == before
    assert served.metric("birkhoff_prompt_tokens_total") - prompts == len(engine.prompt_ids(PROMPT))
    (line,) = [line for line in log_lines(served) if line["id"] == answer.headers["x-request-id"]]
    assert (line["prompt_tokens"], line["output_tokens"]) == (len(engine.prompt_ids(PROMPT)), 0)
    assert line["first_token_ms"] is None
    refused = served.post(
        "/v1/completions", {"prompt": PROMPT, "max_tokens": 0, "echo": True, "min_tokens": 1}
    )
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "min_tokens"


def log_lines(served) -> list[dict]:
    return [json.loads(line) for line in served.log.read_text().splitlines() if line.startswith("{")]


def test_a_prompt_without_tokens_after_it_may_fill_the_context(tmp_path):
    with serving(tmp_path, "--max-context", "256") as small:
        client = openai.OpenAI(base_url=small.url + "/v1", api_key="none", max_retries=0)

        def score(length: int, **more):
            return client.completions.create(
                **{
                    "model": "nano",
                    "prompt": [9] * length,
                    "max_tokens": 0,
                    "echo": True,
                    "logprobs": 0,
                    **more,
                }
            )

        assert score(256).usage.total_tokens == 256
        assert len(score(256).choices[0].logprobs.tokens) == 256
        *_, last = score(256, stream=True, stream_options={"include_usage": True})
        assert last.usage.total_tokens == 256
        for length, more in ((257, {}), (256, {"max_tokens": 1})):
            with pytest.raises(openai.BadRequestError) as refused:
                score(length, **more)
            assert refused.value.code == "context_length_exceeded"
        vector = client.embeddings.create(model="nano", input=[9] * 256)
        assert vector.usage.prompt_tokens == 256
        body = {"prompt": [9] * 256, "n_predict": 0}
        answer = small.post("/completion", body).json()
        assert (answer["content"], answer["tokens_predicted"], answer["tokens_evaluated"]) == ("", 0, 256)
        assert answer["stop_type"] == "limit" and answer["timings"]["prompt_ms"] > 0
        (event,) = small.events("/completion", body)
        assert event["stop"] and event["tokens_predicted"] == 0
        assert small.metric("birkhoff_generated_tokens_total") == 0


@pytest.mark.parametrize("steered", [False, True])
def test_a_stream_begins_with_the_log_probabilities_of_the_prompt(served, engine, steered):
    client = openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
    prompts = [PROMPT, "Ünïcödé: 我们 🙂 once"]
    body = {"echo": True, "logprobs": 2, "max_tokens": 5, "temperature": 0, "n": 2, "model": "nano"}
    if steered:
        prompts = prompts[:1]
        body["extra_body"] = {"interventions": [ADD], "baseline": True}
    whole = client.completions.create(prompt=prompts, **body)
    twins = [openai.types.CompletionChoice.construct(**each) for each in getattr(whole, "baseline", ())]
    choices = [*whole.choices, *twins]
    streamed = [[] for _ in choices]
    for chunk in client.completions.create(prompt=prompts, **body, stream=True):
        (choice,) = chunk.choices
        streamed[choice.index].append(choice)
        assert bool(getattr(chunk, "baseline", False)) == (choice.index >= len(whole.choices))
    for expected, (first, *rest) in zip(choices, streamed):
        count = len(engine.prompt_ids(first.text))
        assert first.text in prompts and len(first.logprobs.tokens) == count
        assert first.logprobs.token_logprobs[0] is None and first.finish_reason is None
        pieces = [choice for choice in (first, *rest) if choice.logprobs is not None]
        assert "".join(choice.text for choice in (first, *rest)) == expected.text
        for name in ("tokens", "text_offset"):
            joined = [item for choice in pieces for item in getattr(choice.logprobs, name)]
            assert joined == getattr(expected.logprobs, name)
        found = [item for choice in pieces for item in choice.logprobs.token_logprobs]
        assert found[1:] == pytest.approx(expected.logprobs.token_logprobs[1:], abs=1e-4)
        assert len(expected.logprobs.tokens) == count + 5


def test_prompt_logprobs_that_are_not_finite_end_a_stream_with_an_error(served):
    edit = {**ADD, "vector": [3e38] * 384, "scale": 3e38}
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 0, "interventions": [edit]}
    whole = served.post("/v1/completions", body)
    events = served.events("/v1/completions", body)
    assert whole.status_code == 400 and whole.json()["error"]["code"] == "logits-invalid"
    assert [event["error"]["code"] for event in events] == ["logits-invalid"]
