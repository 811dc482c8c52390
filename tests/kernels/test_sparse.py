"""Sparse products and the Adam step of training: twins in Triton and in PyTorch against loops and PyTorch's Adam."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.kernels.sparse import REFERENCE, AdamStep, RowGradient, RowParameters, SparseKernels

pytest.importorskip("triton", reason="triton is not installed")

from birkhoff.kernels.sparse import training

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TRITON = SparseKernels(training.weighted_rows, training.pair_dots, training.segment_sums, training.adam_rows)


@pytest.fixture(scope="module", params=[REFERENCE, TRITON], ids=["reference", "triton"])
def kernels(request):
    return request.param


def random_code(groups: int, rows: int, pairs: int, seed: int):
    """Pairs of random groups, some of which are empty, and weights of both signs."""
    g = torch.Generator().manual_seed(seed)
    group = torch.randint(groups, (pairs,), generator=g).sort().values
    starts = torch.searchsorted(group, torch.arange(groups + 1))
    index = torch.randint(rows, (pairs,), generator=g)
    return starts.to(DEVICE), index.to(DEVICE), torch.randn(pairs, generator=g).to(DEVICE)


def close(ours: torch.Tensor, exact: torch.Tensor, bound: float = 1e-6) -> bool:
    return bool((ours.double() - exact).abs().max() <= bound * max(float(exact.abs().max()), 1e-6))


@settings(max_examples=4)
@given(
    groups=st.integers(1, 9),
    rows=st.integers(1, 7),
    pairs=st.integers(0, 30),
    width=st.integers(1, 40),
    half=st.booleans(),
    seed=st.integers(0, 99),
)
def test_sparse_products_equal_loops(kernels, groups, rows, pairs, width, half, seed):
    starts, index, weights = random_code(groups, rows, pairs, seed)
    table = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed + 1)).to(DEVICE)
    table = table.bfloat16() if half else table
    exact = torch.zeros(groups, width, dtype=torch.float64, device=DEVICE)
    sums = torch.zeros(groups, dtype=torch.float64, device=DEVICE)
    for group in range(groups):
        for j in range(int(starts[group]), int(starts[group + 1])):
            exact[group] += weights[j].double() * table[index[j]].double()
            sums[group] += weights[j].double()
    assert close(kernels.weighted_rows(starts, index, weights, table), exact)
    assert close(kernels.segment_sums(starts, weights), sums)
    other = index.flip(0)
    dots = (table[index].double() * table[other].double()).sum(1)
    ours = kernels.pair_dots(table, index, table, other)
    assert ours.shape == (pairs,) and (not pairs or close(ours, dots, 2e-6))


@pytest.mark.parametrize(
    ("unit", "rounded", "extra"), [(False, True, False), (True, False, True), (True, True, False)]
)
def test_adam_rows_equal_the_adam_of_pytorch(kernels, unit, rounded, extra):
    """Two steps with other gradients each, against torch.optim.Adam in float64 with dense gradients."""
    features, rows, width = 5, 6, 37
    g = torch.Generator().manual_seed(3)
    start = torch.randn(features, width, generator=g)
    start = start / start.norm(dim=1, keepdim=True) if unit else start
    ours = RowParameters(
        start.clone().to(DEVICE),
        torch.zeros(features, width, device=DEVICE),
        torch.zeros(features, width, device=DEVICE),
        torch.empty(features, width, dtype=torch.bfloat16, device=DEVICE) if rounded else None,
        unit,
    )
    theirs = start.double().to(DEVICE).requires_grad_()
    optimizer = torch.optim.Adam([theirs], lr=0.01)
    for count in range(1, 3):
        starts, index, weights = random_code(features, rows, 12, count)
        table = torch.randn(rows, width, generator=g).to(DEVICE)
        along = torch.randn(features, generator=g).to(DEVICE)
        dense = REFERENCE.weighted_rows(starts, index, weights, table).double()
        extra_rows = torch.tensor([3, 0, 4], device=DEVICE) if extra else None
        added = torch.randn(3, width, generator=g).to(DEVICE) if extra else None
        if extra:
            dense[extra_rows] += added.double()
        theirs.grad = dense - along[:, None].double() * theirs.detach()
        optimizer.step()
        if unit:
            with torch.no_grad():
                theirs /= theirs.norm(dim=1, keepdim=True)
        gradient = RowGradient(starts, index, weights, table, along, extra_rows, added)
        kernels.adam_rows(ours, gradient, AdamStep(0.01, count))
        assert close(ours.weights, theirs.detach(), 2e-5)
        if ours.rounded is not None:
            assert close(ours.rounded, ours.weights.double(), 2**-7)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_step_gives_the_same_bits_every_time():
    """At a size where programs run at the same time, with a group that has a quarter of all pairs."""
    features, rows, width, pairs = 512, 256, 4096, 8192
    starts, index, weights = random_code(features, rows, pairs, 0)
    starts[1:] = torch.maximum(starts[1:], torch.tensor(pairs // 4, device=DEVICE))
    table = torch.randn(rows, width, device=DEVICE).bfloat16()
    results = []
    for _ in range(5):
        start = torch.ones(features, width, device=DEVICE)
        parameters = RowParameters(start, torch.zeros_like(start), torch.zeros_like(start), None, True)
        TRITON.adam_rows(parameters, RowGradient(starts, index, weights, table), AdamStep(0.01, 1))
        results.append(parameters.weights)
    assert all(torch.equal(results[0], other) for other in results[1:])
