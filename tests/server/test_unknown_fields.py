"""No field of a body is dropped in silence: unknown ones are refused by name, and declared ones are read."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import birkhoff.server
from birkhoff.server import app, fields
from birkhoff.server.api_errors import ApiError
from birkhoff.server.body import RequestBody, StrictBody, refuse_unknown_fields, validate
from tests.fuzz.bodies import BODIES
from tests.server.conftest import user

SOURCES = sorted(Path(birkhoff.server.__file__).parent.glob("*.py"))


def models() -> list[type[RequestBody]]:
    result: list[type[RequestBody]] = []
    queue = [RequestBody]
    while queue:
        model = queue.pop()
        queue += model.__subclasses__()
        if model.__module__.startswith("birkhoff.") and model not in (RequestBody, StrictBody, *result):
            result.append(model)
    return result


@pytest.mark.parametrize("model", models(), ids=lambda model: model.__name__)
def test_every_body_model_refuses_an_unknown_field(model):
    if model.model_config.get("extra") == "forbid":
        with pytest.raises(ApiError) as refused:
            validate(model, {"no_such_field": 1})
        # A required field that is missing may be named first; then the unknown one comes after it.
        required = any(field.is_required() for field in model.model_fields.values())
        assert required or refused.value.param == "no_such_field"
    else:
        with pytest.raises(ApiError) as refused:
            refuse_unknown_fields(model.model_construct(no_such_field=1))
        assert refused.value.param == "no_such_field"
    assert refused.value.status == 400


def test_every_declared_field_is_read():
    """A field that no code of the server reads would be dropped in silence."""
    read: set[str] = set()
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        read |= {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
    read |= set(fields.SAMPLING)  # passed on by name
    read.add("strict")  # of a JSON schema: it is always followed
    steering = set(app.GlobalSteeringBody.model_fields)  # read through `steering_fields` and `tiers`
    passed_on = {"SaeManifestBody"}  # its fields are checked by the parser of manifests
    for model in models():
        if model.__name__ in passed_on:
            continue
        unread = set(model.model_fields) - read - steering
        assert not unread, (model.__name__, unread)


def test_every_route_refuses_an_unknown_field(served):
    paths = set()
    for path, body in BODIES:
        answer = served.post(path, {**body, "no_such_field": 1})
        assert answer.status_code == 400, (path, answer.text)
        assert "no_such_field" in answer.json()["error"]["message"], (path, answer.text)
        if not path.startswith(("/v1/messages", "/api/")):  # their errors have no code
            assert answer.json()["error"]["code"] == "field-unknown", (path, answer.text)
        paths.add(path)
    assert len(paths) > 20


NESTED = {
    "/v1/chat/completions": [
        ({"messages": user("Hi"), "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"messages": user("Hi"), "thinking": {"type": "disabled", "x": 1}}, "thinking.x"),
        ({"messages": user("Hi"), "chat_template_kwargs": {"thinkin": True}}, "chat_template_kwargs.thinkin"),
        ({"messages": user("Hi"), "verbosity": "low"}, "verbosity"),
        ({"messages": user("Hi"), "functions": [{"name": "f"}]}, "functions"),
        ({"messages": user("Hi"), "model": "other"}, "model"),
    ],
    "/v1/responses": [
        ({"input": "Hi", "reasoning": {"x": 1}}, "reasoning.x"),
        ({"input": "Hi", "text": {"x": 1}}, "text.x"),
        ({"input": "Hi", "truncation": "auto"}, "truncation"),
    ],
    "/v1/lens": [({"prompt": "Hi", "capture": {"memory": {}}}, "capture"), ({"prompt": "Hi", "n": 1}, "n")],
    "/v1/logit_attribution": [({"prompt": "Hi", "k": 3}, "k"), ({"prompt": "Hi", "n": 1}, "n")],
    "/v1/patch_sweep": [
        (
            {
                "source": {"prompt": "Hi", "steering_name": "m"},
                "target": {"prompt": "Hi"},
                "hook": "mlp_out",
                "metric": {"token": 1, "other": 2},
            },
            "source.steering_name",
        )
    ],
}


@pytest.mark.parametrize("path", NESTED)
def test_nested_and_unusable_fields_are_refused_by_name(served, path):
    for body, param in NESTED[path]:
        answer = served.post(path, body)
        assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == param, answer.text


def test_fields_of_the_protocol_without_effect_are_accepted_and_said(served):
    body = {"messages": user("Hi"), "max_tokens": 2, "store": False, "user": "me", "functions": []}
    answer = served.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    assert sorted(answer.json()["warnings"]) == ["'store' has no effect here.", "'user' has no effect here."]
    strict = served.post("/v1/chat/completions", body, **{"x-strict": "1"})
    assert strict.status_code == 400 and strict.json()["error"]["param"] == "store"
    typo = served.post("/v1/chat/completions", {"messages": user("Hi"), "max_token": 2})
    assert typo.status_code == 400 and "Did you mean 'max_tokens'?" in typo.json()["error"]["message"]
