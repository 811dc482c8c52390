"""Dictionaries that normalise every row: features, splices, recorded splices and files, against float64 row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from birkhoff.errors import SaeError
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.evaluate import quality
from birkhoff.sae.graph_sae import GraphSae
from tests.sae.reference import changed_unit, features_of, random_sae
from tests.sae.test_splice import around_of, host_of, rows_of, use_of

NORMS = ("layer_norm", "constant_norm")
FAMILIES = ("relu", "jumprelu", "topk")
CLAMPS = {3: ("absolute", 2.5, False), 7: ("additive", -1.5, False), 8: ("multiply", -2.0, True)}


def normalized(row: np.ndarray, norm: str) -> tuple[np.ndarray, float, float]:
    """The row as the trainer saw it, and what it multiplies and adds to a reconstruction."""
    if norm == "layer_norm":
        centered = row - row.mean()
        std = np.sqrt((centered**2).sum() / (len(row) - 1))
        return centered / (std + 1e-5), std, row.mean()
    factor = np.sqrt(len(row)) / np.sqrt((row**2).sum())
    return row * factor, 1 / factor, 0.0


def expected_row(sae: Sae, row: np.ndarray, clamps: dict, mode: str) -> np.ndarray:
    v, scale, shift = normalized(row, sae.normalize)
    if mode == "drop":
        return changed_unit(sae, v, clamps, mode) * scale + shift
    return row + (changed_unit(sae, v, clamps, mode) - v) * scale


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_features_and_reconstructions_match_float64(family, norm):
    sae, x = random_sae(family, normalize=norm), rows_of(9, "single") + 0.7
    exact = [normalized(row, norm) for row in x.double().numpy()]
    np.testing.assert_allclose(sae.encode(x), [features_of(sae, v) for v, _, _ in exact], atol=1e-5)
    np.testing.assert_allclose(
        sae.reconstruct(x), [expected_row(sae, row, {}, "drop") for row in x.double().numpy()], atol=5e-5
    )
    assert torch.equal(sae.decode(sae.encode(x), x), sae.reconstruct(x))
    with pytest.raises(SaeError, match=r"decode\(features, x\)"):
        sae.decode(sae.encode(x))
    assert quality(sae, [x]).rows == 9


@pytest.mark.parametrize("clamps", [CLAMPS, {7: CLAMPS[7]}, {}], ids=["clamped", "constant", "pure"])
@pytest.mark.parametrize("mode", ["delta", "keep", "drop"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_splices_eager_and_recorded_match_float64(family, norm, mode, clamps):
    sae, x, around = random_sae(family, normalize=norm), rows_of(8, "single", 3) - 0.4, around_of(8)
    host, rows = host_of(sae), [0, 2, 5]
    use = use_of(host, sae, clamps, mode)
    out = host.run(x, [(use, rows)], around)
    expected = x.double().numpy().copy()
    for row in rows:
        expected[row] = expected_row(sae, expected[row], clamps, mode)
    np.testing.assert_allclose(out.numpy(), expected, atol=1e-4)
    recorded = GraphSae(host, host.graph_kind([(use, rows)]))
    recorded.fill([(use, rows)])
    assert torch.equal(recorded.run(x, around), out)


@pytest.mark.parametrize("layout", ["saelens", "manifest"])
@pytest.mark.parametrize("norm", NORMS)
def test_files_keep_the_norm(norm, layout, tmp_path):
    sae = random_sae("jumprelu", normalize=norm, hook="mlp_out", layer=2)
    again = Sae.load(sae.save(tmp_path / "sae", layout))
    assert again.normalize == norm and again.digest == sae.digest
    assert sae.digest != random_sae("jumprelu", hook="mlp_out", layer=2).digest
    with pytest.raises(SaeError, match="expected one of none, layer_norm"):
        random_sae("relu", normalize="batch_norm")
