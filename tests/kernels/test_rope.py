"""Rotation: frequencies of the release to nine digits, channel pairs, rotated slice, and invariants."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from birkhoff.config import RopeScaling, V4Config
from birkhoff.kernels.rope import frequencies, phases
from birkhoff.model.rope import Rope
from tests.model.float64 import rope as exact_rope

RELEASED = {"factor": 16.0, "original": 65536, "fast": 32.0, "slow": 1.0}


@pytest.mark.parametrize(
    ("i", "omega"),
    [
        (0, 1.0),
        (1, 0.687656045),
        (15, 3.635538509e-3),
        (16, 2.265624935e-3),
        (20, 2.969777852e-4),
        (25, 5.372312444e-6),
        (31, 5.680529398e-7),
    ],
)
def test_frequencies_of_compressed_layers_match_the_release(i, omega):
    assert frequencies(64, 160000.0, **RELEASED)[i].item() == pytest.approx(omega, rel=2e-7)


def test_frequencies_of_sliding_layers_match_the_release():
    omega = frequencies(64, 10000.0)
    assert omega[1].item() == pytest.approx(0.7498942018, rel=1e-7)
    assert omega[31].item() == pytest.approx(1.333521504e-4, rel=1e-7)


def test_the_ramp_of_the_release_runs_from_15_to_25():
    """c(32) = 15.4533 and c(1) = 24.7084: frequencies up to 15 are unchanged, from 25 on they are divided by 16."""
    for beta, channel in ((32, 15.4533), (1, 24.7084)):
        assert 64 * math.log(65536 / (2 * math.pi * beta)) / (2 * math.log(160000)) == pytest.approx(
            channel, abs=1e-4
        )
    plain, slowed = frequencies(64, 160000.0), frequencies(64, 160000.0, **RELEASED)
    assert torch.equal(plain[:16], slowed[:16]) and torch.equal(plain[25:] / 16, slowed[25:])
    share = (plain - slowed) / (plain - plain / 16)
    assert share[16:25].tolist() == pytest.approx([k / 10 for k in range(1, 10)], abs=1e-5)


def test_the_model_uses_the_right_table_for_each_layer_type():
    rope = Rope(V4Config(rope_scaling=RopeScaling(16.0, 65536)))
    assert torch.equal(rope.sliding, frequencies(64, 10000.0))
    assert torch.equal(rope.compressed, frequencies(64, 160000.0, **RELEASED))


def test_a_ramp_of_width_zero_is_a_step():
    """If both ends fall on one channel, there must be no division by zero."""
    omega = frequencies(8, 160000.0, 4.0, 13, 2.0, 1.9)
    assert torch.isfinite(omega).all() and (omega <= frequencies(8, 160000.0)).all()


def test_the_example_of_the_specification(kernels):
    rotation = phases(torch.tensor([3]), frequencies(4, 10000.0))
    out = kernels.rotate(torch.arange(1.0, 9.0).view(1, 8), rotation)
    assert out[0].tolist() == pytest.approx([1, 2, 3, 4, -5.796682, -5.234355, 6.756886, 8.206368], abs=2e-6)


@given(
    rows=st.integers(1, 9),
    heads=st.integers(1, 4),
    unrotated=st.integers(0, 9),
    pairs=st.integers(1, 8),
    start=st.integers(0, 5000),
    inverse=st.booleans(),
    seed=st.integers(0, 999),
)
def test_rotate_matches_the_definition(kernels, rows, heads, unrotated, pairs, start, inverse, seed):
    x = torch.randn(rows, heads, unrotated + 2 * pairs, generator=torch.Generator().manual_seed(seed))
    omega, positions = frequencies(2 * pairs, 10000.0), torch.arange(start, start + rows)
    out = kernels.rotate(x, phases(positions, omega), inverse=inverse)
    expected = np.stack(
        [
            exact_rope(row.double().numpy(), start + i, omega.double().numpy(), inverse)
            for i, row in enumerate(x)
        ]
    )
    # float32 represents an angle of a few thousand to a few 1e-4, as the tables of the release do.
    assert np.abs(out.numpy() - expected).max() < 2e-6 + 4e-7 * (start + rows) * 3
    assert torch.equal(out[..., :unrotated], x[..., :unrotated])


def test_the_inverse_restores_the_input_and_norms_are_kept(kernels):
    x = torch.randn(50, 3, 24, generator=torch.Generator().manual_seed(1))
    rotation = phases(torch.arange(50) * 997, frequencies(16, 160000.0, **RELEASED))
    rotated = kernels.rotate(x, rotation)
    assert (kernels.rotate(rotated, rotation, inverse=True) - x).abs().max() < 2e-6
    assert (rotated.norm(dim=-1) - x.norm(dim=-1)).abs().max() < 1e-5
    # YaRN's magnitude factor is not applied.
    assert (rotation.cos.square() + rotation.sin.square() - 1).abs().max() < 1e-6


def test_a_dot_product_depends_on_the_distance_only(kernels):
    g = torch.Generator().manual_seed(2)
    query, key, omega = torch.randn(16, generator=g), torch.randn(16, generator=g), frequencies(16, 10000.0)

    def product(a, b):
        rotated_pair = kernels.rotate(torch.stack((query, key)), phases(torch.tensor([a, b]), omega))
        return (rotated_pair[0] @ rotated_pair[1]).item()

    assert product(40, 17) == pytest.approx(product(123, 100), abs=1e-4)
    assert abs(product(40, 17) - product(40, 18)) > 1e-3


def test_bfloat16_is_rounded_once_and_phases_broadcast_over_heads(kernels):
    x = torch.randn(2, 5, 3, 12, generator=torch.Generator().manual_seed(3)).bfloat16()
    rotation = phases(torch.arange(10).view(2, 5), frequencies(8, 10000.0))
    out = kernels.rotate(x, rotation)
    assert out.dtype == torch.bfloat16 and out.shape == x.shape
    assert torch.equal(out, kernels.rotate(x.float(), rotation).bfloat16())
    assert torch.equal(out[1, 2, 0], kernels.rotate(x[1, 2, 0], rotation.view(lambda t: t[1, 2])))


def test_rotate_does_not_modify_its_input(kernels):
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(4))
    before = x.clone()
    kernels.rotate(x, phases(torch.arange(4), frequencies(8, 10000.0)))
    assert torch.equal(x, before)
