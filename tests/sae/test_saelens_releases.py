"""Published dictionaries: names, sites, layouts of GPT-2, Pythia and Gemma Scope releases in a prepared hub cache.

Features are compared with float64 arithmetic on the stored tensors always, and with SAELens itself if it is installed
or `BIRKHOFF_SAELENS_PYTHON` is an interpreter that has it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from birkhoff.errors import HubError, SaeError, SaeFileError
from birkhoff.hf_hub import RepoPath
from birkhoff.hooks.schema import build_hook_schema
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.hook_names import site_of
from birkhoff.sae.registry import SaeRegistry
from birkhoff.sae.releases import canonical_ids, collection_ids, find_release, release_names
from tests.hub_server import prepare_cache
from tests.sae.test_files import CENTERED, D, F, X, lens_features, lens_tensors, scope_arrays

SAELENS = os.environ.get("BIRKHOFF_SAELENS_PYTHON") or (
    sys.executable if importlib.util.find_spec("sae_lens") else None
)

# Configs in the form of the releases: before 6.0 (flat, `hook_point`), later 5.x (flat, `hook_name`), and 6.x.
FIRST = {
    "model_name": "gpt2-small",
    "hook_point": "blocks.8.hook_resid_pre",
    "hook_point_layer": 8,
    "hook_point_head_index": None,
    "dataset_path": "Skylion007/openwebtext",
    "d_in": D,
    "d_sae": F,
    "dtype": "torch.float32",
    "prepend_bos": True,
}
FLAT = {
    "architecture": "standard",
    "d_in": D,
    "d_sae": F,
    "dtype": "float32",
    "model_name": "pythia-70m-deduped",
    "hook_name": "blocks.3.hook_attn_out",
    "hook_layer": 3,
    "hook_head_index": None,
    "activation_fn_str": "relu",
    "apply_b_dec_to_input": True,
    "finetuning_scaling_factor": False,
    "normalize_activations": "none",
    "prepend_bos": False,
    "context_size": 128,
}
TOPK = FLAT | {
    "model_name": "gpt2-small",
    "activation_fn_str": "topk",
    "activation_fn_kwargs": {"k": 5},
    "normalize_activations": "layer_norm",
    "apply_b_dec_to_input": False,
    "prepend_bos": True,
}
CURRENT = {
    "architecture": "jumprelu",
    "d_in": D,
    "d_sae": F,
    "dtype": "float32",
    "device": "cpu",
    "apply_b_dec_to_input": False,
    "normalize_activations": "none",
    "reshape_activations": "none",
    "metadata": {
        "sae_lens_version": "6.54.12",
        "model_name": "gpt2-small",
        "hook_name": "blocks.5.hook_mlp_out",
        "hook_head_index": None,
        "prepend_bos": True,
        "context_size": 256,
    },
}
CASES = {
    "gpt2-small-res-jb/blocks.8.hook_resid_pre": (FIRST, {}, CENTERED, ("pre_attn", 8)),
    "gpt2-small-res-jb/blocks.11.hook_resid_post": (
        FIRST | {"hook_point": "blocks.11.hook_resid_post", "hook_point_layer": 11},
        {},
        CENTERED,
        ("post_mlp", 11),
    ),
    "gpt2-small-mlp-tm/blocks.8.hook_mlp_out": (
        FLAT | {"hook_name": "blocks.8.hook_mlp_out", "normalize_activations": "expected_average_only_in"},
        {"input_scale": 0.9123762783479742},
        {"factor": 0.9123762783479742, **CENTERED},
        ("mlp_out", 8),
    ),
    "gpt2-small-attn-out-v5-32k/blocks.2.hook_attn_out": (
        TOPK | {"hook_name": "blocks.2.hook_attn_out"},
        {},
        {},
        ("attn_out", 2),
    ),
    "gpt2-small-mlp-out-v5-128k/blocks.10.hook_mlp_out": (
        TOPK | {"hook_name": "blocks.10.hook_mlp_out"},
        {},
        {},
        ("mlp_out", 10),
    ),
    "gpt2-small-resid-post-v5-32k/blocks.0.hook_resid_post": (
        TOPK | {"hook_name": "blocks.0.hook_resid_post"},
        {},
        {},
        ("post_mlp", 0),
    ),
    "gpt2-small-resid-mid-v5-32k/blocks.4.hook_resid_mid": (
        TOPK | {"hook_name": "blocks.4.hook_resid_mid"},
        {},
        {},
        ("post_attn", 4),
    ),
    "pythia-70m-deduped-res-sm/blocks.0.hook_resid_pre": (
        FLAT | {"hook_name": "blocks.0.hook_resid_pre"},
        {},
        {},
        ("pre_attn", 0),
    ),
    "pythia-70m-deduped-att-sm/blocks.3.hook_attn_out": (FLAT, {}, {}, ("attn_out", 3)),
    "pythia-70m-deduped-mlp-sm/blocks.1.hook_mlp_out": (
        FLAT | {"hook_name": "blocks.1.hook_mlp_out", "apply_b_dec_to_input": False},
        {},
        {},
        ("mlp_out", 1),
    ),
    "gpt2-small-res_scl-ajt/blocks.6.hook_resid_pre": (
        CURRENT | {"metadata": CURRENT["metadata"] | {"hook_name": "blocks.6.hook_resid_pre"}},
        {},
        {},
        ("pre_attn", 6),
    ),
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    return tmp_path / "hub"


def architecture(config: dict) -> str:
    return "topk" if config.get("activation_fn_str") == "topk" else config.get("architecture", "standard")


def write(cache: Path, name: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """The files of a release as they lie on the hub."""
    config = CASES[name][0]
    release = find_release(name)
    folder = prepare_cache(cache, release.where.repo) / release.where.inside
    folder.mkdir(parents=True)
    tensors = lens_tensors(architecture(config))
    stored = {key: tensor.contiguous() for key, tensor in tensors.items()}
    if config is FIRST:
        stored["scaling_factor"] = torch.ones(F)  # some early files have it
    save_file(stored, folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text(json.dumps(config))
    return folder, tensors


@pytest.mark.parametrize("name", CASES)
def test_a_release_is_found_by_name_and_computes_its_features(name, cache):
    config, _, more, site = CASES[name]
    folder, tensors = write(cache, name)
    sae = Sae.load(name)
    assert (sae.hook, sae.layer) == site and sae.view == "single"
    flat = {**config, **config.get("metadata", {})}
    assert (
        sae.metadata["prepend_bos"] is flat["prepend_bos"]
        and sae.metadata["model_name"] == flat["model_name"]
    )
    full = {"architecture": architecture(config), **config, **config.get("activation_fn_kwargs", {}), **more}
    full["architecture"] = architecture(config)
    expected = lens_features(tensors, full, X)
    assert (expected > 0).any()
    np.testing.assert_allclose(sae.encode(X).numpy(), expected.numpy(), atol=1e-5)
    # the same files by their path on the hub and on the disk, with what they do not say
    release = find_release(name)
    options = {"centered": release.centered or None, "input_scale": release.input_scale}
    assert Sae.load(str(release.where), **options).digest == Sae.load(folder, **options).digest == sae.digest


def test_names_of_other_tensors_are_no_sites(cache, tmp_path):
    assert site_of("blocks.12.attn.hook_z") == ("attn_z", 12) and site_of("model.layers.3.output") == (
        "post_mlp",
        3,
    )
    for other in ("blocks.3.attn.hook_q", "blocks.3.ln2.hook_normalized", "hook_embed", None, "mlp_out.3"):
        assert site_of(other) is None
    save_file(
        {k: v.contiguous() for k, v in lens_tensors("standard").items()}, tmp_path / "sae_weights.safetensors"
    )
    (tmp_path / "cfg.json").write_text(json.dumps(FLAT | {"hook_name": "blocks.3.attn.hook_q"}))
    sae = Sae.load(tmp_path)
    assert sae.hook is None
    registry = SaeRegistry(build_hook_schema(D, "float32", 1, 4, 2), 4, "cpu")
    with pytest.raises(SaeError, match=r"trained at blocks\.3\.attn\.hook_q, which is no site of ours"):
        registry.attach("q", sae)
    # a caller that knows better decides
    assert Sae.load(tmp_path, hook="mlp_out", layer=1).hook == "mlp_out"


def test_ids_and_names_that_do_not_exist(cache):
    assert find_release("some/path") is None and find_release("gpt2") is None
    for name in (
        "gpt2-small-res-jb/blocks.12.hook_resid_pre",
        "gpt2-small-res-jb",
        "gemma-scope-2b-pt-res-canonical/layer_26/width_16k/canonical",
        "gemma-scope-2b-pt-res-canonical/layer_3/width_1m",
        "gemma-scope-2b-pt-res/layer_3/width_16k",
        "gemma-scope-2-4b-pt-res/layer_3",
    ):
        with pytest.raises(SaeFileError, match="has no dictionary"):
            find_release(name)
    with pytest.raises(
        HubError, match=r"birkhoff pull jbloom/GPT2-Small-SAEs-Reformatted/blocks\.3\.hook_resid_pre"
    ):
        Sae.load("gpt2-small-res-jb/blocks.3.hook_resid_pre")


def test_names_of_gemma_scope():
    def where(name: str) -> RepoPath:
        return find_release(name).where

    folder = RepoPath("google/gemma-scope-2b-pt-res", "layer_20/width_16k/average_l0_71")
    assert where("gemma-scope-2b-pt-res-canonical/layer_20/width_16k/canonical") == folder
    assert where("gemma-scope-2b-pt-res-canonical/layer_20/width_16k") == folder
    assert where("gemma-scope-2b-pt-res/layer_20/width_16k/average_l0_71") == folder
    assert where("gemma-scope-9b-pt-att-canonical/layer_27/width_16k/canonical").inside.endswith(
        "average_l0_136"
    )
    assert (
        where("gemma-scope-2b-pt-res/embedding/width_4k/average_l0_6").inside
        == "embedding/width_4k/average_l0_6"
    )
    assert where("gemma-scope-2-4b-it-mlp-all/layer_9_width_16k_l0_big") == RepoPath(
        "google/gemma-scope-2-4b-it", "mlp_out_all/layer_9_width_16k_l0_big"
    )
    assert sum(map(len, canonical_ids().values())) == 429


@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("gemma-scope-2b-pt-res-canonical/layer_20/width_16k/canonical", ("post_mlp", 20)),
        ("gemma-scope-2b-pt-mlp-canonical/layer_3/width_65k/canonical", ("mlp_out", 3)),
        ("gemma-scope-9b-pt-att/layer_7/width_16k/average_l0_70", ("attn_z", 7)),
        ("gemma-scope-2b-pt-res/embedding/width_4k/average_l0_6", ("pre_attn", 0)),
        ("gemma-scope-2-270m-pt-res/layer_5_width_16k_l0_small", ("post_mlp", 5)),
        ("gemma-scope-2-1b-it-att-all/layer_2_width_16k_l0_big", ("attn_z", 2)),
    ],
)
def test_gemma_scope_by_name_has_its_site(name, site, cache):
    where = find_release(name).where
    folder = prepare_cache(cache, where.repo) / where.inside
    folder.mkdir(parents=True)
    arrays = scope_arrays()
    if "scope-2-" in name:
        tensors = {key.replace("W_", "w_"): torch.from_numpy(array) for key, array in arrays.items()}
        save_file(tensors, folder / "params.safetensors")
    else:
        np.savez(folder / "params.npz", **arrays)
    sae = Sae.load(name)
    assert (sae.hook, sae.layer) == site and sae.metadata["prepend_bos"] is True
    # a dictionary of the embedding reads it as the layer does, sqrt(d) times what it was trained on
    x = X.double().numpy() / (D**0.5 if "embedding" in name else 1.0)
    z = x @ arrays["W_enc"].astype(float) + arrays["b_enc"]
    expected = (z > arrays["threshold"]) * np.maximum(z, 0)
    np.testing.assert_allclose(sae.encode(X), expected, atol=1e-5)
    rows = expected @ arrays["W_dec"].astype(float) + arrays["b_dec"]
    np.testing.assert_allclose(sae.reconstruct(X), rows * (D**0.5 if "embedding" in name else 1.0), atol=1e-4)


def test_transcoders_are_refused_by_name(tmp_path):
    folder = tmp_path / "gemma-scope-2b-pt-transcoders/layer_3/width_16k/average_l0_10"
    folder.mkdir(parents=True)
    np.savez(folder / "params.npz", **scope_arrays())
    with pytest.raises(SaeFileError, match="is a transcoder"):
        Sae.load(folder)


@pytest.mark.skipif(
    SAELENS is None, reason="needs sae_lens, or BIRKHOFF_SAELENS_PYTHON=/path/of/python with it"
)
def test_features_equal_those_of_saelens(cache, tmp_path):
    """Every release form, and a file that we wrote, through SAELens' own loader and encoder."""
    jobs, ours = [], []
    for name, (_, options, more, _) in CASES.items():
        folder, _ = write(cache, name)
        jobs.append({"path": str(folder), "centered": "model_from_pretrained_kwargs" in more, **options})
        ours.append(Sae.load(name))
    for at, sae in enumerate([*ours]):
        jobs.append({"path": str(sae.save(tmp_path / f"saved{at}"))})
        ours.append(sae)
    np.save(tmp_path / "rows.npy", X.numpy())
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"rows": str(tmp_path / "rows.npy"), "saes": jobs, "out": str(tmp_path)}))
    script = Path(__file__).parent / "saelens_oracle.py"
    subprocess.run([SAELENS, str(script), str(job)], check=True, timeout=300, capture_output=True)
    for index, (sae, entry) in enumerate(zip(ours, jobs)):
        theirs = np.load(tmp_path / f"{index}.features.npy")
        assert (theirs > 0).any()
        np.testing.assert_allclose(sae.encode(X).numpy(), theirs, atol=1e-5, err_msg=str(entry))
        rows = np.load(tmp_path / f"{index}.rows.npy")
        if entry.get("centered") and sae.normalize == "none":
            np.testing.assert_allclose(rows, sae.reconstruct(X), atol=1e-4)  # both without the mean
        np.testing.assert_allclose(sae.reconstruct(X).numpy(), rows, atol=1e-4, err_msg=str(entry))


@pytest.mark.skipif(
    SAELENS is None, reason="needs sae_lens, or BIRKHOFF_SAELENS_PYTHON=/path/of/python with it"
)
def test_our_tables_are_those_of_saelens(tmp_path):
    code = (
        "import json\nfrom sae_lens.loading.pretrained_saes_directory import get_pretrained_saes_directory\n"
        "found = get_pretrained_saes_directory()\n"
        "print(json.dumps({name: [each.repo_id, each.saes_map, each.norm_scaling_factor] "
        "for name, each in found.items()}))"
    )
    ran = subprocess.run([SAELENS, "-c", code], check=True, timeout=300, capture_output=True, text=True)
    theirs = json.loads(ran.stdout.splitlines()[-1])
    checked = 0
    ids = {name: collection_ids(name) for name in release_names()} | canonical_ids()
    for release, names in ids.items():
        repo, folders, scales = theirs[release]
        assert sorted(names) == sorted(folders), release
        for name in names:
            found = find_release(f"{release}/{name}")
            assert (found.where.repo, found.where.inside) == (repo, folders[name])
            if scales and scales.get(name) is not None:
                assert found.input_scale == scales[name]
            checked += 1
    pattern = re.compile(r"gemma-scope-(?:2-)?\w+-(?:pt|it)-(?:res|mlp|att)(?:-all)?")
    for release, (repo, folders, _) in theirs.items():
        if pattern.fullmatch(release):
            for name, folder in folders.items():
                assert find_release(f"{release}/{name}").where == RepoPath(repo, folder), (release, name)
                checked += 1
    assert checked > 3000
