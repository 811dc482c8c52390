"""What operators and clients of other servers expect: names, HTTPS, several keys, log lines, hints over HTTP."""

from __future__ import annotations

import json
import ssl

import httpx
import openai
import pytest

from birkhoff.server.api_errors import HTTP_CALLS, to_api_error
from birkhoff.server.server_settings import ServerSettings
from tests.certificate import make_certificate
from tests.server.conftest import serving, user

ASK = {"messages": user("Hello."), "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("tls"), "127.0.0.1")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory, certificate):
    cert, key = certificate
    keys = ["--api-key", "first", "--api-key", "second"]
    names = ["--served-name", "fox,story-teller", "--ssl-certfile", str(cert), "--ssl-keyfile", str(key)]
    with serving(tmp_path_factory.mktemp("manners"), *keys, *names, "--host", "0.0.0.0") as running:
        yield running


def test_several_names_and_keys_over_https(guarded, certificate):
    assert guarded.url.startswith("https://127.0.0.1:")  # an address that can be opened, for --host 0.0.0.0
    with httpx.Client(verify=ssl.create_default_context(cafile=str(certificate[0]))) as http:
        for key, name in (("first", "fox"), ("second", "story-teller")):
            client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0, http_client=http)
            assert [model.id for model in client.models.list()] == ["fox", "story-teller"]
            assert client.models.retrieve(name).id == name
            answer = client.chat.completions.create(model=name, **ASK)
            assert answer.model == name and answer.choices[0].message.content
            with pytest.raises(openai.NotFoundError, match=r"fox or story-teller.*any-model"):
                client.chat.completions.create(model="gpt-4o", **ASK)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(
                base_url=f"{guarded.url}/v1", api_key="x", max_retries=0, http_client=http
            ).models.list()
    lines = [json.loads(line) for line in guarded.log.read_text().splitlines() if line.startswith("{")]
    chats = [line for line in lines if line["path"] == "/v1/chat/completions" and line["status"] == 200]
    assert [line["client"] for line in chats] == ["key-0", "key-1"]
    for line in chats:
        assert (
            line["output_tokens"] == 4
            and line["prompt_tokens"] > 4
            and 0 < line["first_token_ms"] <= line["ms"]
        )
    listed = next(line for line in lines if line["path"] == "/v1/models")
    assert "output_tokens" not in listed
    assert "first" not in {line["client"] for line in lines}  # keys are not logged


def test_every_model_name_is_accepted_on_request(tmp_path):
    with serving(tmp_path, "--any-model", "--log", "text") as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        assert client.chat.completions.create(model="gpt-4o-mini", **ASK).model == "gpt-4o-mini"
        assert [model.id for model in client.models.list()] == ["nano"]
        assert client.models.retrieve("claude-sonnet").id == "claude-sonnet"
        line = next(line for line in running.log.read_text().splitlines() if "/v1/chat/completions" in line)
        assert "+4 tokens, first after " in line and "  127.0.0.1  " in line


@pytest.mark.parametrize("flags", [{"ssl_certfile": "a"}, {"ssl_keyfile": "a"}])
def test_a_certificate_without_a_key_is_refused(flags):
    with pytest.raises(Exception, match="--ssl-certfile and --ssl-keyfile"):
        ServerSettings(**flags)


def test_temperature_has_openai_s_range(served):
    for path, body in (
        ("/v1/chat/completions", ASK),
        ("/v1/completions", {"prompt": "Once", "max_tokens": 2}),
        ("/v1/responses", {"input": "Once", "max_output_tokens": 2}),
    ):
        assert served.post(path, {**body, "temperature": 2}).status_code == 200
        refused = served.post(path, {**body, "temperature": 2.1})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "temperature"


def test_errors_suggest_calls_over_http(served):
    unknown = {"op": "add", "at": {"hook": "mlp_out", "layers": [3]}, "vector": "@spoky"}
    message = served.post("/v1/chat/completions", {**ASK, "interventions": [unknown]}).json()["error"][
        "message"
    ]
    assert "Did you mean 'spooky'?" in message and "engine." not in message
    for python, http in HTTP_CALLS.items():
        from birkhoff.errors import SteeringError

        assert to_api_error(SteeringError(f"Do it: {python}.")).message == f"Do it: {http}."


def test_a_context_too_long_is_told_the_option_of_the_server(served):
    error = served.post("/v1/chat/completions", {**ASK, "max_tokens": 100_000}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].endswith("lower max_tokens, or start the server with a larger --max-context.")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {"messages": user("Hi"), "max_tokens": 100_000}, "messages"),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 100_000}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 5000}, "prompt"),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 100_000}, "input"),
        ("/v1/embeddings", {"input": [5] * 5000}, "input"),
        ("/completion", {"prompt": "Hi", "n_predict": 100_000}, "prompt"),
        ("/v1/lens", {"token_ids": [5] * 5000}, "token_ids"),
        ("/v1/logit_attribution", {"token_ids": [5] * 5000}, "token_ids"),
    ],
)
def test_a_context_too_long_names_the_field_of_the_text(served, path, body, field):
    error = served.post(path, body).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", field)


@pytest.mark.parametrize(
    ("field", "value"),
    [("logit_bias", {"99999": 1}), ("logit_bias", {"fox": 1}), ("stop_token_ids", [99999])],
)
def test_a_token_that_the_model_lacks_names_the_field(served, field, value):
    error = served.post("/v1/chat/completions", {**ASK, field: value}).json()["error"]
    assert error["param"] == field


def test_metrics_count_tokens_while_they_come(served):
    """A stream is counted up to the tokens that its client has seen, and in the end exactly."""
    names = ("birkhoff_prompt_tokens_total", "birkhoff_generated_tokens_total")
    assert served.idle()
    before = [served.metric(name) for name in names]
    body = {**ASK, "max_tokens": 400, "ignore_eos": True, "stream": True, "return_token_ids": True}
    seen, checked = 0, False
    with served.http as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                seen += sum(len(each.get("token_ids", ())) for each in json.loads(line[6:])["choices"])
            if seen >= 8 and not checked:
                checked = True
                prompt, generated = (served.metric(name) - old for name, old in zip(names, before))
                assert generated >= seen and prompt > 0
    assert served.idle()
    assert [served.metric(name) - old for name, old in zip(names, before)] == [prompt, 400] == [prompt, seen]


def test_an_empty_prompt_names_its_field(served):
    assert served.post("/v1/completions", {"prompt": ""}).json()["error"]["param"] == "prompt"
    assert served.post("/v1/embeddings", {"input": ""}).json()["error"]["param"] == "input"


def test_routes_that_can_be_read_answer_head_requests(served):
    """Monitors and load balancers send them, and Ollama's command to the root."""
    with served.http as client:
        for path in ("/", "/health", "/ready", "/version", "/v1/models", "/v1/models/nano", "/api/tags"):
            head = client.head(path)
            assert (head.status_code, head.content) == (200, b""), path
            assert int(head.headers["content-length"]) > 0
        assert client.head("/v1/models/other").status_code == 404
        refused = client.head("/v1/chat/completions")
        assert refused.status_code == 405 and refused.headers["allow"] == "POST"


def test_an_edit_without_a_site_is_told_the_field_of_the_body(served):
    edit = {"op": "add", "vector": [1.0] * 384}
    error = served.post("/v1/chat/completions", {**ASK, "interventions": [edit]}).json()["error"]
    assert error["message"].endswith('Give "at": {"hook": …, "layers": …}.'), error
