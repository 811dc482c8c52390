"""Routes of other servers (Ollama, llama.cpp), embeddings, and the API page with its examples."""

from __future__ import annotations

import base64
import json
from html.parser import HTMLParser

import numpy as np
import ollama
import openai
import pytest

import birkhoff
from birkhoff.server.route_examples import EXAMPLES
from tests.server.conftest import user

QUIET = {"temperature": 0, "num_predict": 12}


@pytest.fixture(scope="module")
def engine():
    with birkhoff.load("nano", max_requests=1) as loaded:
        yield loaded


def lines(served, path, body):
    """The parsed lines of a streamed answer in Ollama's format."""
    answer = served.post(path, body)
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/x-ndjson", answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def test_every_route_with_a_body_has_an_example_that_works(served):
    document = served.get("/openapi.json").json()
    bodies = {
        path: operation["requestBody"]["content"]["application/json"]["example"]
        for path, operations in document["paths"].items()
        for operation in operations.values()
        if operation.get("requestBody", {}).get("required")
    }
    assert bodies == EXAMPLES
    for path, body in bodies.items():
        answer = served.post(path, body)
        assert answer.status_code == 200, (path, answer.text)
    for path in ("/v1/steering/clear", "/v1/steering/sae/clear"):
        assert served.post(path).status_code == 200


def test_the_api_page_lists_every_route_and_loads_nothing_from_elsewhere(served):
    answer = served.get("/docs")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    found = []

    class Page(HTMLParser):
        def handle_starttag(self, tag, attributes):
            found.append((tag, dict(attributes)))

    Page().feed(answer.text)
    document = served.get("/openapi.json").json()
    operations = {op["operationId"] for methods in document["paths"].values() for op in methods.values()}
    assert {values["id"] for tag, values in found if tag == "details"} == operations
    assert not [tag for tag, _ in found if tag in ("script", "link", "img")]
    assert {values["href"] for tag, values in found if tag == "a"} == {"/openapi.json"}


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_are_rows_of_the_hook_they_name(served, engine, pooling):
    texts = ["The fox ran into the wood.", "Hello"]
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    answer = client.embeddings.create(model="nano", input=texts, extra_body={"pooling": pooling})
    last = engine.config.num_hidden_layers - 1
    for text, entry in zip(texts, answer.data):
        rows = engine.trace(engine.prompt_ids(text), ["final_hidden"])["final_hidden", last].float()
        expected = rows.mean(0) if pooling == "mean" else rows[-1]
        assert np.allclose(entry.embedding, expected.numpy(), atol=1e-3)
    assert answer.usage.prompt_tokens == sum(len(engine.prompt_ids(text)) for text in texts)
    raw = served.post(
        "/v1/embeddings", {"input": texts[0], "encoding_format": "base64", "pooling": pooling}
    ).json()
    values = np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4")
    assert np.allclose(values, answer.data[0].embedding, atol=1e-5)


def test_embeddings_refuse_what_they_cannot_do(served):
    wrong = served.post("/v1/embeddings", {"input": "Hi", "hook": "mhc_streams_pre_attn"})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "hook"
    assert served.post("/v1/embeddings", {"input": "Hi", "dimensions": 8}).status_code == 400
    assert served.post("/v1/embeddings", {"input": "Hi", "model": "other"}).status_code == 404
    assert served.post("/v1/embeddings", {"input": "Hi", "hook": "mlp_out", "layer": 3}).status_code == 200


def test_ollama_chat_streams_lines_and_ends_with_counts(served, engine):
    body = {"model": "nano:latest", "messages": user("Hello, who are you?"), "options": QUIET}
    *parts, last = lines(served, "/api/chat", body)
    text = "".join(part["message"]["content"] for part in parts)
    expected = engine.chat(body["messages"], temperature=0, max_tokens=12)
    assert text == expected.text and not any(part["done"] for part in parts)
    assert last["done"] and last["done_reason"] == expected.finish_reason and last["model"] == "nano:latest"
    assert (
        last["eval_count"] == len(expected.token_ids) and last["total_duration"] >= last["eval_duration"] > 0
    )
    whole = served.post("/api/chat", {**body, "stream": False}).json()
    assert whole["message"] == {"role": "assistant", "content": text} and whole["done"]


def test_ollama_generate_uses_the_chat_format_unless_raw(served, engine):
    for raw in (False, True):
        body = {"model": "nano", "prompt": "Once upon a time", "raw": raw, "options": QUIET}
        *parts, last = lines(served, "/api/generate", body)
        text = "".join(part["response"] for part in parts)
        prompt = "Once upon a time" if raw else user("Once upon a time")
        call = engine.generate if raw else engine.chat
        assert text == call(prompt, temperature=0, max_tokens=12).text and last["response"] == ""
    steered = {**body, "interventions": [{"op": "add", "vector": "@spooky", "scale": 2.0}]}
    assert "".join(part["response"] for part in lines(served, "/api/generate", steered)) != text


def test_ollama_s_own_client_chats_generates_and_lists(served, engine):
    with ollama.Client(host=served.url) as client:
        assert [model.model for model in client.list().models] == ["nano"]
        question, options = user("Tell me a story."), {"temperature": 0, "num_predict": 12}
        whole = client.chat(model="nano", messages=question, options=options)
        assert whole.done and whole.done_reason == "length" and whole.eval_count == 12
        told = engine.chat(question, temperature=0, max_tokens=12)
        assert whole.message.content == told.text
        parts = list(client.chat(model="nano", messages=question, options=options, stream=True))
        assert "".join(part.message.content for part in parts) == whole.message.content and parts[-1].done
        told = client.generate(model="nano", prompt="Once upon a time", options=options)
        pieces = client.generate(model="nano", prompt="Once upon a time", options=options, stream=True)
        assert told.response and "".join(piece.response for piece in pieces) == told.response
        with pytest.raises(ollama.ResponseError, match="not served here"):
            client.chat(model="llama3", messages=question)


def test_ollama_lists_models_and_reports_errors_as_text(served):
    assert [model["name"] for model in served.get("/api/tags").json()["models"]] == ["nano"]
    assert served.get("/api/version").json()["version"] == birkhoff.__version__
    unknown = served.post("/api/chat", {"model": "llama3", "messages": user("Hi")})
    assert unknown.status_code == 404 and "llama3" in unknown.json()["error"]
    refused = served.post("/api/generate", {"prompt": "Hi", "options": {"temprature": 1}})
    assert refused.status_code == 400 and "temprature" in refused.json()["error"]
    assert served.post("/api/generate", {"prompt": "Hi", "suffix": "."}).status_code == 400
    schema = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}}}
    schema |= {"required": ["age"], "additionalProperties": False}
    body = {
        "messages": user("How old?"),
        "format": schema,
        "stream": False,
        "options": {"seed": 1, "num_predict": 60},
    }
    assert set(json.loads(served.post("/api/chat", body).json()["message"]["content"])) == {"age"}


def test_llama_cpp_completion_whole_and_streamed(served, engine):
    body = {"prompt": "Once upon a time", "n_predict": 8, "temperature": 0}
    whole = served.post("/completion", body).json()
    expected = engine.generate("Once upon a time", max_tokens=8, temperature=0)
    assert whole["content"] == expected.text and whole["stop"] and whole["stop_type"] == "limit"
    assert whole["tokens_predicted"] == 8 and whole["timings"]["predicted_n"] == 8
    *parts, last = served.events("/completion", body)
    assert "".join(part["content"] for part in parts) == expected.text and last["stop"]
    assert [token for part in parts for token in part["tokens"]] == list(expected.token_ids)
    word = expected.text.split()[-1]
    stopped = served.post("/completion", {**body, "stop": [word]}).json()
    assert stopped["stop_type"] == "word" and stopped["stopping_word"] == word
    assert served.post("/completion", {**body, "grammar": "root ::= x"}).status_code == 400


def test_llama_cpp_tokenize_and_detokenize(served, engine):
    text = "Once upon a time"
    ids = served.post("/tokenize", {"content": text}).json()
    assert ids == {"tokens": engine.tokenizer.encode(text)}
    special = served.post("/tokenize", {"content": text, "add_special": True}).json()["tokens"]
    assert special == [engine.config.bos_token_id, *ids["tokens"]]
    pieces = served.post("/tokenize", {"content": text, "with_pieces": True}).json()["tokens"]
    assert "".join(piece["piece"] for piece in pieces) == text
    assert served.post("/detokenize", ids).json()["content"] == text
    assert served.post("/tokenize", {"content": text, "prompt": text}).status_code == 400


def test_ollama_loads_and_unloads_without_a_prompt(served):
    """One object with the reason, streamed or not. The model stays, which a warning says."""
    with ollama.Client(host=served.url) as client:
        loaded = client.generate(model="nano")
        assert loaded.done and (loaded.done_reason, loaded.response, loaded.eval_count) == ("load", "", None)
        (line,) = client.generate(model="nano", prompt="", keep_alive="5m", stream=True)
        assert line.done_reason == "load"
        chat = client.chat(model="nano", messages=[], keep_alive=0)
        assert chat.done and chat.done_reason == "unload" and chat.message.content == ""
        with pytest.raises(ollama.ResponseError, match="not served here"):
            client.generate(model="llama3")
        assert [model.model for model in client.ps().models] == ["nano"]
    before = served.metric("birkhoff_prompt_tokens_total")
    for value, reason in (
        (0, "unload"),
        ("0", "unload"),
        ("0m0s", "unload"),
        (-1, "load"),
        ("-1m", "load"),
        ("1h1.5m", "load"),
    ):
        answer = served.post("/api/generate", {"model": "nano", "keep_alive": value})
        assert answer.json()["done_reason"] == reason and "keep_alive" in answer.json()["warnings"][0]
        assert answer.headers["content-type"] == "application/json"
    assert served.metric("birkhoff_prompt_tokens_total") == before
    strict = served.post("/api/generate", {"model": "nano", "keep_alive": 0}, **{"x-strict": "1"})
    assert strict.status_code == 400 and "no effect" in strict.json()["error"]
    for wrong in ("soon", "5", "", True, [], "1" * 100):
        for more in ({}, {"prompt": "Hi"}):
            refused = served.post("/api/generate", {"model": "nano", "keep_alive": wrong, **more})
            assert refused.status_code == 400 and "expected seconds or a duration" in refused.json()["error"]


def test_ollama_and_llama_cpp_answers_have_warnings(served):
    body = {"prompt": "Hi", "options": {"num_predict": 2, "num_ctx": 4096}, "keep_alive": 60}
    *parts, last = lines(served, "/api/generate", body)
    assert len(last["warnings"]) == 2 and not any("warnings" in part for part in parts)
    assert served.post("/api/generate", {**body, "stream": False}).json()["warnings"] == last["warnings"]
    answer = served.post("/completion", {"prompt": "Hi", "n_predict": 2, "cache_prompt": True}).json()
    assert "cache_prompt" in answer["warnings"][0]


def test_ollama_embeddings_are_the_mean_of_the_last_rows(served, engine):
    texts = ["The fox ran.", "The dog slept. " * 40]
    expected = np.array(client_vectors(served, texts), np.float32)  # compared with the engine's rows above
    with ollama.Client(host=served.url) as client:
        answer = client.embed(model="nano", input=texts)
        unit = expected / np.linalg.norm(expected, axis=1, keepdims=True)
        assert np.allclose(answer.embeddings, unit, atol=1e-4)
        assert answer.prompt_eval_count == sum(len(engine.prompt_ids(text)) for text in texts)
        single = client.embed(model="nano", input=texts[0])
        assert np.allclose(single.embeddings, unit[:1], atol=1e-4) and single.total_duration > 0
        old = client.embeddings(model="nano", prompt=texts[0])
        assert np.allclose(old.embedding, expected[0], atol=1e-3)
        assert client.embed(model="nano", input=[]).embeddings == []
        assert client.embeddings(model="nano", prompt="").embedding == []
        with pytest.raises(ollama.ResponseError, match="the width of a vector is the model's"):
            client.embed(model="nano", input="Hi", dimensions=8)
        with pytest.raises(ollama.ResponseError, match="the prompt is empty"):
            client.embed(model="nano", input=["Hi", ""])
        long = "fox " * 6000
        with pytest.raises(ollama.ResponseError, match="tokens"):
            client.embed(model="nano", input=long, truncate=False)
        assert client.embed(model="nano", input=long).prompt_eval_count == engine.max_context
    cut = served.post("/api/embed", {"input": ["Hi", long]}).json()
    (warning,) = cut["warnings"]
    assert warning.startswith("text 1 has ") and warning.endswith(f"was cut to {engine.max_context}.")


def client_vectors(served, texts: list[str]) -> list[list[float]]:
    answer = served.post("/v1/embeddings", {"input": texts}).json()
    return [entry["embedding"] for entry in answer["data"]]
