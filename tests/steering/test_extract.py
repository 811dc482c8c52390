"""Directions from two sets of rows, and the separation along them, against plain definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from birkhoff.errors import SteeringError
from birkhoff.steering.extract import auc, best, d_prime, direction, separate

numbers = st.lists(st.integers(-5, 5).map(float), min_size=2, max_size=12)


def sets(
    apart: float, rows: int = 40, shape=(16,), seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    axis = torch.zeros(shape).flatten()
    axis[1] = 1.0
    axis = axis.view(shape)
    up, down = (torch.randn(rows, *shape, generator=generator) for _ in range(2))
    return up + apart * axis, down, axis


@given(numbers, numbers)
def test_auc_equals_the_share_of_ordered_pairs(up, down):
    expected = sum((a > b) + (a == b) / 2 for a in up for b in down) / (len(up) * len(down))
    assert auc(torch.tensor(up), torch.tensor(down)) == pytest.approx(expected, abs=1e-6)


@given(numbers, numbers)
def test_d_prime_changes_sign_with_the_sides_and_not_with_the_unit(up, down):
    up, down = torch.tensor(up), torch.tensor(down)
    assert d_prime(up, down) == pytest.approx(-d_prime(down, up), abs=1e-5)
    assert d_prime(up * 3 + 1, down * 3 + 1) == pytest.approx(d_prime(up, down), abs=1e-4)


@pytest.mark.parametrize("how", ["mean_diff", "pca"])
@pytest.mark.parametrize("shape", [(16,), (4, 8)])
def test_a_planted_direction_is_recovered(how, shape):
    up, down, axis = sets(6.0, 200, shape)
    result = direction(up, down, how)
    assert result.shape == shape and torch.cosine_similarity(result.flatten(), axis.flatten(), dim=0) > 0.95
    if how == "mean_diff":
        assert torch.allclose(result, up.mean(0) - down.mean(0))
    else:
        assert result.norm() == pytest.approx(1.0, abs=1e-5) and (result * axis).sum() > 0


def test_separation_of_noise_is_measured_on_held_out_rows():
    """In-sample, the difference of means of 30 rows in 200 dimensions separates noise; on held-out rows it must not."""
    up, down, _ = sets(0.0, 30, (200,))
    axis = direction(up, down)
    assert auc(up @ axis, down @ axis) > 0.95
    (entry,) = separate("mlp_out", 2, up, down)
    assert 0.25 < entry.auc < 0.75 and abs(entry.d_prime) < 0.8


def test_separate_finds_the_stream_with_the_direction():
    up, down, _ = sets(4.0, 60, (4, 16))  # planted in stream 0
    entries = separate("mhc_streams_pre_attn", 3, up, down)
    assert [entry.stream for entry in entries] == [None, 0, 1, 2, 3] and {
        entry.layer for entry in entries
    } == {3}
    assert best(entries[1:]).stream == 0 and entries[1].auc > 0.95 and all(e.auc < 0.75 for e in entries[2:])
    assert entries[1].norm == pytest.approx((up[:, 0].mean(0) - down[:, 0].mean(0)).norm().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("up", "down", "how", "words"),
    [
        (torch.ones(1, 3), torch.ones(4, 3), "mean_diff", "at least two rows"),
        (torch.ones(4, 3), torch.ones(4, 5), "mean_diff", "from one hook"),
        (torch.ones(4, 3), torch.full((4, 3), float("nan")), "mean_diff", "not finite"),
        (torch.ones(4, 3), torch.ones(5, 3), "pca", "pca takes pairs"),
        (torch.ones(4, 3), torch.ones(4, 3), "svm", "mean_diff, pca"),
        (torch.ones(4), torch.ones(4), "mean_diff", "expected .rows, width."),
    ],
)
def test_rows_that_give_no_direction_are_refused(up, down, how, words):
    with pytest.raises(SteeringError, match=words):
        direction(up, down, how)
