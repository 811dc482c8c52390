"""Routing and experts: values of the specification, ties, and rows that do not depend on their batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from birkhoff.kernels import quant
from birkhoff.kernels.experts import Stack, swiglu


def test_sqrt_softplus_matches_the_specification(kernels):
    """Checked by the weights of two experts, one of which has the known score of logit 0."""
    expected = {-4.0: 0.1347217, 0.0: 0.8325546, 1.0: 1.1459763, 25.0: 5.0}
    given_ids = torch.tensor([[0, 1]])
    for logit, value in expected.items():
        _, weights = kernels.route(torch.tensor([[logit, 0.0]]), None, given_ids, 2, 1.0)
        assert weights[0, 0].item() == pytest.approx(value / (value + 0.8325546), abs=1e-6)


def route_by_definition(logits, bias, ids, topk, factor):
    scores = np.sqrt(np.logaddexp(0.0, logits.astype(np.float64)))
    if ids is None:
        biased = scores + (0 if bias is None else bias.astype(np.float64))
        ids = np.stack(
            [sorted(range(len(row)), key=lambda e, row=row: (-row[e], e))[:topk] for row in biased]
        )
    picked = np.take_along_axis(scores, ids, -1)
    return ids, picked / picked.sum(-1, keepdims=True) * factor


@given(
    rows=st.integers(1, 40),
    count=st.integers(1, 30),
    topk=st.integers(1, 6),
    biased=st.booleans(),
    hashed=st.booleans(),
    seed=st.integers(0, 999),
)
def test_routing_matches_the_definition(kernels, rows, count, topk, biased, hashed, seed):
    topk, rng = min(topk, count), np.random.default_rng(seed)
    logits = rng.standard_normal((rows, count), dtype=np.float32) * 3
    bias = rng.standard_normal(count, dtype=np.float32) if biased else None
    ids = np.stack([rng.permutation(count)[:topk] for _ in range(rows)]) if hashed else None
    actual_ids, weights = kernels.route(
        torch.tensor(logits),
        None if bias is None else torch.tensor(bias),
        None if ids is None else torch.tensor(ids),
        topk,
        2.5,
    )
    expected_ids, expected_weights = route_by_definition(logits, bias, ids, topk, 2.5)
    assert (
        np.array_equal(actual_ids.numpy(), expected_ids)
        and np.abs(weights.numpy() - expected_weights).max() < 2e-6
    )
    assert weights.sum(-1).tolist() == pytest.approx([2.5] * rows, abs=1e-5)


@given(logits=hnp.arrays(np.float32, (4, 9), elements=st.integers(-1, 1).map(float)), topk=st.integers(1, 9))
def test_equal_scores_go_to_the_lowest_ids(kernels, logits, topk):
    ids, _ = kernels.route(torch.tensor(logits), torch.zeros(9), None, topk, 1.0)
    expected = [sorted(range(9), key=lambda e, row=row: (-row[e], e))[:topk] for row in logits]
    assert ids.tolist() == expected


def test_the_bias_affects_selection_and_not_weights(kernels):
    logits, bias = torch.tensor([[1.0, 0.0, -4.0]]), torch.tensor([0.0, 0.0, 50.0])
    ids, weights = kernels.route(logits, bias, None, 2, 1.0)
    assert sorted(ids[0].tolist()) == [0, 2]
    share = dict(zip(ids[0].tolist(), weights[0].tolist()))
    assert share[2] == pytest.approx(0.1347217 / (0.1347217 + 1.1459763), abs=1e-6)


def test_extreme_logits(kernels):
    """softplus of -100 is 3.7e-44 and of 1e4 is 1e4: finite, positive, normalised."""
    ids, weights = kernels.route(torch.tensor([[-100.0, -90.0, 1e4]]), None, torch.tensor([[0, 1]]), 2, 1.5)
    assert torch.isfinite(weights).all() and weights.sum().item() == pytest.approx(1.5, rel=1e-5)
    ids, weights = kernels.route(torch.tensor([[-100.0, -90.0, 1e4]]), None, None, 1, 1.5)
    assert ids.tolist() == [[2]] and weights.tolist() == [[1.5]]


def test_swiglu_clamps_the_gate_from_above_and_the_value_on_both_sides():
    a, b = torch.tensor([-50.0, -1.0, 1.0, 50.0, 50.0, 2.0]), torch.tensor([1.0, 1.0, 1.0, 1.0, 50.0, -50.0])
    silu = lambda v: v / (1 + math.exp(-v))  # noqa: E731
    expected = [silu(-50.0), silu(-1.0), silu(1.0), silu(10.0), silu(10.0) * 10, silu(2.0) * -10]
    assert swiglu(a, b, 10.0).tolist() == pytest.approx(expected, rel=1e-6)
    assert swiglu(a.bfloat16(), b.bfloat16(), 10.0).dtype == torch.float32


def random_stack(count, inner, width, seed, dtype=torch.float32) -> Stack:
    g = torch.Generator().manual_seed(seed)
    gate_up = (torch.randn(count, 2 * inner, width, generator=g) * width**-0.5 * 2).to(dtype)
    down = (torch.randn(count, inner, width, generator=g) * inner**-0.5).to(dtype)
    return Stack(count, gate_up.__getitem__, down.__getitem__, (gate_up, down))


def experts_by_definition(x, ids, weights, stack, limit, round_input=lambda v: v):
    gate_up, down = (t.double().numpy() for t in stack.dense)
    out = np.zeros(x.shape)
    for row, chosen in enumerate(ids.tolist()):
        entering = round_input(x[row : row + 1]).double().numpy()[0]
        for slot, e in enumerate(chosen):
            a, b = np.split(gate_up[e] @ entering, 2)
            a, b = np.minimum(a, limit), np.clip(b, -limit, limit)
            z = a / (1 + np.exp(-a)) * b * float(weights[row, slot])
            out[row] += round_input(torch.tensor(z[None]).float()).double().numpy()[0] @ down[e]
    return out


def random_routing(rows, count, topk, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.rand(rows, count, generator=g).argsort(-1)[:, :topk], torch.rand(
        rows, topk, generator=g
    ) + 0.1


@given(
    rows=st.integers(1, 40),
    count=st.integers(1, 12),
    topk=st.integers(1, 4),
    inner=st.integers(1, 20),
    width=st.integers(1, 30),
    seed=st.integers(0, 999),
)
def test_experts_match_the_definition(kernels, rows, count, topk, inner, width, seed):
    stack = random_stack(count, inner, width, seed)
    ids, weights = random_routing(rows, count, min(topk, count), seed)
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed + 1))
    out = kernels.experts(x, ids, weights, stack, 1.0, None)
    assert (
        out.dtype == torch.float32
        and np.abs(out.numpy() - experts_by_definition(x, ids, weights, stack, 1.0)).max() < 1e-5
    )


@pytest.mark.parametrize("rows", [1, 2, 5, 12, 13, 60])
def test_a_row_does_not_depend_on_the_batch(kernels, rows):
    stack, (ids, weights) = random_stack(9, 20, 32, 1), random_routing(rows, 9, 3, 1)
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(2))
    whole = kernels.experts(x, ids, weights, stack, 1.0, None)
    for i in range(rows):
        alone = kernels.experts(x[i : i + 1], ids[i : i + 1], weights[i : i + 1], stack, 1.0, None)
        assert (whole[i] - alone[0]).abs().max() < 1e-6
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(3))
    assert (
        kernels.experts(x[order], ids[order], weights[order], stack, 1.0, None) - whole[order]
    ).abs().max() < 1e-6
    # The order of the selected experts does not matter.
    flipped = kernels.experts(x, ids.flip(-1), weights.flip(-1), stack, 1.0, None)
    assert (flipped - whole).abs().max() < 1e-6


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_round_input_applies_to_both_products(kernels, rows):
    stack, (ids, weights) = random_stack(6, 64, 48, 4), random_routing(rows, 6, 2, 4)
    x = torch.randn(rows, 48, generator=torch.Generator().manual_seed(5))

    def rounding(v):
        return quant.fp8_round(v, 128)

    out = kernels.experts(x, ids, weights, stack, 1.0, rounding)
    expected, plain = (
        experts_by_definition(x, ids, weights, stack, 1.0, rounding),
        experts_by_definition(x, ids, weights, stack, 1.0),
    )
    # A tie may change one value by one FP8 step.
    assert np.abs(out.numpy() - expected).max() < 0.02 < np.abs(expected - plain).max()
    assert np.sqrt(np.mean((out.numpy() - expected) ** 2)) < 0.02 * np.sqrt(np.mean((expected - plain) ** 2))


def test_only_selected_packed_experts_are_loaded(kernels):
    stack = random_stack(8, 32, 32, 6)
    loaded = []
    packed = Stack(8, lambda e: loaded.append(e) or stack.gate_up(e), stack.down, None)
    ids, weights = torch.tensor([[5, 1], [1, 3]]), torch.tensor([[0.4, 0.6], [0.5, 0.5]])
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(7))
    out = kernels.experts(x, ids, weights, packed, 1.0, None)
    assert (out - kernels.experts(x, ids, weights, stack, 1.0, None)).abs().max() < 1e-6
    assert sorted(set(loaded)) == [1, 3, 5]


def test_bfloat16_sums_in_float32(kernels):
    stack, (ids, weights) = random_stack(6, 24, 40, 8, torch.bfloat16), random_routing(9, 6, 3, 8)
    x = torch.randn(9, 40, generator=torch.Generator().manual_seed(9)).bfloat16()
    out, expected = (
        kernels.experts(x, ids, weights, stack, 1.0, None),
        experts_by_definition(x, ids, weights, stack, 1.0),
    )
    assert (
        out.dtype == torch.float32 and np.abs(out.numpy() - expected).max() < 2.0**-6 * np.abs(expected).max()
    )
