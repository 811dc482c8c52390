"""One dictionary: arithmetic against float64, invalid arguments, and saving and loading."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.errors import SaeError, SaeFileError
from birkhoff.sae.activations import largest
from birkhoff.sae.dictionary import Sae
from tests.sae.reference import FAMILIES, decoded, features_of, random_sae


def rows(count, width=16, seed=5):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_features_and_rows_match_float64(family, seed):
    sae, x = random_sae(family, seed=seed), rows(20, seed=seed + 50)
    f, back = sae.encode(x), sae.reconstruct(x)
    expected = np.stack([features_of(sae, row) for row in x.double().numpy()])
    assert (expected != 0).any() and (expected == 0).any()
    np.testing.assert_allclose(f.numpy(), expected, atol=2e-5)
    np.testing.assert_allclose(back.numpy(), np.stack([decoded(sae, row) for row in expected]), atol=1e-4)


def test_a_rectified_topk_sets_negative_features_to_zero():
    sae = random_sae("topk", k=20, rectified=True)
    f, free = sae.encode(rows(9)), random_sae("topk", k=20).encode(rows(9))
    assert (free < 0).any() and torch.equal(f, free.clamp(min=0))


@given(
    st.lists(
        st.lists(st.sampled_from([-2.0, -1.0, 0.0, 1.0, float("nan"), float("inf")]), min_size=6, max_size=6),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 6),
)
@settings(max_examples=60, deadline=None)
def test_exactly_k_are_kept_and_ties_go_to_the_lowest_index(values, k):
    kept = largest(torch.tensor(values), k)
    assert kept.sum(-1).tolist() == [k] * len(values)
    for row, marks in zip(values, kept.tolist()):
        ranked = sorted(range(6), key=lambda i: (-(float("-inf") if row[i] != row[i] else row[i]), i))
        assert sorted(ranked[:k]) == [i for i in range(6) if marks[i]]


@pytest.mark.parametrize("family", FAMILIES)
def test_nan_rows_stay_nan_and_do_not_affect_others(family):
    broken = rows(3)
    broken[1, 2] = float("nan")
    back = random_sae(family).reconstruct(broken)
    assert back[1].isnan().any() and back[[0, 2]].isfinite().all()


def test_features_are_found_by_label():
    sae = random_sae("relu", labels={3: "bridge", 7: "fog", 9: "fog"})
    assert sae.feature("bridge") == 3 and sae.feature(5) == 5
    for name, message in (
        ("fog", "2 features"),
        ("rain", "no feature is labelled 'rain'"),
        (24, "0..23"),
        (True, "True"),
        (-1, "-1"),
    ):
        with pytest.raises(SaeError, match=message):
            sae.feature(name)
    many = random_sae("relu", labels={index: f"word {index}" for index in range(12)} | {20: "the sea"})
    with pytest.raises(SaeError, match=r"13 others\. Did you mean 'the sea'\? .* birkhoff sae search"):
        many.feature("the see")


def test_the_digest_depends_on_what_is_computed():
    one = random_sae("jumprelu")
    assert (
        one.digest
        == random_sae("jumprelu", labels={1: "x"}).digest
        == one.at("mlp_out", 2).at(None, None).digest
    )  # type: ignore[arg-type]
    different = [
        random_sae("jumprelu", seed=1),
        random_sae("batchtopk"),
        one.at("mlp_out", 2),
        one.at("mlp_in", 2),
        one.at("mlp_out", 3),
        one.at("mlp_out", 3, "mean"),
        random_sae("topk"),
        random_sae("topk", rectified=True),
    ]
    assert len({sae.digest for sae in [one, *different]}) == len(different) + 1


E, C = torch.ones(4, 3), torch.zeros(4)
BAD = [
    ({"encoder": torch.ones(4, 3), "decoder": torch.ones(3, 4)}, r"\(4, 3\) and the decoder \(3, 4\)"),
    ({"encoder": torch.ones(4)}, r"shape \(4,\)"),
    ({"encoder": torch.ones(0, 3), "decoder": torch.ones(0, 3)}, "neither of them 0"),
    ({"encoder": "weights"}, "expected a matrix"),
    ({"encoder": torch.full((4, 3), float("nan"))}, r"encoder\[0, 0\] is nan"),
    ({"decoder": torch.tensor([[1.0, 2, 3]] * 3 + [[1, float("inf"), 0]])}, r"decoder\[3, 1\] is inf"),
    ({"encoder_bias": torch.zeros(3)}, r"encoder_bias has shape \(3,\), expected \(4,\)"),
    ({"encoder_bias": [0.0, 1.0, float("nan"), 0.0]}, r"encoder_bias\[2\] is nan"),
    ({"decoder_bias": torch.zeros(4)}, r"decoder_bias has shape \(4,\), expected \(3,\)"),
    ({"decoder_bias": torch.full((3,), float("inf"))}, "decoder_bias holds"),
    ({"activation": "gelu"}, "expected one of relu"),
    ({"activation": "jumprelu"}, "needs threshold="),
    ({"activation": "relu", "threshold": 0.1}, "has no threshold"),
    ({"activation": "topk", "k": 5}, "from 1 to 4"),
    ({"activation": "topk", "k": True}, "k is True"),
    ({"activation": "gated", "scale": 1.0}, "needs shift="),
    ({"activation": "relu", "rectified": True}, "rectified is True"),
    ({"view": "sideways"}, "expected one of single"),
    ({"view": "read"}, "spread is None"),
    ({"view": "mean", "spread": "post"}, "only view 'read'"),
    ({"layer": "three"}, "layer is 'three'"),
    ({"hook": 3}, "hook is 3"),
    ({"labels": {9: "x"}}, "feature 9"),
    ({"labels": {1: ""}}, "label of feature 1"),
    ({"labels": ["x"]}, "expected a mapping"),
    ({"x_max": [1.0]}, "x_max has shape"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message[:30] for _, message in BAD])
def test_invalid_arguments_are_refused_on_construction(change, message):
    arguments = {"encoder": E, "encoder_bias": C, "decoder": E, **change}
    with pytest.raises(SaeError, match=message):
        Sae(**arguments)


def test_rows_of_another_width_are_refused_with_both_widths():
    with pytest.raises(SaeError, match=r"rows of 15, .* last dimension is 16"):
        random_sae("relu").encode(torch.zeros(2, 15))
    with pytest.raises(SaeError, match=r"rows of 16, .* last dimension is 24"):
        random_sae("relu").decode(torch.zeros(2, 16))


@pytest.mark.parametrize("family", FAMILIES)
def test_save_and_load_round_trip(family, tmp_path):
    more = {"rectified": True} if family == "topk" else {}
    sae = random_sae(
        family,
        hook="mhc_streams_final",
        layer=5,
        view="read",
        spread="post",
        labels={2: "näme"},
        x_max=torch.arange(24.0),
        metadata={"model_name": "tiny"},
        **more,
    )
    back = Sae.load(sae.save(tmp_path / "sae"))
    assert (back.hook, back.layer, back.view, back.spread) == ("mhc_streams_final", 5, "read", "post")
    assert back.activation.name == family and back.labels == sae.labels and torch.equal(back.x_max, sae.x_max)
    assert back.metadata["model_name"] == "tiny"
    assert torch.allclose(back.encode(rows(30)), sae.encode(rows(30)), atol=1e-6)
    if family != "gated":  # the file stores the logarithm of the scales
        assert back.digest == sae.digest


def test_loading_at_a_site_that_contradicts_the_file_is_refused(tmp_path):
    path = random_sae("relu", hook="mlp_out", layer=1).save(tmp_path)
    assert Sae.load(path, "mlp_out", 1).layer == 1
    with pytest.raises(SaeError, match="its layer is 1, and 2"):
        Sae.load(path, "mlp_out", 2)


def test_errors_name_missing_and_unknown_files(tmp_path):
    with pytest.raises(SaeFileError, match="does not exist"):
        Sae.load(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(SaeFileError, match=r"holds notes\.txt"):
        Sae.load(tmp_path)
