"""Dictionaries in the layout of SAELens' GPT-2 and Pythia releases act at the right site of a model.

The models are random; features and spliced logits are compared with hand-written hooks on Transformers and float64
arithmetic on the stored tensors, and with SAELens in TransformerLens' model where those are installed."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import birkhoff
from birkhoff import Sae, SaeReconstruct
from birkhoff.analysis.sae_rows import text_ids
from tests.hf.models import VOCAB, D, make
from tests.hf.reference import Reference
from tests.hub_server import prepare_cache

F = 48
SAELENS = os.environ.get("BIRKHOFF_SAELENS_PYTHON") or (
    sys.executable if importlib.util.find_spec("sae_lens") else None
)
TOKENS = torch.randint(3, VOCAB, (26,), generator=torch.Generator().manual_seed(3)).tolist()
FORMS = {  # config beside the common part
    "old": {"activation_fn_str": "relu", "apply_b_dec_to_input": True, "normalize_activations": "none"},
    "layer_norm": {
        "activation_fn_str": "topk",
        "activation_fn_kwargs": {"k": 6},
        "apply_b_dec_to_input": False,
        "normalize_activations": "layer_norm",
    },
}
SITES = {
    "gpt2": {
        "blocks.1.hook_resid_pre": ("pre_attn", 1),
        "blocks.0.hook_resid_mid": ("post_attn", 0),
        "blocks.2.hook_resid_post": ("post_mlp", 2),
        "blocks.1.hook_attn_out": ("attn_out", 1),
        "blocks.2.hook_mlp_out": ("mlp_out", 2),
        "blocks.1.attn.hook_z": ("attn_z", 1),
    },
    "gpt_neox": {
        "blocks.0.hook_resid_pre": ("pre_attn", 0),
        "blocks.1.hook_resid_post": ("post_mlp", 1),
        "blocks.2.hook_attn_out": ("attn_out", 2),
        "blocks.1.hook_mlp_out": ("mlp_out", 1),
    },
}
NAMES = {
    "gpt2": ("gpt2", "openai-community/gpt2"),
    "gpt_neox": ("pythia-70m-deduped", "EleutherAI/pythia-70m-deduped"),
}


def write_sae(folder: Path, hook_name: str, form: str, seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    tensors = {
        "W_enc": torch.randn(D, F, generator=g) / D**0.5,
        "W_dec": torch.randn(F, D, generator=g) / D**0.5,
        "b_enc": torch.randn(F, generator=g) * 0.2,
        "b_dec": torch.randn(D, generator=g) * 0.2,
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "sae_weights.safetensors")
    common = {
        "d_in": D,
        "d_sae": F,
        "dtype": "float32",
        "model_name": "x",
        "hook_name": hook_name,
        "prepend_bos": True,
    }
    (folder / "cfg.json").write_text(json.dumps(common | FORMS[form]))
    return tensors


def exact_features(tensors: dict[str, torch.Tensor], form: str, rows: torch.Tensor) -> torch.Tensor:
    w = {name: tensor.double() for name, tensor in tensors.items()}
    x = rows.double()
    if form == "layer_norm":
        x = (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)
        z = x @ w["W_enc"] + w["b_enc"]
        kept = z.topk(6, dim=-1)
        return torch.zeros_like(z).scatter(-1, kept.indices, kept.values.relu())
    return ((x - w["b_dec"]) @ w["W_enc"] + w["b_enc"]).relu()


@pytest.fixture(scope="module", params=SITES)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    reference = Reference(make(request.param, folder / "model"))
    with birkhoff.load(folder / "model", max_requests=2, cache_bytes=1 << 24, device="cpu") as engine:
        yield request.param, engine, reference, folder


def cases(kind: str) -> list[tuple[str, tuple[str, int], str]]:
    return [(name, site, form) for name, site in SITES[kind].items() for form in FORMS]


def test_features_and_reconstructions_are_those_of_the_named_tensor(model, tmp_path):
    kind, engine, reference, _ = model
    for index, (hook_name, site, form) in enumerate(cases(kind)):
        tensors = write_sae(tmp_path / str(index), hook_name, form, index)
        logits, rows = reference.forward(TOKENS)
        expected = exact_features(tensors, form, rows[site])
        with engine.attach("release", str(tmp_path / str(index)), kind="full"):
            sae = Sae.load(tmp_path / str(index))
            assert (sae.hook, sae.layer) == site
            ours = torch.zeros(len(TOKENS), F)
            for position, hits in enumerate(engine.features(TOKENS, "release", k=F)):
                for hit in hits:
                    ours[position, hit.feature] = hit.activation
            np.testing.assert_allclose(
                ours, expected, atol=1e-5 * max(1.0, float(expected.max())), err_msg=hook_name
            )
            spliced = engine.logits(TOKENS, steer=[SaeReconstruct("release", error="drop")])

        def splice(hook, layer, x, site=site, sae=sae):
            return sae.reconstruct(x) if (hook, layer) == site else None

        theirs, _ = reference.forward(TOKENS, splice)
        assert not torch.allclose(theirs, logits, atol=1e-2)
        np.testing.assert_allclose(spliced, theirs, atol=2e-5 * float(theirs.abs().max()), err_msg=hook_name)


def test_texts_begin_as_the_dictionary_expects(model, monkeypatch):
    """GPT-2's tokenizer puts nothing before a text; a dictionary with prepend_bos was trained with its begin token."""
    _, engine, _, _ = model
    zeros = torch.zeros(2, D)
    trained = {wanted: Sae(zeros, None, zeros, metadata={"prepend_bos": wanted}) for wanted in (True, False)}
    monkeypatch.setattr(
        type(engine), "prompt_ids", lambda self, text: [9, 8] if isinstance(text, str) else list(text)
    )
    assert engine.config.bos_token_id is None and engine.config.raw["bos_token_id"] == 1
    assert text_ids(engine, trained[True], "some text") == [1, 9, 8]
    assert text_ids(engine, trained[False], "some text") == [9, 8]
    assert text_ids(engine, trained[True], [9, 8]) == [9, 8], "token ids are taken as they are"
    monkeypatch.setattr(type(engine), "prompt_ids", lambda self, text: [1, 9, 8])
    assert text_ids(engine, trained[True], "some text") == [1, 9, 8]
    assert text_ids(engine, trained[False], "some text") == [9, 8]
    assert text_ids(engine, Sae(zeros, None, zeros), "some text") == [1, 9, 8], (
        "a dictionary that does not say"
    )


@pytest.mark.skipif(
    SAELENS is None, reason="needs sae_lens, or BIRKHOFF_SAELENS_PYTHON=/path/of/python with it"
)
@pytest.mark.parametrize("centered", [False, True], ids=["plain", "centered"])
def test_features_equal_saelens_on_the_same_tokens(model, centered, tmp_path):
    kind, engine, _, folder = model
    for repo in NAMES[kind]:  # TransformerLens reads the config of the official model
        snapshot = prepare_cache(tmp_path / "home/hub", repo)
        config = json.loads((folder / "model/config.json").read_text())
        (snapshot / "config.json").write_text(json.dumps(config | {"n_ctx": 128}))
    chosen = cases(kind)
    saes = [tmp_path / f"sae{index}" for index in range(len(chosen))]
    for index, (hook_name, _, form) in enumerate(chosen):
        write_sae(saes[index], hook_name, form, 100 + index)
    job = {"kind": "lens", "model": str(folder / "model"), "name": NAMES[kind][0], "centered": centered}
    job |= {"tokens": TOKENS, "saes": [str(path) for path in saes], "out": str(tmp_path)}
    run_oracle(job, tmp_path)
    for index, (hook_name, site, form) in enumerate(chosen):
        # attention's z is not written to the residual, so centring does not reach it
        told = {"centered": True} if centered and site[0] != "attn_z" else {}
        sae = Sae.load(saes[index], **told)
        ours = sae.encode(engine.trace(TOKENS, [site[0]])[site])
        theirs = np.load(tmp_path / f"{index}.npy")
        assert (theirs > 0).any()
        np.testing.assert_allclose(
            ours, theirs, atol=1e-5 * max(1.0, float(theirs.max())), err_msg=f"{hook_name} {form}"
        )


def run_oracle(job: dict, folder: Path) -> None:
    (folder / "job.json").write_text(json.dumps(job))
    script = shutil.copy(
        Path(__file__).parent / "saelens_oracle.py", folder / "oracle.py"
    )  # away from this package
    environment = os.environ | {"HF_HOME": str(folder / "home"), "PYTHONPATH": ""}
    ran = subprocess.run(
        [str(SAELENS), str(script), str(folder / "job.json")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
