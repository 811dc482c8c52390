"""SAE directories of vLLM's SAE steering: a manifest with `kind`, and rows of the clampable features only."""

from __future__ import annotations

import base64
import json

import pytest
import torch
from safetensors.torch import save_file

import birkhoff
from birkhoff import Capture, Sae, SaeReconstruct, SaeSet
from birkhoff.errors import SaeError, SaeFileError
from tests.server.conftest import serving, user

D_SAE, D = 4096, 384
IDS = [905, 34, 77, 4000]  # the rows are in this order, which is not sorted
HOOK, LAYER = "mlp_out", 2


def written(path, activation="jumprelu", params=None, kind="sae_delta", **more):
    """A directory as vLLM's loader expects it; returns its tensors too."""
    generator = torch.Generator().manual_seed(7)
    tensors = {
        "encoder_weight": torch.randn(len(IDS), D, generator=generator) / 8,
        "encoder_bias": torch.randn(len(IDS), generator=generator) / 4,
        "decoder_weight": torch.randn(len(IDS), D, generator=generator),
    }
    manifest = {
        "kind": kind,
        "d_model": D,
        "d_sae": D_SAE,
        "activation": activation,
        "layers": [[LAYER, HOOK]],
        "clampable_features": IDS,
        "activation_params": {"threshold": 0.25} if params is None else params,
        "weights_uri": None,
        **more,
    }
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(json.dumps(manifest))
    save_file(tensors, path / f"layer_{LAYER}_{HOOK}.safetensors")
    return manifest, tensors


def changed(x, tensors, clamps, active):
    """Rows after a delta clamp, in float64: x + sum (f' - f) w."""
    x = x.double()
    z = x @ tensors["encoder_weight"].double().T + tensors["encoder_bias"].double()
    f = active(z)
    delta = torch.zeros_like(x)
    for feature, value in clamps.items():
        row = IDS.index(feature)
        delta += (value - f[:, row : row + 1]) * tensors["decoder_weight"][row].double()
    return x + delta


@pytest.fixture(scope="module")
def engine():
    with birkhoff.load("nano") as loaded:
        yield loaded


def top2(z):
    keep = torch.zeros_like(z).scatter(1, z.topk(2, 1).indices, 1.0)
    return z * keep


@pytest.mark.parametrize(
    ("activation", "params", "active"),
    [
        ("relu", {}, lambda z: z.clamp(min=0)),
        ("jumprelu", {"threshold": 0.25}, lambda z: z * (z > 0.25)),
        ("topk", {"k": 2.0}, top2),  # of the rows there are, as in vLLM
    ],
)
def test_delta_clamps_on_a_partial_dictionary(tmp_path, engine, activation, params, active):
    _, tensors = written(tmp_path / "gg", activation, params)
    prompt = "Once upon a time there was a fox."
    engine.attach("gg", tmp_path / "gg")
    try:
        before = engine.trace(engine.prompt_ids(prompt), [HOOK])[HOOK, LAYER]
        spec = Capture({HOOK: [LAYER]}, capture_point="after")
        edit = SaeSet("gg", {34: 5.0, 4000: -1.0})
        after = engine.generate(prompt, max_tokens=1, steer=[edit], capture=spec).acts[HOOK, LAYER].tensor
        expected = changed(before, tensors, {34: 5.0, 4000: -1.0}, active)
        torch.testing.assert_close(after.double(), expected, rtol=1e-4, atol=1e-3)
        result = {hit.feature for row in engine.features(prompt, "gg", 4) for hit in row}
        assert result and result <= set(IDS)
        assert engine.saes.status()["modules"][0]["features"] == sorted(IDS)
        with pytest.raises(SaeError, match="feature 5 has no row here: these files have 4 of 4096"):
            engine.generate(prompt, max_tokens=1, steer=[SaeSet("gg", {5: 1.0})])
        with pytest.raises(SaeError, match="does not exist"):
            engine.generate(prompt, max_tokens=1, steer=[SaeSet("gg", {D_SAE: 1.0})])
    finally:
        engine.detach("gg")


def test_full_reconstruction_from_a_partial_dictionary_is_refused(tmp_path, engine):
    written(tmp_path / "gg")
    with pytest.raises(SaeError, match=r"kind 'full' of 'gg' needs every feature.* 4 of 4096"):
        engine.attach("gg", tmp_path / "gg", kind="full")
    assert "gg" not in engine.saes.registry
    sae = Sae.load(tmp_path / "gg")
    with pytest.raises(SaeError, match="a reconstruction needs every feature"):
        sae.reconstruct(torch.zeros(2, D))
    with pytest.raises(SaeError, match="needs every feature"):
        sae.save(tmp_path / "other")
    again = Sae.load(sae.save(tmp_path / "again", layout="manifest"))
    assert again.feature_ids == tuple(IDS) and again.digest == sae.digest and again.total_features == D_SAE
    with engine.attach("delta", sae), pytest.raises(SaeError):
        engine.generate("x", max_tokens=1, steer=[SaeReconstruct("delta")])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "sae_other"}, "kind is 'sae_other'"),
        ({"clampable_features": IDS[:3]}, r"the encoder is \(4, 384\)"),
        ({"clampable_features": [1, 2, 3, D_SAE]}, "a row of feature 4096"),
        ({"clampable_features": [1, 2, 3, 3]}, "expected one for each row"),
        ({"extra": 1}, "unknown field 'extra'"),
    ],
)
def test_bad_manifests_are_refused(tmp_path, fields, words):
    written(tmp_path / "bad", **fields)
    with pytest.raises((SaeError, SaeFileError), match=words):
        Sae.load(tmp_path / "bad")


def packed(tensor):
    data = base64.b64encode(tensor.numpy().astype("<f4").tobytes()).decode()
    return {"dtype": "float32", "shape": list(tensor.shape), "data": data}


def test_saes_are_registered_over_http_and_by_a_flag(tmp_path, engine):
    root = tmp_path / "saes"
    manifest, tensors = written(root / "gg")
    fields = {name: value for name, value in manifest.items() if name not in ("kind", "weights_uri")}
    clamp = {"feature_idx": 34, "kind": "absolute", "value": 40.0}
    spec = {"module_name": "gg", "phase": "both", "clamps": {HOOK: {str(LAYER): [clamp]}}}
    sampling = {"temperature": 0, "max_tokens": 12}
    with engine.attach("gg", root / "gg"):
        expected = engine.chat(user("Tell me."), **sampling, steer=[SaeSet("gg", {34: 40.0})]).token_ids
    register, chat = "/v1/steering/modules/register", "/v1/chat/completions"
    flags = ("--sae-root", str(root), "--steering-modules", f"flag={root / 'gg'}")
    with serving(tmp_path / "run", *flags) as served:

        def tokens(name, **more):
            one = {**spec, "module_name": name}
            body = {
                "messages": user("Tell me."),
                **sampling,
                "return_token_ids": True,
                "sae_clamp_specs": [one],
            }
            answer = served.post(chat, body | more)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["token_ids"]

        assert tokens("flag") == expected != tokens("flag", sae_clamp_specs=None)
        body = {"name": "gg", "kind": "sae_delta", "sae_manifest": {**fields, "weights_uri": "gg"}}
        reply = served.post(register, body)
        assert reply.status_code == 200 and "gg" in reply.json()["modules"], reply.text
        assert reply.json()["kind"] == "sae_delta" and reply.json()["features"] == sorted(IDS)
        assert tokens("gg") == expected
        weights = {f"layer_{LAYER}_{HOOK}": {name: packed(tensor) for name, tensor in tensors.items()}}
        sent = {"name": "sent", "kind": "sae_delta", "sae_manifest": fields, "sae_weights": weights}
        assert served.post(register, sent).status_code == 200
        assert tokens("sent") == expected
        assert served.post("/v1/steering/modules/unregister", {"name": "sent"}).status_code == 200
        gone = served.post(
            chat, {"messages": user("x"), "sae_clamp_specs": [{**spec, "module_name": "sent"}]}
        )
        assert gone.status_code == 400

        full = {**body, "name": "f", "kind": "sae_full_reconstruction"}
        outside = {**fields, "weights_uri": "../../"}
        refused = {
            "needs every feature": full,
            "--sae-root": {**body, "sae_manifest": outside},
            "sae_manifest is missing": {"name": "x", "kind": "sae_delta"},
            "say where the weights are": {**body, "sae_manifest": fields},
            "is for the kind additive": {**body, "vectors": {HOOK: {"2": [0.0] * D}}},
            "is for the kinds sae_delta": {"name": "x", "vector": [1.0], "sae_weights": {}},
            "lacks encoder_weight": {**sent, "name": "x", "sae_weights": {f"layer_{LAYER}_{HOOK}": {}}},
            "expected layer_2_mlp_out": {**sent, "name": "x", "sae_weights": {"layer_3_mlp_out": {}}},
        }
        for words, bad in refused.items():
            answer = served.post(register, bad)
            assert answer.status_code == 400 and words in answer.text, (words, answer.text)
        damaged = json.loads(json.dumps(sent))
        damaged["sae_weights"][f"layer_{LAYER}_{HOOK}"]["encoder_bias"]["shape"] = [9]
        answer = served.post(register, damaged)
        assert answer.status_code == 400 and "encoder_bias" in answer.json()["error"]["param"]
        listed = {entry["name"]: entry for entry in served.get("/v1/saes").json()["saes"]}
        assert (listed["gg"]["d_sae"], listed["gg"]["stored_features"]) == (D_SAE, len(IDS))
        feature = served.get("/v1/interp/features/gg/34").json()
        assert feature["feature"] == 34 and feature["top_logits"]
        assert served.get("/v1/interp/features/gg/35").status_code == 404
