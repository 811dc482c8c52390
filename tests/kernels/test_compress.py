"""Pooling of tokens into an entry: per channel, a softmax over the items."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from birkhoff.kernels.compress import pool


@given(
    items=st.sampled_from([1, 4, 8, 128]),
    width=st.integers(1, 20),
    spread=st.sampled_from([0.1, 1.0, 30.0]),
    seed=st.integers(0, 999),
)
def test_pool_matches_the_definition(items, width, spread, seed):
    g = torch.Generator().manual_seed(seed)
    values, gates = (
        torch.randn(3, items, width, generator=g),
        torch.randn(3, items, width, generator=g) * spread,
    )
    expected = np.empty((3, width))
    for block in range(3):
        for channel in range(width):
            weight = np.exp(gates[block, :, channel].double().numpy() - gates[block, :, channel].max().item())
            expected[block, channel] = (
                weight * values[block, :, channel].double().numpy()
            ).sum() / weight.sum()
    assert np.abs(pool(values, gates).numpy() - expected).max() < 2e-6


def test_items_with_a_gate_of_minus_infinity_are_excluded():
    """The first CSA entry has no older block: the gates there are minus infinity, and the values are ignored."""
    g = torch.Generator().manual_seed(1)
    values, gates = torch.randn(8, 5, generator=g), torch.randn(8, 5, generator=g)
    gates[:4] = -torch.inf
    assert (pool(values, gates) - pool(values[4:], gates[4:])).abs().max() < 1e-6


def test_equal_gates_give_the_mean_and_one_large_gate_its_value():
    values = torch.arange(12.0).view(4, 3)
    assert torch.equal(pool(values, torch.zeros(4, 3)), values.mean(0))
    gates = torch.zeros(4, 3)
    gates[2] = 200.0
    assert torch.equal(pool(values, gates), values[2])
    assert torch.isfinite(pool(values, torch.full((4, 3), 3e38))).all()


def test_a_common_shift_of_the_gates_changes_nothing():
    g = torch.Generator().manual_seed(2)
    values, gates = torch.randn(128, 6, generator=g), torch.randn(128, 6, generator=g)
    assert (pool(values, gates) - pool(values, gates + 7.0)).abs().max() < 1e-6
