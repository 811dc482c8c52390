"""`POST /v1/patch_sweep` equals `engine.patch_sweep`: every layer and token, streams, heads, metrics by token."""

from __future__ import annotations

import pytest
import torch

import birkhoff

CLEAN = "Tom had a red ball. Mary had a blue hat. Tom lost his"
CORRUPT = "Tom had a red hat. Mary had a blue ball. Tom lost his"
PAIR = {"token": " ball", "other": " hat"}


@pytest.fixture(scope="module")
def engine():
    with birkhoff.load("nano") as loaded:
        yield loaded


def swept(served, status: int = 200, **fields) -> dict:
    body = {"source": {"prompt": CLEAN}, "target": {"prompt": CORRUPT}, "metric": PAIR, **fields}
    answer = served.post("/v1/patch_sweep", body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_all_streams_of_all_layers_and_tokens(served, engine):
    """The rows of the source are no inline capture: its limit does not apply to them."""
    answer = swept(served, hook="mhc_streams_pre_attn")
    expected = engine.patch_sweep(CLEAN, CORRUPT, (" ball", " hat"), "mhc_streams_pre_attn")
    assert answer["axes"] == ["layer", "position"] and answer["positions"] == list(range(17))
    assert (torch.tensor(answer["grid"]) - expected.values).abs().max() < 1e-3
    assert abs(answer["source"] - expected.clean) < 1e-3 and abs(answer["target"] - expected.corrupt) < 1e-3


@pytest.mark.parametrize(
    ("fields", "over", "options", "axes"),
    [
        (
            {"hook": "mhc_streams_pre_attn", "streams": "each", "positions": [5, -1]},
            "mhc_streams_pre_attn",
            {"streams": "each", "positions": [5, -1]},
            ["layer", "position", "stream"],
        ),
        ({"hook": "heads", "positions": "all"}, "heads", {"positions": None}, ["layer", "head"]),
        (
            {"hook": "mlp_out", "layers": [3, -1], "align": "tokens"},
            "mlp_out",
            {"layers": [3, -1], "align": "tokens"},
            ["layer", "position"],
        ),
    ],
)
def test_streams_heads_and_alignment(served, engine, fields, over, options, axes):
    answer = swept(served, **fields)
    expected = engine.patch_sweep(CLEAN, CORRUPT, (" ball", " hat"), over, **options)
    assert answer["axes"] == axes == list(expected.axes)
    assert (torch.tensor(answer["grid"]) - expected.values).abs().max() < 1e-3


def test_metrics_by_id_by_text_and_by_log_probability(served, engine):
    ball, hat = (engine.tokenizer.encode(text)[0] for text in (" ball", " hat"))
    fields = {"hook": "mlp_out", "layers": [6], "positions": [16]}
    by_text = swept(served, **fields)
    assert swept(served, **fields, metric={"token": ball, "other": hat})["grid"] == by_text["grid"]
    logprob = swept(served, **fields, metric={"token": " ball", "logprob": True})
    assert abs(logprob["target"] - float(engine.logits(CORRUPT)[-1].log_softmax(-1)[ball])) < 1e-3
    at = swept(served, **fields, metric={"token": " ball", "position": 4})
    assert abs(at["target"] - float(engine.logits(CORRUPT)[4, ball])) < 1e-3
    message = swept(served, 400, **fields, metric={"token": " ballhat"})["error"]["message"]
    assert "2 tokens" in message


def test_sweeps_without_a_name_do_not_use_up_the_runs(served):
    fields = {"hook": "mlp_out", "layers": [3], "positions": [1]}
    kept = swept(served, **fields, run="mine")["run"]
    names = [swept(served, **fields)["run"] for _ in range(18)]
    assert kept == "mine" and len(set(names)) == 18
    patch = {"op": "patch", "at": {"hook": "mlp_out", "layers": [3]}}
    body = {"prompt": CORRUPT, "max_tokens": 1, "temperature": 0}
    statuses = []
    for name in ("mine", names[-1], names[0]):
        body["interventions"] = [{**patch, "source": {"run": name}}]
        statuses.append(served.post("/v1/completions", body).status_code)
    assert statuses == [200, 200, 400]  # the oldest one made room
    assert swept(served, 409, **fields, run="mine")["error"]["code"] == "run-taken"
    with served.http as client:
        assert client.delete("/v1/patch_source/mine").status_code == 200


def test_several_pairs_give_every_grid_and_their_mean(served, engine):
    """The same names with lists; the fields of one pair are those of the mean."""
    sources = ["Tom had a red ball. Tom lost his", "Tom had a big hat. Tom lost his"]
    targets = ["Tom had a red hat. Tom lost his", "Tom had a big ball. Tom lost his"]
    fields = {
        "source": [{"prompt": text} for text in sources],
        "target": [{"token_ids": engine.prompt_ids(text)} for text in targets],
        "hook": "mhc_streams_pre_attn",
        "layers": [2, 4],
        "positions": [5, -1],
    }
    metrics = [PAIR, {"token": " hat", "other": " ball"}]
    answer = swept(served, **fields, metric=metrics)
    expected = engine.patch_sweep(
        sources,
        targets,
        [(" ball", " hat"), (" hat", " ball")],
        "mhc_streams_pre_attn",
        layers=[2, 4],
        positions=[5, -1],
    )
    assert (torch.tensor(answer["grid"]) - expected.mean.values).abs().max() < 1e-3
    assert answer["source"] == pytest.approx(expected.mean.clean, abs=1e-3)
    assert answer["axes"] == ["layer", "position"] and answer["positions"] == [5, 9] and answer["run"] is None
    for pair, sweep in zip(answer["pairs"], expected, strict=True):
        assert (torch.tensor(pair["grid"]) - sweep.values).abs().max() < 1e-3
        assert pair["target"] == pytest.approx(sweep.corrupt, abs=1e-3)
    same = swept(served, **fields)["pairs"]
    assert same[1]["source"] == pytest.approx(-answer["pairs"][1]["source"], abs=1e-3)
    for wrong, param, says in [
        ({"source": fields["source"][:1]}, "target", "source has 1 texts and target 2"),
        ({"source": fields["source"][0]}, "target", "one text each, or two lists"),
        ({"metric": [PAIR] * 3}, "metric", "metric has 3 entries for 2 texts"),
        ({"run": "mine"}, "run", "Leave it out for several pairs"),
        ({"target": []}, "target", "at least 1"),
        ({"source": [{"prompt": "Hi", "prompts": 1}, fields["source"][1]]}, "source[0].prompts", "prompts"),
        ({"target": [{"prompt": "The cat"}, {"prompt": "A"}]}, None, "positions are averaged over pairs"),
    ]:
        error = swept(served, 400, **{**fields, **wrong})["error"]
        assert error["param"] == param and says in error["message"], error
    one = {**fields, "source": fields["source"][0], "target": fields["target"][0]}
    assert "there is one text" in swept(served, 400, **one, metric=metrics)["error"]["message"]
    many = {**fields, "source": fields["source"] * 30, "target": fields["target"] * 30, "positions": None}
    assert "4800 cells" in swept(served, 400, **{**many, "layers": "all"})["error"]["message"]


def test_too_many_cells_are_refused_with_the_number_that_fits(served):
    long = "Once upon a time there was a fox. " * 20
    message = swept(served, 400, hook="heads", source={"prompt": long}, target={"prompt": long})["error"][
        "message"
    ]
    assert "cells of" in message and "expected at most" in message


def test_the_metric_of_a_patch_sweep_takes_texts(served, engine):
    body = {
        "source": {"prompt": "The cat ran"},
        "target": {"prompt": "The big dog ran"},
        "hook": "mlp_out",
        "layers": [3],
        "positions": [1],
    }
    by_id = {"token": engine.tokenizer.encode(" to")[0], "other": engine.tokenizer.encode(" away")[0]}
    ids = served.post("/v1/patch_sweep", {**body, "metric": by_id}).json()
    texts = served.post("/v1/patch_sweep", {**body, "metric": {"token": " to", "other": " away"}}).json()
    one = served.post("/v1/patch_sweep", {**body, "metric": {"token": " to", "logprob": True}}).json()
    keys = ("grid", "source", "target")
    assert [ids[key] for key in keys] == [texts[key] for key in keys]
    for key in ("source", "target"):
        logprobs = engine.logits(engine.prompt_ids(body[key]["prompt"]))[-1].log_softmax(-1)
        assert one[key] == pytest.approx(float(logprobs[by_id["token"]]), abs=1e-4)
    for metric in ({"token": "two words"}, {"token": 10**6}, {"token": " to", "position": 4}):
        error = served.post("/v1/patch_sweep", {**body, "metric": metric}).json()["error"]
        assert error["param"] == "metric", error
    with served.http as client:
        for run in (ids, texts, one):
            assert client.delete(f"/v1/patch_source/{run['run']}").status_code == 200
