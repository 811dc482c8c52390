"""Calls of vLLM steering servers, as their clients send them: global tiers and named modules."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import birkhoff
from birkhoff import Add, Clamp
from tests.server.conftest import serving, user
from tests.server.test_interp_response import packed

CHAT, SET, REGISTER = "/v1/chat/completions", "/v1/steering/set", "/v1/steering/modules/register"
MESSAGES = user("Tell me a story about a fox.")
SHARED = {"temperature": 0, "max_tokens": 12}
rows = np.random.default_rng(9).normal(size=(4, 384)).astype(np.float32) * 2
V, W, X, Y = (row.tolist() for row in rows)


@pytest.fixture(scope="module")
def engine():
    with birkhoff.load("nano") as loaded:
        yield loaded


@pytest.fixture(autouse=True)
def clean(served):
    yield
    served.post("/v1/steering/clear")


def tokens(served, **fields) -> list[int]:
    answer = served.post(CHAT, {"messages": MESSAGES, **SHARED, "return_token_ids": True, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def expected(engine, *edits) -> list[int]:
    return engine.chat(MESSAGES, **SHARED, steer=list(edits)).token_ids


def post(served, path, body):
    answer = served.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_tiers_are_set_and_updated_by_layer(served, engine):
    first = post(served, SET, {"vectors": {"mlp_out": {"2": {"vector": V, "scale": 2.0}}}})
    assert first["status"] == "ok" and first["spelling"] == "tiers"
    assert first["hook_points"] == ["mlp_out"] and first["layers_updated"] == [2]
    assert tokens(served) == expected(engine, Add(V, "mlp_out", [2], 2.0))

    # `replace` is false by default: another layer is added, the same layer is replaced.
    body = {"decode_vectors": {"post_attn": {"5": W}}, "vectors": {"mlp_out": {"3": X}}}
    post(served, SET, body)
    decode = Add(W, "post_attn", [5], phase="decode")
    both = [Add(V, "mlp_out", [2], 2.0), Add(X, "mlp_out", [3]), decode]
    assert tokens(served) == expected(engine, *both)
    post(served, SET, {"vectors": {"mlp_out": {"2": Y}}})
    updated = [Add(Y, "mlp_out", [2]), Add(X, "mlp_out", [3]), decode]
    assert tokens(served) == expected(engine, *updated) != expected(engine, *both)
    layers = served.get("/v1/steering").json()["active_layers"]
    assert layers["2"]["mlp_out"]["norm"] == pytest.approx(float(torch.tensor(Y).norm()), rel=1e-5)
    assert layers["5"]["post_attn"]["decode_norm"] == pytest.approx(float(torch.tensor(W).norm()), rel=1e-5)

    post(served, SET, {"prefill_vectors": {"pre_attn": packed(rows[0], 1, 3.0)}, "replace": True})
    assert tokens(served) == expected(engine, Add(V, "pre_attn", [1], 3.0, phase="prefill"))
    cleared = post(served, "/v1/steering/clear", {"target": "main"})
    assert cleared["status"] == "ok" and cleared["active_layers"] == {}
    assert tokens(served) == expected(engine)


def test_the_two_spellings_keep_their_own_meaning(served, engine):
    ours = {"interventions": [{"op": "add", "at": {"hook": "mlp_out", "layers": [2]}, "vector": V}]}
    assert post(served, SET, ours)["spelling"] == "fields of a call"
    post(served, SET, {"vectors": {"mlp_out": {"2": W}}})  # tiers leave what the other spelling set
    assert tokens(served) == expected(engine, Add(V, "mlp_out", [2]), Add(W, "mlp_out", [2]))
    post(served, SET, {**ours, "replace": False})
    twice = [Add(V, "mlp_out", [2]), Add(W, "mlp_out", [2]), Add(V, "mlp_out", [2])]
    assert tokens(served) == expected(engine, *twice)
    post(served, SET, ours)  # replaces everything
    assert tokens(served) == expected(engine, Add(V, "mlp_out", [2]))
    mixed = served.post(SET, {**ours, "vectors": {"mlp_out": {"2": W}}})
    assert mixed.status_code == 400 and mixed.json()["error"]["param"] == "vectors"


def test_clamps_of_a_call_and_of_the_global_tier(served, engine):
    clamp = {"mlp_out": {"3": [{"vector": V, "max": 1.0}, {"vector": W, "value": 80.0, "strength": 0.5}]}}
    edits = [Clamp(V, "mlp_out", [3], max=1.0), Clamp(W, "mlp_out", [3], 0.5, min=80.0, max=80.0)]
    assert tokens(served, steering_clamps=clamp) == expected(engine, *edits) != expected(engine)
    blob = {
        **packed(rows[:2].reshape(-1), 0, 1.0),
        "shape": [2, 384],
        "layer_indices": [3, 3],
        "bounds": [[None, 1.0], [80.0, 80.0]],
        "strengths": [1.0, 0.5],
    }
    del blob["scales"]
    assert tokens(served, steering_clamps={"mlp_out": blob}) == expected(engine, *edits)
    post(served, SET, {"decode_clamps": clamp})
    decode = [
        Clamp(V, "mlp_out", [3], phase="decode", max=1.0),
        Clamp(W, "mlp_out", [3], 0.5, phase="decode", min=80.0, max=80.0),
    ]
    assert tokens(served) == expected(engine, *decode)


MODULE = {
    "vectors": {"mlp_out": {"2": V, "5": {"vector": W, "scale": 2.0}}},
    "prefill_vectors": {"pre_attn": {"1": X}},
    "decode_vectors": {"post_attn": packed(rows[3], 4, 0.5)},
}
PARTS = [
    Add(V, "mlp_out", [2]),
    Add(W, "mlp_out", [5], 2.0),
    Add(X, "pre_attn", [1], phase="prefill"),
    Add(Y, "post_attn", [4], 0.5, phase="decode"),
]


def test_a_module_of_several_hooks_layers_tiers_and_scales(served, engine):
    reply = post(served, REGISTER, {"name": "creativity", **MODULE})
    assert reply["status"] == "ok" and "creativity" in reply["modules"] and reply["spelling"] == "tiers"
    assert reply["sites"] == ["mlp_out[2]", "mlp_out[5]", "post_attn[4]", "pre_attn[1]"]
    assert tokens(served, steering_name="creativity") == expected(engine, *PARTS)
    # A named module and vectors of the call add up.
    both = tokens(served, steering_name="creativity", steering_vectors={"mlp_out": {"2": Y}})
    assert both == expected(engine, *PARTS, Add(Y, "mlp_out", [2]))
    half = [Add(p.vector, p.hook, p.layers, p.scale / 2, phase=p.phase) for p in PARTS]
    scaled = tokens(served, steering_name={"name": "creativity", "scale": 0.5})
    assert scaled == expected(engine, *half)
    ours = [{"op": "add", "vector": "@creativity", "phase": "decode"}]
    only = [Add(p.vector, p.hook, p.layers, p.scale, phase="decode") for p in PARTS if p.phase != "prefill"]
    assert tokens(served, interventions=ours) == expected(engine, *only)
    refused = served.post(CHAT, {"messages": MESSAGES, "interventions": [{**ours[0], "op": "project"}]})
    assert refused.status_code == 400 and "own operation" in refused.json()["error"]["message"]

    again = post(served, REGISTER, {"name": "creativity", "vectors": {"mlp_out": {"2": V}}})  # overwrites
    assert again["hook"] == "mlp_out" and again["width"] == 384
    taken = served.post(REGISTER, {"name": "creativity", "vector": V})
    assert taken.status_code == 409
    listed = served.get("/v1/steering/modules").json()
    assert listed["count"] == len(listed["modules"])
    gone = post(served, "/v1/steering/modules/unregister", {"name": "creativity"})
    assert gone["status"] == "ok" and "creativity" not in gone["modules"]


BAD = {
    "an unknown tier": (SET, {"vektors": {"mlp_out": {"2": V}}}, "vektors"),
    "a hook this model lacks": (SET, {"vectors": {"post_mlp": {"2": V}}}, "vectors.post_mlp"),
    "a layer beyond the end": (SET, {"prefill_vectors": {"mlp_out": {"99": V}}}, "prefill_vectors.mlp_out"),
    "a wrong width": (SET, {"decode_vectors": {"mlp_out": {"2": V[:3]}}}, "decode_vectors.mlp_out"),
    "the draft model": (SET, {"vectors": {"mlp_out": {"2": V}}, "target": "draft"}, "target"),
    "a capture": (SET, {"vectors": {"mlp_out": {"2": V}}, "capture": {}}, "capture"),
    "nothing": (SET, {"replace": True}, "interventions"),
    "an unknown field of a module": (REGISTER, {"name": "m", **MODULE, "gates": []}, "gates"),
    "a bad second tier": (REGISTER, {"name": "m", **MODULE, "decode_vectors": {"no": {"2": V}}}, None),
    "a clamp without bounds": (SET, {"clamps": {"mlp_out": {"2": [{"vector": V}]}}}, "clamps.mlp_out.2[0]"),
}


@pytest.mark.parametrize("name", BAD)
def test_refusals_name_the_field_and_change_nothing(served, name):
    path, body, field = BAD[name]
    before = served.get("/v1/steering").json(), served.get("/v1/steering/modules").json()
    answer = served.post(path, body)
    assert answer.status_code == 400, answer.text
    assert field is None or (answer.json()["error"]["param"] or "").startswith(field), answer.text
    assert (served.get("/v1/steering").json(), served.get("/v1/steering/modules").json()) == before


def test_modules_from_files_and_the_key_as_a_bearer_token(tmp_path, engine):
    file = tmp_path / "creativity.json"
    file.write_text(json.dumps({**MODULE, "clamps": None}))
    flags = ("--steering-modules", f"creative={file}", "--steering-api-key", "secret")
    with serving(tmp_path / "run", *flags) as running:
        assert tokens(running, steering_name="creative") == expected(engine, *PARTS)
        body = {"vectors": {"mlp_out": {"2": V}}}
        assert running.post(SET, body).status_code == 401
        assert running.post(SET, body, authorization="Bearer wrong").status_code == 401
        assert running.post(SET, body, authorization="Bearer secret").status_code == 200


def test_a_module_file_in_python(tmp_path, engine):
    file = tmp_path / "m.json"
    file.write_text(json.dumps(MODULE))
    engine.modules["m"] = file
    assert expected(engine, Add("m", path="carry")) == expected(engine, *PARTS)
    file.write_text(json.dumps({**MODULE, "more": 1}))
    with pytest.raises(birkhoff.BirkhoffError, match="more"):
        engine.modules["m"] = file
    file.write_text("{}")
    with pytest.raises(birkhoff.BirkhoffError, match="no vectors in any tier"):
        engine.modules["n"] = file
    assert "n" not in engine.modules
