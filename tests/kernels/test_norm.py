"""RMSNorm compared with float64: one statistic per row, one rounding at the end."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from birkhoff.kernels.norm import rms_norm


def exact(x, weight, eps):
    x = x.double().numpy()
    out = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return torch.tensor(out if weight is None else out * weight.double().numpy())


@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 200),
    exponent=st.integers(-12, 12),
    weighted=st.booleans(),
    seed=st.integers(0, 999),
)
def test_rms_norm_matches_the_definition(kernels, rows, width, exponent, weighted, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=g) * 2.0**exponent
    weight = torch.randn(width, generator=g) if weighted else None
    expected = exact(x, weight, 1e-6)
    assert (kernels.rms_norm(x, weight, 1e-6) - expected).abs().max() <= 2e-6 * expected.abs().max()


def test_a_zero_row_stays_zero_and_eps_is_added(kernels):
    assert not kernels.rms_norm(torch.zeros(2, 8), None, 1e-6).any()
    x = torch.full((1, 4), 1e-3)  # mean square 1e-6, as large as eps
    assert kernels.rms_norm(x, None, 1e-6).tolist()[0] == pytest.approx([2**-0.5] * 4, rel=1e-6)


def test_bfloat16_is_rounded_once_at_the_end(kernels):
    g = torch.Generator().manual_seed(1)
    x, weight = torch.randn(64, 96, generator=g).bfloat16(), torch.randn(96, generator=g)
    out = kernels.rms_norm(x, weight, 1e-6)
    expected = exact(x, weight, 1e-6)
    assert out.dtype == torch.bfloat16
    # A float64 value within the float32 error of a tie may round differently.
    assert (out != expected.bfloat16()).float().mean() < 1e-3
    rounded_twice = (
        (x.float() * x.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt()).bfloat16() * weight
    ).bfloat16()
    assert (rounded_twice != expected.bfloat16()).float().mean() > 0.05  # this test detects double rounding


@pytest.mark.parametrize("shape", [(5,), (2, 3, 5), (0, 5)])
def test_any_leading_shape(kernels, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    assert kernels.rms_norm(x, torch.ones(5), 1e-6).shape == shape


def test_rows_are_independent(kernels):
    x = torch.randn(33, 48, generator=torch.Generator().manual_seed(3))
    whole = kernels.rms_norm(x, None, 1e-6)
    assert all(
        (whole[i : i + 1] - kernels.rms_norm(x[i : i + 1], None, 1e-6)).abs().max() < 1e-6 for i in range(33)
    )


def test_the_reference_has_a_gradient():
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(4), requires_grad=True)
    rms_norm(x, torch.ones(7), 1e-6).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0
