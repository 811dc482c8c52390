"""T-SAE-8: a Gemma Scope file on one site of a small model, pure reconstruction and a clamped feature.

Real weights are read if `BIRKHOFF_GEMMA_SCOPE` is the path or name of a Gemma Scope dictionary; the same checks also
run on a file of that layout with random numbers. The model is random and as wide as the dictionary. The rows of the
site are compared with float64 arithmetic on the arrays of the file.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from birkhoff.hooks.batch_tap import StepStaging, arm
from birkhoff.hooks.edit import SiteContext
from birkhoff.hooks.plan import Plan, Span
from birkhoff.hooks.schema import schema_of
from birkhoff.hooks.tap import NoTap, RecordingTap
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.feature_edits import SaeReconstruct, SaeSet
from birkhoff.sae.files import locate_sae
from birkhoff.sae.registry import SaeRegistry
from tests.models import random_model, random_tokens, variant

REAL = os.environ.get("BIRKHOFF_GEMMA_SCOPE")
LAYER = 1


def run(model, ids, edit):
    span = Span(Plan(edits=(edit,)), 0, 0, ids.tolist(), len(ids))
    with torch.no_grad():
        return model(ids, arm(StepStaging(), [span]))


def check(path: Path) -> None:
    sae = Sae.load(path, "mlp_out", LAYER)
    arrays = {name: array.astype(float) for name, array in np.load(path).items()}
    config = variant(hidden_size=sae.d_model, compress_ratios=(0, 4, 128))
    model, ids = random_model(config), random_tokens(config, 24)
    registry = SaeRegistry(schema_of(config, "float32"), config.num_hidden_layers, "cpu")
    registry.attach("scope", sae, kind="full")
    registry.attach("few", sae, features=[0, 1])
    rows = {}

    def see(site, layer, x):
        if (site.name, layer) == ("mlp_out", LAYER):
            rows["before"] = x.double().numpy()

    with torch.no_grad():
        plain = model(ids, RecordingTap(NoTap(), see))
    z = rows["before"] @ arrays["W_enc"] + arrays["b_enc"]
    f = np.where(z > arrays["threshold"], np.maximum(z, 0), 0.0)
    feature = int(f.sum(0).argmax())
    set_to = 3.0 * max(float(f[:, feature].max()), 1.0)
    changed = f.copy()
    changed[:, feature] = set_to
    pure = f @ arrays["W_dec"] + arrays["b_dec"]
    clamped = changed @ arrays["W_dec"] + arrays["b_dec"]
    scale = np.abs(rows["before"]).max()
    cases = [
        (SaeReconstruct("scope"), pure),
        (SaeReconstruct("scope", {feature: set_to}), clamped),
        (SaeReconstruct("scope", {feature: set_to}, error="keep"), rows["before"] + clamped - pure),
    ]
    for edit, expected in cases:
        use = edit.resolve(registry, ids.tolist(), 1)
        logits = run(model, ids, use)
        host = use.sites["mlp_out", LAYER].host
        before = torch.from_numpy(rows["before"]).float()
        after = host.run(before, [(use.sites["mlp_out", LAYER], list(range(len(ids))))], SiteContext())
        np.testing.assert_allclose(after.numpy(), expected, atol=2e-4 * max(scale, np.abs(expected).max()))
        assert not torch.allclose(logits, plain, atol=1e-3)
    edit_one_position = SaeSet("few", {0: set_to}, where={"prompt": [3]}).resolve(registry, ids.tolist(), 1)
    logits = run(model, ids, edit_one_position)
    assert torch.equal(logits[:3], plain[:3]) and not torch.equal(logits[3:], plain[3:])


def test_t_sae_8_on_a_file_of_the_same_layout(tmp_path):
    g, width, features = np.random.default_rng(0), 64, 512
    np.savez(
        tmp_path / "params.npz",
        W_enc=g.normal(size=(width, features)).astype(np.float32) / 8,
        W_dec=g.normal(size=(features, width)).astype(np.float32) / 8,
        b_enc=np.zeros(features, np.float32),
        b_dec=g.normal(size=width).astype(np.float32),
        threshold=np.full(features, 0.3, np.float32),
    )
    check(tmp_path / "params.npz")


@pytest.mark.weights
@pytest.mark.skipif(REAL is None, reason="needs BIRKHOFF_GEMMA_SCOPE, a Gemma Scope dictionary")
def test_t_sae_8_on_gemma_scope():
    assert REAL is not None
    path = locate_sae(REAL)[0]
    check(path / "params.npz" if path.is_dir() else path)
