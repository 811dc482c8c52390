"""`linear` compared with float64 for one row, a few and many, for which the twins use different methods."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from birkhoff.kernels.linear.cpu import padded_rows


@given(
    rows=st.integers(0, 40), inputs=st.integers(1, 130), outputs=st.integers(1, 130), seed=st.integers(0, 999)
)
def test_linear_matches_float64(kernels, rows, inputs, outputs, seed):
    g = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(rows, inputs, generator=g), torch.randn(outputs, inputs, generator=g)
    out = kernels.linear(x, weight)
    assert out.shape == (rows, outputs) and out.dtype == torch.float32
    assert not rows or (out - x.double() @ weight.double().T).abs().max() < 2e-6 * inputs**0.5 * 10


@pytest.mark.parametrize("lead", [(), (3,), (2, 5), (4, 2, 5)])
def test_any_leading_shape_and_a_large_weight(kernels, lead):
    g = torch.Generator().manual_seed(1)
    x, weight = torch.randn(*lead, 384, generator=g), torch.randn(1024, 384, generator=g) * 384**-0.5
    out = kernels.linear(x, weight)
    assert out.shape == (*lead, 1024) and (out - x.double() @ weight.double().T).abs().max() < 1e-5


@pytest.mark.parametrize("lead", [(13,), (2, 20), (129,)])
def test_many_rows_with_a_weight_of_more_than_half_a_million_values(kernels, lead):
    g = torch.Generator().manual_seed(4)
    x, weight = torch.randn(*lead, 600, generator=g), torch.randn(1024, 600, generator=g) * 600**-0.5
    out = kernels.linear(x, weight)
    assert out.shape == (*lead, 1024) and (out - x.double() @ weight.double().T).abs().max() < 1e-5


def test_row_counts_are_padded_to_few_sizes_and_by_little():
    """oneDNN compiles and caches one program per row count and weight shape."""
    padded_by_rows = {rows: padded_rows(rows) for rows in range(1, 2049)}
    assert all(rows <= padded <= max(rows + 7, rows * 1.125) for rows, padded in padded_by_rows.items())
    assert len(set(padded_by_rows.values())) < 50 and all(
        padded_rows(padded) == padded for padded in padded_by_rows.values()
    )


def test_bfloat16_accumulates_in_float32(kernels):
    g = torch.Generator().manual_seed(2)
    x, weight = torch.randn(9, 300, generator=g).bfloat16(), torch.randn(50, 300, generator=g).bfloat16()
    out, expected = kernels.linear(x, weight), x.double() @ weight.double().T
    assert out.dtype == torch.bfloat16
    assert (out.double() - expected).abs().max() <= 2.0**-8 * expected.abs().max()


def test_a_weight_that_is_a_view_of_a_larger_one(kernels):
    g = torch.Generator().manual_seed(3)
    whole, x = torch.randn(40, 64, generator=g), torch.randn(2, 64, generator=g)
    assert (kernels.linear(x, whole[10:30]) - x.double() @ whole[10:30].double().T).abs().max() < 1e-4
    assert (
        kernels.linear(x[:, ::2], whole[:, ::2]) - x[:, ::2].double() @ whole[:, ::2].double().T
    ).abs().max() < 1e-4
