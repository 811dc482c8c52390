"""An invalid field is answered with its path, what was seen and what was expected, also where it has several types."""

from __future__ import annotations

import pytest

from birkhoff.server.api_errors import ApiError
from birkhoff.server.body import validate
from birkhoff.server.chat_routes import ChatBody
from birkhoff.server.completion_routes import CompletionBody
from birkhoff.server.patching_routes import SweepBody
from birkhoff.server.steering_routes import UnregisterBody

MESSAGES = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("field", "value", "param", "message"),
    [
        ("stop", ["a"] * 5, "stop", "stop has 5 items, expected at most 4."),
        ("stop", 3, "stop", "stop is 3, expected a string or an array."),
        ("stop", ["a", 1], "stop[1]", "stop[1] is 1, expected a string."),
        ("stop", "", "stop", "stop has 0 characters, expected at least 1."),
        ("temperature", 3, "temperature", "temperature is 3, expected at most 2."),
        ("temperature", "hot", "temperature", "temperature is 'hot', expected a number."),
        ("temperature", True, "temperature", "temperature is true, expected a number."),
        ("n", 1.5, "n", "n is 1.5, expected a whole number."),
        ("seed", 2**63, "seed", f"seed is {2**63}, expected less than {2**63}."),
        ("stream", None, None, None),
        ("stream", "yes", "stream", "stream is 'yes', expected true or false."),
        ("messages", [], "messages", "messages has 0 items, expected at least 1."),
        ("messages", [None], "messages[0]", "messages[0] is null, expected an object."),
        ("interventions", {"op": "add"}, "interventions", "interventions is an object, expected an array."),
        ("logit_bias", {"5": 500}, "logit_bias.5", "logit_bias.5 is 500, expected at most 100."),
        (
            "response_format",
            {"type": "xml"},
            "response_format.type",
            "'xml', expected 'text', 'json_object' or",
        ),
        (
            "response_format",
            {"type": "text", "x": 1},
            "response_format.x",
            "is no field of this call. Remove it.",
        ),
        (
            "request_id",
            "a b",
            "request_id",
            "request_id is a string of 3 characters, expected a string that matches ^[A-Za-z0-9",
        ),
        ("signals", 3, "signals", "signals is 3, expected an array or 'all' or true or false."),
        ("temperature", "x" * 5000, "temperature", "is a string of 5000 characters, expected a number."),
        ("temperature", "a private text", "temperature", "is a string of 14 characters, expected a number."),
    ],
)
def test_the_message_says_what_was_seen_and_what_is_expected(field, value, param, message):
    if message is None:
        validate(ChatBody, MESSAGES | {field: value})
        return
    with pytest.raises(ApiError) as refused:
        validate(ChatBody, MESSAGES | {field: value})
    error = refused.value
    code = "field-unknown" if "is no field" in message else "field-invalid"
    assert (error.status, error.param, error.code) == (400, param, code)
    assert message in error.message and len(error.message) < 200


@pytest.mark.parametrize(
    ("body", "fields", "param", "message"),
    [
        (ChatBody, {}, "messages", "messages is missing. Add it."),
        (CompletionBody, {"prompt": 3}, "prompt", "prompt is 3, expected a string or an array."),
        (CompletionBody, {"prompt": [[1], [-3]]}, "prompt[1][0]", "prompt[1][0] is -3, expected at least 0."),
        (SweepBody, {"source": "Hi"}, "source", "source is 'Hi', expected an object or an array."),
        (UnregisterBody, {"name": "x", "id": 3}, "id", "'id' is no field of this call. It has: name."),
        (UnregisterBody, {"name": "x", "A b": 3}, "A b", "'A b' is no field of this call. It has: name."),
        (UnregisterBody, {"nam": "x"}, "name", "name is missing. Add it."),
        (
            UnregisterBody,
            {"name": "x", "nam": "x"},
            "nam",
            "'nam' is no field of this call. Did you mean 'name'?",
        ),
    ],
)
def test_other_bodies(body, fields, param, message):
    with pytest.raises(ApiError) as refused:
        validate(body, fields)
    assert (refused.value.param, refused.value.message) == (param, message)


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        (
            "POST",
            "/chat/completions",
            404,
            "There is '/v1/chat/completions': with OpenAI's client, base_url ends in /v1",
        ),
        ("POST", "/v1/v1/messages", 404, "There is '/v1/messages'"),
        ("POST", "/v1/api/chat", 404, "There is '/api/chat'"),
        ("POST", "/v1/chat/completion", 404, "Did you mean '/v1/chat/completions'?"),
        ("GET", "/v1/images/generations", 404, "'/v1/images/generations'. /openapi.json lists all routes."),
        ("GET", "/nothing", 404, "there is no route '/nothing'. /openapi.json lists all routes."),
        (
            "GET",
            "/v1/chat/completions",
            405,
            "GET is not served at '/v1/chat/completions', which takes POST.",
        ),
    ],
)
def test_a_wrong_address_names_the_right_one(served, method, path, status, words):
    with served.http as client:
        answer = client.request(method, path)
    error = answer.json()["error"]
    assert answer.status_code == status and words in (error if isinstance(error, str) else error["message"])


def test_a_wrong_content_type_is_told_which_header_to_send(served):
    body = b'{"messages": [{"role": "user", "content": "Hi"}]}'
    answer = served.post(
        "/v1/chat/completions", body, **{"content-type": "application/x-www-form-urlencoded"}
    )
    assert answer.status_code == 415
    assert "Send the header Content-Type: application/json." in answer.json()["error"]["message"]
