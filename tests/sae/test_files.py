"""Dictionary files of other tools: loaded dictionaries compute the same features, and invalid files are refused.

The arithmetic of the other tools is written out here in float64 on the tensors of the files, before any folding.
"""

from __future__ import annotations

import json
import os
import pickle
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from birkhoff.errors import SaeError, SaeFileError
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.files import load_all
from birkhoff.sae.sae_manifest import clampable_features, save_manifest
from birkhoff.sae.torch_file import load_state_dict
from tests.sae.reference import random_sae

D, F = 12, 30


def random_tensor(*shape, seed=0, spread=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


X = random_tensor(25, D, seed=99, spread=2.0)


def lens_tensors(kind):
    tensors = {
        "W_enc": random_tensor(D, F, seed=1, spread=0.4),
        "W_dec": random_tensor(F, D, seed=2, spread=0.7),
        "b_dec": random_tensor(D, seed=3),
    }
    if kind == "gated":
        return tensors | {
            "b_gate": random_tensor(F, seed=4),
            "b_mag": random_tensor(F, seed=5),
            "r_mag": random_tensor(F, seed=6) * 0.3,
        }
    tensors["b_enc"] = random_tensor(F, seed=4, spread=0.3)
    return tensors | ({"threshold": random_tensor(F, seed=7) * 0.5} if kind == "jumprelu" else {})


def lens_input(config, x):
    """A row as the encoder sees it, and what its reconstruction is multiplied by and moved by."""
    x = x.double()
    if config.get("model_from_pretrained_kwargs", {}).get("center_writing_weights"):
        x = x - x.mean(-1, keepdim=True)
    mode = config.get("normalize_activations")
    if mode == "layer_norm":
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return (x - mean) / (std + 1e-5), std, mean
    if mode == "constant_norm_rescale":
        factor = D**0.5 / x.norm(dim=-1, keepdim=True)
        return x * factor, 1 / factor, 0.0
    factor = config.get("factor", 1.0)
    return x * factor, 1 / factor, 0.0


def lens_features(tensors, config, x):
    """The encoders of SAELens, with its order of operations."""
    w = {name: tensor.double() for name, tensor in tensors.items()}
    x = lens_input(config, x)[0]
    x = x - w["b_dec"] * config.get("apply_b_dec_to_input", True)
    kind = config["architecture"]
    if kind == "gated":
        gate = (x @ w["W_enc"] + w["b_gate"]) > 0
        return gate * (x @ (w["W_enc"] * w["r_mag"].exp()) + w["b_mag"]).relu()
    z = x @ w["W_enc"] + w["b_enc"]
    if kind == "topk":
        z = z * w["W_dec"].norm(dim=-1) if config.get("rescale_acts_by_decoder_norm") else z
        chosen = z.topk(config["k"], dim=-1)
        return torch.zeros_like(z).scatter(-1, chosen.indices, chosen.values.relu())
    return z.relu() * (z > w["threshold"]) if kind == "jumprelu" else z.relu()


def lens_rows(tensors, config, f, x):
    f = f / tensors["W_dec"].double().norm(dim=-1) if config.get("rescale_acts_by_decoder_norm") else f
    _, scale, shift = lens_input(config, x)
    return (f @ tensors["W_dec"].double() + tensors["b_dec"].double()) * scale + shift


CENTERED = {"model_from_pretrained_kwargs": {"center_writing_weights": True}}
LENS = [
    {"architecture": "standard"},
    {"architecture": "standard", "apply_b_dec_to_input": False},
    {"architecture": "standard", "normalize_activations": "expected_average_only_in", "factor": 0.37},
    {"architecture": "jumprelu", "apply_b_dec_to_input": False},
    {"architecture": "jumprelu"},
    {"architecture": "topk", "k": 5},
    {"architecture": "topk", "k": 5, "rescale_acts_by_decoder_norm": True},
    {"architecture": "gated"},
    {"architecture": "gated", "normalize_activations": "expected_average_only_in", "factor": 2.5},
    {"architecture": "standard", "normalize_activations": True, "factor": 0.37},
    {"architecture": "standard", "normalize_activations": "layer_norm"},
    {"architecture": "topk", "k": 5, "normalize_activations": "layer_norm", "apply_b_dec_to_input": False},
    {"architecture": "jumprelu", "normalize_activations": "constant_norm_rescale"},
    {"architecture": "standard", **CENTERED},
    {"architecture": "gated", "normalize_activations": "expected_average_only_in", "factor": 2.5, **CENTERED},
]


@pytest.mark.parametrize("config", LENS, ids=lambda config: "-".join(map(str, config.values())))
def test_saelens_files_compute_what_saelens_computes(config, tmp_path):
    tensors = lens_tensors(config["architecture"])
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "sae_weights.safetensors"
    )
    stored = {name: value for name, value in config.items() if name != "factor"}
    (tmp_path / "cfg.json").write_text(json.dumps({"d_in": D, "d_sae": F, **stored}))
    if "factor" in config:
        (tmp_path / "activation_scaler.json").write_text(json.dumps({"scaling_factor": config["factor"]}))
    sae = Sae.load(tmp_path, hook="mlp_out", layer=3)
    expected = lens_features(tensors, config, X)
    assert (expected > 0).any() and sae.hook == "mlp_out" and sae.layer == 3
    np.testing.assert_allclose(sae.encode(X).numpy(), expected.numpy(), atol=2e-5)
    np.testing.assert_allclose(
        sae.reconstruct(X).numpy(), lens_rows(tensors, config, expected, X).numpy(), atol=1e-4
    )


def test_earlier_saelens_configs_are_read(tmp_path):
    tensors = lens_tensors("topk")
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "sae_weights.safetensors"
    )
    (tmp_path / "cfg.json").write_text(
        json.dumps({"activation_fn_str": "topk", "activation_fn_kwargs": {"k": 4}})
    )
    sae = Sae.load(tmp_path)
    assert sae.activation.name == "topk" and sae.activation.k == 4
    np.testing.assert_allclose(
        sae.encode(X), lens_features(tensors, {"architecture": "topk", "k": 4}, X), atol=2e-5
    )


def test_saved_files_have_the_saelens_layout(tmp_path):
    sae = random_sae("batchtopk", F, D, hook="mlp_out", layer=1)
    sae.save(tmp_path)
    config, tensors = (
        json.loads((tmp_path / "cfg.json").read_text()),
        load_file(tmp_path / "sae_weights.safetensors"),
    )
    assert config["architecture"] == "jumprelu" and (config["d_in"], config["d_sae"]) == (D, F)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "W_enc": (D, F),
        "W_dec": (F, D),
        "b_enc": (F,),
        "b_dec": (D,),
        "threshold": (F,),
    }
    np.testing.assert_allclose(lens_features(tensors, config, X), sae.encode(X), atol=1e-5)


def test_dictionaries_that_saelens_cannot_express_are_not_saved(tmp_path):
    with pytest.raises(SaeError, match="top-k sets what is below zero to zero"):
        random_sae("topk").save(tmp_path / "a")
    with pytest.raises(SaeError, match="thresholds below zero"):
        random_sae("jumprelu", threshold=-1.0).save(tmp_path / "b")
    with pytest.raises(SaeError, match="positive scales"):
        random_sae("gated", scale=-1.0).save(tmp_path / "c")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architecture": "temporal"}, "architecture 'temporal'"),
        ({"architecture": "standard", "activation_fn": "tanh-relu"}, "activation 'tanh-relu'"),
        (
            {"architecture": "standard", "activation_fn": "tanh-relu", "activation_fn_kwargs": {"a": 1}},
            "tanh-relu",
        ),
        ({"architecture": "standard", "normalize_activations": "covariance_whitening"}, "expected none"),
        ({"architecture": "standard", "hook_head_index": 3}, "one attention head"),
        ({"architecture": "standard", "metadata": {"hook_head_index": 0}}, "one attention head"),
        (
            {"architecture": "standard", "normalize_activations": "constant_norm_rescale", **CENTERED},
            "cannot be folded together",
        ),
        (
            {"architecture": "standard", "normalize_activations": "expected_average_only_in"},
            "activation_scaler.json",
        ),
        ({"architecture": "standard", "finetuning_scaling_factor": True}, "Fold it first"),
        ({"architecture": "jumprelu"}, "needs threshold"),
        ({"architecture": "topk"}, "needs k="),
    ],
)
def test_saelens_files_that_cannot_be_folded_are_refused(config, message, tmp_path):
    tensors = lens_tensors("standard")
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "sae_weights.safetensors"
    )
    (tmp_path / "cfg.json").write_text(json.dumps(config))
    with pytest.raises((SaeFileError, SaeError), match=message):
        Sae.load(tmp_path)


def test_errors_name_truncated_and_invalid_files(tmp_path):
    path = random_sae("relu").save(tmp_path / "s")
    whole = (path / "sae_weights.safetensors").read_bytes()
    (path / "sae_weights.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SaeFileError, match=r"sae_weights\.safetensors cannot be read"):
        Sae.load(path)
    (path / "cfg.json").write_text("{")
    with pytest.raises(SaeFileError, match=r"cfg\.json cannot be read"):
        Sae.load(path)
    (path / "cfg.json").write_text("[]")
    with pytest.raises(SaeFileError, match="expected an object"):
        Sae.load(path)


# Gemma Scope


def scope_arrays():
    return {
        "W_enc": random_tensor(D, F, seed=1, spread=0.4).numpy(),
        "W_dec": random_tensor(F, D, seed=2).numpy(),
        "b_enc": random_tensor(F, seed=3).numpy(),
        "b_dec": random_tensor(D, seed=4).numpy(),
        "threshold": random_tensor(F, seed=5).abs().numpy(),
    }


@pytest.mark.parametrize("lower", [False, True], ids=["W_enc", "w_enc"])
@pytest.mark.parametrize("file_name", ["params.npz", "other.npz", "params.safetensors"])
def test_gemma_scope_files_compute_what_they_were_trained_for(file_name, lower, tmp_path):
    tensors = scope_arrays()
    stored = {name.replace("W_", "w_") if lower else name: array for name, array in tensors.items()}
    if file_name.endswith(".npz"):
        np.savez(tmp_path / file_name, **stored)
    else:
        save_file({name: torch.from_numpy(array) for name, array in stored.items()}, tmp_path / file_name)
    sae = Sae.load(tmp_path / file_name if file_name == "other.npz" else tmp_path, "mlp_out", 2)
    z = X.double().numpy() @ tensors["W_enc"].astype(float) + tensors["b_enc"]
    expected = (z > tensors["threshold"]) * np.maximum(z, 0)
    np.testing.assert_allclose(sae.encode(X), expected, atol=2e-5)
    np.testing.assert_allclose(sae.reconstruct(X), expected @ tensors["W_dec"] + tensors["b_dec"], atol=1e-4)


def test_gemma_scope_archives_with_pickles_or_missing_arrays_are_refused(tmp_path):
    tensors = scope_arrays()
    np.savez(tmp_path / "a.npz", **{name: tensors[name] for name in ("W_enc", "W_dec")})
    with pytest.raises(SaeFileError, match="lacks b_enc, b_dec, threshold"):
        Sae.load(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", **{**tensors, "b_enc": np.array([{"x": 1}], dtype=object)})
    with pytest.raises(SaeFileError, match="plain arrays"):
        Sae.load(tmp_path / "b.npz")
    (tmp_path / "c.npz").write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(SaeFileError, match="plain arrays"):
        Sae.load(tmp_path / "c.npz")


# dictionary_learning


def dictionary_learning_file(kind):
    """A state dict of dictionary_learning, with the features and the reconstruction it gives for X."""
    e, w = random_tensor(F, D, seed=1, spread=0.4), random_tensor(D, F, seed=2, spread=0.6)
    c, b = random_tensor(F, seed=3, spread=0.3), random_tensor(D, seed=4)
    x = X.double()
    norms = w.double().norm(dim=0)
    if kind == "AutoEncoder":
        f = ((x - b) @ e.double().T + c).relu()
        return (
            {"encoder.weight": e, "encoder.bias": c, "decoder.weight": w, "bias": b},
            f,
            f @ w.double().T + b,
        )
    if kind == "AutoEncoderNew":
        f = (x @ e.double().T + c).relu()
        return (
            {"encoder.weight": e, "encoder.bias": c, "decoder.weight": w, "decoder.bias": b},
            f,
            f @ w.double().T + b,
        )
    if kind == "JumpReluAutoEncoder":
        level = random_tensor(F, seed=5).abs() * 0.5
        z = x @ e.double().T + c
        f = (z * (z > level)).relu()
        tensors = {
            "W_enc": e.T.contiguous(),
            "b_enc": c,
            "W_dec": w.T.contiguous(),
            "b_dec": b,
            "threshold": level,
        }
        return tensors, f * norms, f @ w.double().T + b
    if kind == "MatryoshkaBatchTopKSAE":
        f = ((x - b) @ e.double().T + c).relu()
        f = f * (f > 0.6)
        tensors = {
            "W_enc": e.T.contiguous(),
            "b_enc": c,
            "W_dec": w.T.contiguous(),
            "b_dec": b,
            "k": torch.tensor(6),
            "threshold": torch.tensor(0.6),
            "group_sizes": torch.tensor([10, 20]),
        }
        return tensors, f, f @ w.double().T + b
    if kind == "GatedAutoEncoder":
        r, gate, mag = random_tensor(F, seed=6) * 0.3, random_tensor(F, seed=7), random_tensor(F, seed=8)
        inside = (x - b) @ e.double().T
        f = ((inside + gate) > 0) * (r.double().exp() * inside + mag).relu()
        tensors = {
            "encoder.weight": e,
            "decoder.weight": w,
            "decoder_bias": b,
            "r_mag": r,
            "gate_bias": gate,
            "mag_bias": mag,
        }
        return tensors, f * norms, f @ w.double().T + b
    z = ((x - b) @ e.double().T + c).relu()
    tensors = {"encoder.weight": e, "encoder.bias": c, "decoder.weight": w, "b_dec": b, "k": torch.tensor(6)}
    if kind == "BatchTopKSAE":
        f = z * (z > 0.8)
        return tensors | {"threshold": torch.tensor(0.8)}, f, f @ w.double().T + b
    chosen = z.topk(6, dim=-1)
    f = torch.zeros_like(z).scatter(-1, chosen.indices, chosen.values)
    return tensors | {"threshold": torch.tensor(-1.0)}, f, f @ w.double().T + b


LEARNED = [
    "AutoEncoder",
    "AutoEncoderNew",
    "JumpReluAutoEncoder",
    "GatedAutoEncoder",
    "BatchTopKSAE",
    "AutoEncoderTopK",
    "MatryoshkaBatchTopKSAE",
]


@pytest.mark.parametrize("kind", LEARNED)
@pytest.mark.parametrize("as_parameters", [False, True], ids=["tensors", "parameters"])
def test_dictionary_learning_files_compute_what_they_were_trained_for(kind, as_parameters, tmp_path):
    tensors, f, rows = dictionary_learning_file(kind)
    if as_parameters:
        tensors = {
            n: torch.nn.Parameter(t) if t.is_floating_point() and t.ndim else t for n, t in tensors.items()
        }
    torch.save(tensors, tmp_path / "ae.pt")
    (tmp_path / "config.json").write_text(json.dumps({"trainer": {"dict_class": kind, "k": 6}}))
    sae = Sae.load(tmp_path)
    assert (f > 0).any()
    np.testing.assert_allclose(sae.encode(X), f.numpy(), atol=3e-5)
    np.testing.assert_allclose(sae.reconstruct(X), rows.numpy(), atol=1e-4)


def test_load_state_dict_equals_torch_load(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "plain": base,
        "turned": base.T,
        "slice": base[1:3, ::2],
        "half": base.half(),
        "b": base.bfloat16(),
        "ids": torch.arange(3),
        "flag": torch.tensor([True, False]),
        "none": torch.empty(0),
        "one": torch.tensor(2.5),
        "double": base.double(),
    }
    torch.save(tensors, tmp_path / "x.pt")
    ours, theirs = load_state_dict(tmp_path / "x.pt"), torch.load(tmp_path / "x.pt", weights_only=True)
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


class Unpickled:
    """Creates a directory when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_nothing_is_unpickled(tmp_path):
    trap = tmp_path / "sprung"
    torch.save({"encoder.weight": torch.ones(2, 2), "x": Unpickled(trap)}, tmp_path / "a.pt")
    with pytest.raises(SaeFileError, match=r"names 'posix\.mkdir', which plain tensors do not need"):
        Sae.load(tmp_path / "a.pt")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "b.pt")
    with pytest.raises(SaeFileError, match="Linear"):
        Sae.load(tmp_path / "b.pt")
    (tmp_path / "c.pt").write_bytes(pickle.dumps({"x": Unpickled(trap)}))
    with pytest.raises(SaeFileError, match="not an archive"):
        Sae.load(tmp_path / "c.pt")
    torch.save([torch.ones(2)], tmp_path / "d.pt")
    with pytest.raises(SaeFileError, match="expected tensors by name"):
        Sae.load(tmp_path / "d.pt")
    assert not trap.exists()


def rewrite(source, target, change):
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))


def test_inconsistent_torch_files_are_refused(tmp_path):
    torch.save({"w": torch.ones(8, 8)}, tmp_path / "a.pt")
    rewrite(tmp_path / "a.pt", tmp_path / "short.pt", lambda n, b: b[:64] if n.endswith("data/0") else b)
    with pytest.raises(SaeFileError, match="its index makes no sense"):
        load_state_dict(tmp_path / "short.pt")
    for cut in (1, 20, 60):
        rewrite(
            tmp_path / "a.pt",
            tmp_path / "cut.pt",
            lambda n, b, c=cut: b[:-c] if n.endswith("data.pkl") else b,
        )
        with pytest.raises(SaeFileError, match=r"its index|which plain tensors do not need"):
            load_state_dict(tmp_path / "cut.pt")
    with zipfile.ZipFile(tmp_path / "empty.pt", "w") as archive:
        archive.writestr("x", b"")
    with pytest.raises(SaeFileError, match=r"without the index of torch\.save"):
        load_state_dict(tmp_path / "empty.pt")


def test_torch_files_that_expand_when_read_are_refused(tmp_path):
    """A compressed member (3 MB could inflate to 3 GB), and a tensor that repeats one number 2**40 times."""
    torch.save({"w": torch.ones(8, 8)}, tmp_path / "a.pt")
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as old,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, bytes(1 << 20) if name.endswith("data/0") else old.read(name))
    with pytest.raises(SaeFileError, match="is compressed"):
        load_state_dict(tmp_path / "b.pt")
    torch.save({"w": torch.ones(1).expand(1 << 20, 1 << 20)}, tmp_path / "c.pt")
    with pytest.raises(SaeFileError, match="repeats its numbers"):
        load_state_dict(tmp_path / "c.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "d.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(SaeFileError, match="not an archive"):
        load_state_dict(tmp_path / "d.pt")


def test_ambiguous_dictionary_learning_files_are_refused(tmp_path):
    torch.save(dictionary_learning_file("AutoEncoderTopK")[0], tmp_path / "ae.pt")
    with pytest.raises(SaeFileError, match="does not say which of the two kinds"):
        Sae.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"trainer": {"dict_class": "BatchTopKSAE"}}))
    with pytest.raises(SaeFileError, match="training never set one"):
        Sae.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    several = {
        "encoder.weight": (2, 3, 4),
        "encoder.bias": (3,),
        "decoder.weight": (2, 4, 3),
        "decoder.bias": (2, 4),
    }
    torch.save({name: torch.ones(shape) for name, shape in several.items()}, tmp_path / "ae.pt")
    with pytest.raises(SaeFileError, match="Crosscoders are not read"):
        Sae.load(tmp_path)
    torch.save({"something": torch.ones(2)}, tmp_path / "ae.pt")
    with pytest.raises(SaeFileError, match="holds something, which is no dictionary we know"):
        Sae.load(tmp_path)


# The manifest layout


@pytest.mark.parametrize("family", ["relu", "jumprelu", "topk", "batchtopk", "gated"])
def test_a_manifest_round_trips_every_site(family, tmp_path):
    labels, levels = {1: "one"}, torch.arange(24.0)
    saes = [
        random_sae(
            family,
            seed=layer,
            hook="mhc_streams_pre_mlp",
            layer=layer,
            view="read",
            spread="uniform",
            labels=labels,
            x_max=levels,
        )
        for layer in (2, 5)
    ]
    save_manifest(saes, tmp_path, clampable=[3, 1])
    back = load_all(tmp_path)
    assert [sae.digest for sae in back] == [sae.digest for sae in saes] and clampable_features(tmp_path) == [
        1,
        3,
    ]
    assert all(sae.labels == labels and torch.equal(sae.x_max, levels) for sae in back)
    assert Sae.load(tmp_path, layer=5).digest == saes[1].digest
    with pytest.raises(SaeError, match="holds dictionaries for 2 sites"):
        Sae.load(tmp_path)
    with pytest.raises(SaeError, match="no dictionary with layer=4"):
        Sae.load(tmp_path, layer=4)


def test_one_dictionary_in_the_manifest_layout(tmp_path):
    sae = random_sae("topk", hook="mlp_out", layer=0)
    assert Sae.load(sae.save(tmp_path, layout="manifest")).digest == sae.digest
    assert clampable_features(tmp_path) is None
    with pytest.raises(SaeError, match="layout is 'zip'"):
        sae.save(tmp_path, layout="zip")
    with pytest.raises(SaeError, match="says no site"):
        random_sae("topk").save(tmp_path / "x", layout="manifest")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "unknown field 'extra'"),
        ({"d_sae": None}, r"the encoder is \(24, 16\), the manifest says \(None, 16\)"),
        ({"layers": [[0, "../mlp_out"]]}, r"expected a list of \[layer, hook\]"),
        ({"layers": []}, r"expected a list of \[layer, hook\]"),
        ({"layers": [[7, "mlp_out"]]}, r"layer_7_mlp_out\.safetensors cannot be read"),
        ({"activation_params": {"q": 1}}, "expected k, rectified or threshold"),
    ],
)
def test_invalid_manifests_are_refused(change, message, tmp_path):
    random_sae("relu", hook="mlp_out", layer=0).save(tmp_path, layout="manifest")
    whole = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(whole | change))
    with pytest.raises(SaeFileError, match=message):
        load_all(tmp_path)


@pytest.mark.parametrize("layout", ["saelens", "manifest"])
def test_all_files_of_a_dictionary_have_the_mode_of_new_files(tmp_path, layout):
    random_sae("jumprelu", hook="mlp_out", layer=1, view="single", x_max=[1.0] * 24).save(
        tmp_path / "sae", layout
    )
    (tmp_path / "new").touch()
    expected = (tmp_path / "new").stat().st_mode
    assert {file.stat().st_mode for file in (tmp_path / "sae").iterdir()} == {expected}
