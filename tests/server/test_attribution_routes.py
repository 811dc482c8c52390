"""`/v1/attribute`, `/v1/circuit` and `/v1/logit_attribution` against the same calls in Python."""

from __future__ import annotations

import pytest
import torch

import birkhoff

TEXT, OTHER = "One day, Lily had a ball. He asked", "One day, Anna had a ball. He asked"
METRIC = {"token": " Lily", "other": " Anna"}


@pytest.fixture(scope="module")
def engine():
    with birkhoff.load("nano", max_requests=1) as loaded:
        yield loaded


def test_attribute_gives_what_python_gives(served, engine):
    body = {"prompt": TEXT, "metric": METRIC, "baseline": {"prompt": OTHER}, "over": "streams", "top": 12}
    answer = served.post("/v1/attribute", body)
    assert answer.status_code == 200, answer.text
    expected = engine.attribute(TEXT, (" Lily", " Anna"), "streams", baseline=OTHER)
    document = answer.json()
    assert document["num_nodes"] == len(expected) and len(document["nodes"]) == 12
    assert document["value"] == pytest.approx(expected.value, abs=1e-3)
    best = expected.top(1)[0].to_json()
    assert document["nodes"][0] == pytest.approx(best, abs=1e-2)
    assert document["tokens"][4] == " Lily"


def test_attribute_of_several_texts_gives_what_python_gives(served, engine):
    body = {
        "prompt": [TEXT, OTHER],
        "metric": [METRIC, {"token": " Anna", "other": " Lily"}],
        "baseline": [{"prompt": OTHER}, {"prompt": TEXT}],
        "top": 5,
    }
    answer = served.post("/v1/attribute", body)
    assert answer.status_code == 200, answer.text
    expected = engine.attribute(
        [TEXT, OTHER], [(" Lily", " Anna"), (" Anna", " Lily")], baseline=[OTHER, TEXT]
    )
    document = answer.json()
    assert document["value"] == pytest.approx(expected.mean.value, abs=1e-3)
    assert document["nodes"][0] == pytest.approx(expected.mean.top(1)[0].to_json(), abs=1e-2)
    assert [text["value"] for text in document["texts"]] == pytest.approx(
        [e.value for e in expected], abs=1e-3
    )
    assert document["texts"][1]["nodes"][0] == pytest.approx(expected[1].top(1)[0].to_json(), abs=1e-2)
    ids = [engine.prompt_ids(text) for text in (TEXT, OTHER)]
    shared = {"token_ids": ids, "metric": METRIC, "baseline": "mean", "top": 5}
    document = served.post("/v1/attribute", shared).json()
    by_mean = engine.attribute(ids, (" Lily", " Anna"), baseline="mean")
    assert document["nodes"][0] == pytest.approx(by_mean.mean.top(1)[0].to_json(), abs=1e-2)
    one = served.post("/v1/attribute", {**body, "prompt": [TEXT], "metric": [METRIC], "baseline": "zero"})
    assert len(one.json()["texts"]) == 1


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": [TEXT, "short"]}, "prompt", "text 1 has 3 tokens and the first 11"),
        ({"prompt": []}, "prompt", "at least 1"),
        ({"prompt": [TEXT] * 65}, "prompt", "at most 64"),
        ({"prompt": [TEXT, 3]}, "prompt[1]", "a string"),
        ({"metric": [METRIC]}, "metric", "metric has 1 entries for 2 texts"),
        ({"baseline": [{"prompt": OTHER}]}, "baseline", "baseline has 1 entries for 2 texts"),
        ({"prompt": TEXT, "metric": [METRIC]}, "metric", "there is one text"),
        ({"token_ids": [[1, 2]]}, "token_ids", "give the texts once"),
        ({"method": "exact", "over": "streams", "layers": "all"}, None, "at most 2048 are allowed"),
    ],
)
def test_what_is_refused_of_several_texts(served, fields, param, says):
    long = "One day, Lily had a ball. " * 6 + "He asked"
    body = {"prompt": [TEXT, OTHER], "metric": METRIC, **fields}
    if fields.get("method") == "exact":
        body["prompt"] = [long, long]
    answer = served.post("/v1/attribute", body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and says in error["message"], error


def test_circuit_gives_what_python_gives(served, engine):
    body = {"prompt": TEXT, "metric": METRIC, "baseline": {"prompt": OTHER}, "svg": True}
    answer = served.post("/v1/circuit", body)
    assert answer.status_code == 200, answer.text
    expected = engine.circuit(TEXT, (" Lily", " Anna"), baseline=OTHER)
    document = answer.json()
    assert document["faithfulness"] == pytest.approx(expected.faithfulness, abs=1e-2)
    assert len(document["nodes"]) == len(expected) and document["edges"]
    assert document["svg"].startswith("<svg") and document["svg"].count("<circle") == len(expected)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"metric": "lambda logits: logits[0, 0]"}, "metric"),
        ({"metric": {"token": " Lily", "function": "import os"}}, "metric.function"),
        ({"metric": {"token": "Lily and Tom"}}, None),
        ({"over": "mlp_oat"}, None),
        ({"baseline": {"prompt": "short"}}, None),
        ({"method": "exact", "over": "streams", "prompt": TEXT * 20}, None),
        ({"method": "guess"}, "method"),
        ({"steps": 10**6}, "steps"),
        ({"prompt": "word " * 600}, "prompt"),
        ({"interventions": [{"op": "call", "fn": "print"}]}, "interventions[0].op"),
    ],
)
def test_what_is_refused(served, fields, param):
    answer = served.post("/v1/attribute", {"prompt": TEXT, "metric": METRIC, **fields})
    assert answer.status_code == 400, answer.text
    if param is not None:
        assert answer.json()["error"]["param"] == param, answer.text


def test_circuits_of_exact_scores_are_refused(served):
    answer = served.post("/v1/circuit", {"prompt": TEXT, "metric": METRIC, "method": "exact"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "method"


@pytest.mark.parametrize(
    ("token", "position"), [(" Lily", -1), ([" Lily", " Anna"], 4), (None, -1), (300, 2)]
)
def test_logit_attribution_gives_what_python_gives(served, engine, token, position):
    body = {"prompt": TEXT, "position": position} | ({} if token is None else {"token": token})
    answer = served.post("/v1/logit_attribution", body)
    assert answer.status_code == 200, answer.text
    document, expected = answer.json(), engine.logit_attribution(TEXT, token, position)
    assert document["names"] == list(expected.names) and document["tokens"] == list(expected.tokens)
    assert document["position"] == expected.position and document["mlp"] == "experts"
    assert document["logit"] == pytest.approx(expected.logit, abs=1e-3)
    assert document["total"] == pytest.approx(document["logit"], abs=1e-6)
    for name in ("embedding", "attention", "experts", "rest", "heads"):
        values = getattr(expected, name)
        torch.testing.assert_close(torch.tensor(document[name]).double(), values, rtol=1e-3, atol=1e-3)
    assert document["routed"][3] == pytest.approx(
        {str(name): value for name, value in expected.routed[3].items()}, abs=1e-3
    )


def test_logit_attribution_of_a_steered_text(served, engine):
    edits = [{"op": "patch", "at": {"hook": "mlp_out", "layers": [3]}, "source": "zeros"}]
    body = {"token_ids": engine.prompt_ids(TEXT), "token": " Lily", "interventions": edits}
    document = served.post("/v1/logit_attribution", body).json()
    expected = engine.logit_attribution(TEXT, " Lily", steer=[birkhoff.Patch(0, "mlp_out", [3])])
    assert document["logit"] == pytest.approx(expected.logit, abs=1e-3)
    assert document["experts"][3] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token": "Lily and Tom"}, "token"),
        ({"token": [1, 2, 3]}, "token"),
        ({"token": 10**6}, "token"),
        ({"position": 99}, "position"),
        ({"prompt": "word " * 3000}, "prompt"),
        ({"token_ids": [1]}, "prompt"),
        ({"interventions": [{"op": "call", "fn": "print"}]}, "interventions[0].op"),
    ],
)
def test_what_logit_attribution_refuses(served, fields, param):
    answer = served.post("/v1/logit_attribution", {"prompt": TEXT, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
