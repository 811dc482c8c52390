"""Gemma 2 with a Gemma Scope dictionary, end to end through `examples/gemma_scope.py`.

Real weights are used if `BIRKHOFF_GEMMA` is the path (or name) of a Gemma 2 and `BIRKHOFF_GEMMA_SCOPE` that of a
dictionary of its residual; otherwise a Gemma 2 of random weights and a dictionary trained on it. What the example
prints is computed again in float64 with hand-written hooks on Transformers, and with SAELens where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers

from birkhoff.hf_hub import resolve
from birkhoff.sae.files import locate_sae
from tests.cli.conftest import ROOT, clean_environment
from tests.hf.reference import Reference
from tests.hf.test_published_saes import SAELENS, run_oracle

MODEL, SCOPE = os.environ.get("BIRKHOFF_GEMMA"), os.environ.get("BIRKHOFF_GEMMA_SCOPE")
REAL = bool(MODEL and SCOPE)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What the example printed, the model's folder and the dictionary's file."""
    out = tmp_path_factory.mktemp("gemma")
    arguments = ["--model", MODEL, "--sae", SCOPE] if REAL else ["--out", str(out)]
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples/gemma_scope.py"), *arguments],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=3600 if REAL else 300,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    folder = resolve(MODEL) if REAL else out / "model"
    params = locate_sae(SCOPE)[0] if REAL else next(out.rglob("params.npz"))
    return json.loads(ran.stdout), folder, params / "params.npz" if params.is_dir() else params


class Exact:
    """The same measurements in float64 (float32 for real weights): hooks by hand, arrays of the file."""

    def __init__(self, result, folder, params):
        self.dtype = torch.float32 if REAL else torch.float64
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        self.reference = Reference(model.to(self.dtype).eval())
        self.w = {
            name.replace("w_", "W_"): torch.from_numpy(a).to(self.dtype)
            for name, a in np.load(params).items()
        }
        self.site = tuple(result["site"])
        self.exclude = [model.config.bos_token_id]

    def encode(self, x):
        z = x @ self.w["W_enc"] + self.w["b_enc"]
        return z.relu() * (z > self.w["threshold"])

    def decode(self, f):
        return f @ self.w["W_dec"] + self.w["b_dec"]

    def clamped(self, feature, value):
        def change(x):
            return x + (value - self.encode(x)[:, feature, None]) * self.w["W_dec"][feature]

        return change

    def logits(self, ids, change=None, exclude=()):
        def edit(hook, layer, x):
            if (hook, layer) != self.site or change is None:
                return None
            left = torch.tensor([token in exclude for token in ids])[:, None]
            return torch.where(left, x, change(x))

        logits, rows = self.reference.forward(ids, edit)
        return logits.log_softmax(-1), rows[self.site]

    def loss(self, texts, change=None):
        total = 0.0
        for ids in texts:
            chances = self.logits(ids, change, self.exclude)[0][:-1]
            total -= chances.gather(1, torch.tensor(ids[1:])[:, None]).sum().item()
        return total / sum(len(ids) - 1 for ids in texts)


@pytest.fixture(scope="module")
def exact(run):
    return Exact(*run)


def test_features_of_a_text(run, exact):
    result = run[0]
    f = exact.encode(exact.logits(result["texts"][0])[1])
    for position, hits in enumerate(result["features"]):
        values, features = f[position].topk(len(hits))
        np.testing.assert_allclose([hit["activation"] for hit in hits], values, rtol=1e-3 if REAL else 1e-4)
        if not REAL:  # equal values may change places
            assert [hit["feature"] for hit in hits] == features.tolist()
    assert result["site"][0] == "post_mlp" and any(result["features"])


def test_losses_with_the_reconstruction(run, exact):
    loss, texts = run[0]["loss"], run[0]["texts"]
    tolerance = 5e-3 if REAL else 1e-5
    assert loss["plain"] == pytest.approx(exact.loss(texts), rel=tolerance)
    spliced = exact.loss(texts, lambda x: exact.decode(exact.encode(x)))
    assert loss["spliced"] == pytest.approx(spliced, rel=tolerance)
    assert loss["ablated"] == pytest.approx(exact.loss(texts, torch.zeros_like), rel=tolerance)
    assert loss["plain"] < loss["spliced"] < loss["ablated"] and loss["recovered"] > 0.8


def test_a_clamped_feature(run, exact):
    clamp, ids = run[0]["clamp"], run[0]["texts"][0]
    before = exact.logits(ids)[0]
    after = exact.logits(ids, exact.clamped(clamp["feature"], clamp["value"]))[0]
    kl = (before.exp() * (before - after)).sum(-1).mean().item()
    assert clamp["kl"] == pytest.approx(kl, rel=2e-2 if REAL else 1e-4) and kl > 1e-3
    if not REAL:
        assert clamp["top_after"] == after[-1].topk(5).indices.tolist()


def test_reconstructed_and_clamped_answers(run, exact):
    """Greedy answers token by token, with every row of prompt and answer edited."""
    generated, clamp, ids = run[0]["generated"], run[0]["clamp"], run[0]["texts"][0]
    changes = {
        "plain": None,
        "reconstructed": lambda x: exact.decode(exact.encode(x)),
        "clamped": exact.clamped(clamp["feature"], clamp["value"]),
    }
    assert generated["plain"]["token_ids"] != generated["clamped"]["token_ids"]
    for name, change in changes.items():
        tokens = generated[name]["token_ids"]
        chances = exact.logits([*ids, *tokens], change)[0][len(ids) - 1 : -1]
        chosen = chances.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        # the token that was chosen is the best one, up to rounding
        assert float((chances.max(-1).values - chosen).max()) < (0.05 if REAL else 1e-4), name


@pytest.mark.skipif(
    SAELENS is None, reason="needs sae_lens, or BIRKHOFF_SAELENS_PYTHON=/path/of/python with it"
)
def test_saelens_measures_the_same(run, exact, tmp_path):
    result, folder, params = run
    clamp = {name: result["clamp"][name] for name in ("feature", "value")}
    job = {"kind": "gemma", "model": str(folder), "params": str(params), "layer": result["site"][1], **clamp}
    run_oracle(job | {"texts": result["texts"], "exclude": exact.exclude, "out": str(tmp_path)}, tmp_path)
    theirs = json.loads((tmp_path / "result.json").read_text())
    tolerance = 5e-3 if REAL else 1e-5
    assert result["loss"]["plain"] == pytest.approx(theirs["plain"], rel=tolerance)
    assert result["loss"]["spliced"] == pytest.approx(theirs["spliced"], rel=tolerance)
    assert result["clamp"]["kl"] == pytest.approx(theirs["kl"], rel=2e-2 if REAL else 1e-4)
    features = np.load(tmp_path / "features.npy")
    for position, hits in enumerate(result["features"]):
        for hit in hits:
            expected = features[position, hit["feature"]]
            assert hit["activation"] == pytest.approx(expected, rel=1e-3 if REAL else 1e-5, abs=1e-5)
