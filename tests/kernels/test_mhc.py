"""mHC: values of the specification, measured bounds of Sinkhorn, comparison with float64, orientation of the mixer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from birkhoff.kernels.mhc import coefficients, head, read, sinkhorn, write
from tests.model.float64 import Float64
from tests.models import variant
from tests.sizes import scaled

# Largest error of a row sum for four streams and twenty iterations, which end with a pass over the columns.
ROW_SLACK = 0.085


def test_sinkhorn_matches_the_specification():
    logits = torch.tensor([[2 * np.sin(0.37 * (4 * j + k)) for k in range(4)] for j in range(4)])
    expected = [
        [0.0641312, 0.1675391, 0.3282305, 0.4400983],
        [0.2840939, 0.3360148, 0.2533810, 0.1265094],
        [0.4787053, 0.2907219, 0.1536143, 0.0769573],
        [0.1730686, 0.2057233, 0.2647731, 0.3564340],
    ]
    assert (sinkhorn(logits, 20, 1e-6).double() - torch.tensor(expected).double()).abs().max() < 2e-7


@settings(max_examples=scaled(2000, 200))
@given(logits=hnp.arrays(np.float32, (8, 4, 4), elements=st.floats(-16, 16, width=32)))
def test_sinkhorn_is_nearly_doubly_stochastic(logits):
    mix = sinkhorn(torch.tensor(logits), 20, 1e-6)
    assert (mix >= 0).all() and (mix.sum(-2) - 1).abs().max() < 2e-6
    assert (mix.sum(-1) - 1).abs().max() < ROW_SLACK


@given(
    pattern=hnp.arrays(np.int8, (50, 4, 4), elements=st.integers(-2, 2)),
    scale=st.sampled_from([0.0, 1.0, 8.0, 100.0, 1e4]),
)
def test_extreme_logits_stay_finite_with_columns_summing_to_one(pattern, scale):
    mix = sinkhorn(torch.tensor(pattern, dtype=torch.float32) * scale, 20, 1e-6)
    assert torch.isfinite(mix).all() and (mix >= 0).all()
    assert (mix.sum(-2) - 1).abs().max() < 2e-6 and (mix.sum(-1) - 1).abs().max() < ROW_SLACK


def test_row_sums_are_off_at_worst_and_exact_for_small_logits():
    """The bound above is tight: a random search of this size reaches 80 % of it."""
    logits = torch.randn(20000, 4, 4, generator=torch.Generator().manual_seed(0)) * 16
    worst = (sinkhorn(logits, 20, 1e-6).sum(-1) - 1).abs().max().item()
    print(
        f"worst row of 20000: {worst:.4f}; with 200 rounds {(sinkhorn(logits, 200, 1e-6).sum(-1) - 1).abs().max():.4f}"
    )
    assert 0.07 < worst < ROW_SLACK
    assert (sinkhorn(logits / 100, 20, 1e-6).sum(-1) - 1).abs().max() < 2e-6


def test_one_round_is_a_softmax_and_one_pass_over_the_columns():
    logits = torch.randn(5, 3, 3, generator=torch.Generator().manual_seed(1))
    mix = logits.softmax(-1) + 1e-3
    assert torch.equal(sinkhorn(logits, 1, 1e-3), mix / (mix.sum(-2, keepdim=True) + 1e-3))


def random_weights(m: int, width: int, seed: int, spread: float = 1.0):
    g = torch.Generator().manual_seed(seed)
    fn = torch.randn((2 + m) * m, m * width, generator=g) * spread * (m * width) ** -0.5
    return fn, torch.randn((2 + m) * m, generator=g), torch.randn(3, generator=g) + 1


@given(
    rows=st.integers(1, 90),
    m=st.integers(1, 5),
    width=st.integers(1, 40),
    iters=st.sampled_from([1, 2, 20]),
    exponent=st.integers(-10, 10),
    seed=st.integers(0, 999),
)
def test_read_and_write_match_the_definition(kernels, rows, m, width, iters, exponent, seed):
    fn, base, scale = random_weights(m, width, seed)
    g = torch.Generator().manual_seed(seed + 1)
    streams = torch.randn(rows, m, width, generator=g) * 2.0**exponent
    y = torch.randn(rows, width, generator=g)
    u, pre, post, mix = kernels.mhc_read(streams, fn, base, scale, iters, 1e-6, 1e-6)
    after = kernels.mhc_write(streams, y, post, mix)
    config = variant(hc_mult=m, hidden_size=width, hc_sinkhorn_iters=iters)
    model = Float64(config.to_dict(), {"hc_fn": fn, "hc_base": base, "hc_scale": scale})
    size = streams.abs().max().item()
    for i in range(0, rows, 7):
        expected_u, expected_post, expected_mix = model.read("hc", streams[i].double().numpy())
        assert np.abs(u[i].numpy() - expected_u).max() < 1e-5 * size
        assert (
            np.abs(post[i].numpy() - expected_post).max() < 1e-5
            and np.abs(mix[i].numpy() - expected_mix).max() < 1e-5
        )
        assert np.abs((pre[i] @ streams[i]).numpy() - expected_u).max() < 1e-5 * size
        expected = model.write(
            streams[i].double().numpy(), y[i].double().numpy(), expected_post, expected_mix
        )
        assert np.abs(after[i].numpy() - expected).max() < 1e-5 * (size + 1) * m


def test_saturated_gates(kernels):
    """Logits of 200 and more give no NaN and the exact limits."""
    m, width = 4, 8
    base = torch.zeros(24)
    base[0], base[1], base[4], base[5] = 200.0, -200.0, 200.0, -200.0
    base[8:] = 300.0 * torch.eye(4).flatten()
    streams = torch.randn(3, m, width, generator=torch.Generator().manual_seed(2))
    u, pre, post, mix = kernels.mhc_read(
        streams, torch.zeros(24, m * width), base, torch.ones(3), 20, 1e-6, 1e-6
    )
    assert all(torch.isfinite(t).all() for t in (u, pre, post, mix))
    assert pre[0, :2].tolist() == pytest.approx([1 + 1e-6, 1e-6]) and post[0, :2].tolist() == [2.0, 0.0]
    assert (mix - torch.eye(4)).abs().max() < 1e-5


def test_the_mixer_maps_its_first_index_to_its_second(kernels):
    streams = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    mix = torch.tensor([[[0.1, 0.9], [0.7, 0.3]]])  # stream 0 goes mostly to stream 1
    out = kernels.mhc_write(streams, torch.tensor([[10.0, 20.0]]), torch.tensor([[1.0, 0.5]]), mix)
    assert out.flatten().tolist() == pytest.approx([10.1, 20.7, 5.9, 10.3])


def test_the_order_of_outputs_is_pre_post_mix_row_by_row(kernels):
    """With a zero projection the coefficients depend on the base alone."""
    base = torch.linspace(-2, 2, 24)
    _, pre, post, mix = kernels.mhc_read(
        torch.ones(1, 4, 3), torch.zeros(24, 12), base, torch.ones(3), 20, 1e-6, 1e-6
    )
    assert torch.allclose(pre[0], base[:4].sigmoid() + 1e-6) and torch.allclose(
        post[0], 2 * base[4:8].sigmoid()
    )
    assert torch.allclose(mix[0], sinkhorn(base[8:].view(4, 4), 20, 1e-6), atol=1e-6)


def test_the_rms_is_taken_over_all_streams(kernels):
    """Scaling one stream changes the logits of all: the RMS is taken over the concatenation."""
    fn, base, scale = random_weights(4, 16, 3)
    streams = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(4))
    scaled_streams = kernels.mhc_read(streams * 8, fn, base, scale, 20, 1e-6, 1e-6)
    plain = kernels.mhc_read(streams, fn, base, scale, 20, 1e-6, 1e-6)
    # A common factor cancels.
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(scaled_streams[1:], plain[1:]))
    uneven = streams.clone()
    uneven[:, 0] *= 8
    assert (kernels.mhc_read(uneven, fn, base, scale, 20, 1e-6, 1e-6)[2] - plain[2]).abs().max() > 1e-2


def test_rows_are_independent(kernels):
    fn, base, scale = random_weights(4, 24, 5)
    streams = torch.randn(70, 4, 24, generator=torch.Generator().manual_seed(6))
    whole = kernels.mhc_read(streams, fn, base, scale, 20, 1e-6, 1e-6)
    for i in (0, 3, 69):
        alone = kernels.mhc_read(streams[i : i + 1], fn, base, scale, 20, 1e-6, 1e-6)
        assert all((a[i] - b[0]).abs().max() < 3e-6 for a, b in zip(whole, alone))


def test_bfloat16_streams_are_rounded_once(kernels):
    fn, base, scale = random_weights(4, 24, 7)
    g = torch.Generator().manual_seed(8)
    streams, y = torch.randn(40, 4, 24, generator=g).bfloat16(), torch.randn(40, 24, generator=g).bfloat16()
    u, _, post, mix = kernels.mhc_read(streams, fn, base, scale, 20, 1e-6, 1e-6)
    wide = kernels.mhc_read(streams.float(), fn, base, scale, 20, 1e-6, 1e-6)
    assert u.dtype == torch.bfloat16 and post.dtype == mix.dtype == torch.float32
    assert (u != wide[0].bfloat16()).float().mean() < 1e-2
    out = kernels.mhc_write(streams, y, post, mix)
    assert out.dtype == torch.bfloat16
    assert (out != kernels.mhc_write(streams.float(), y.float(), post, mix).bfloat16()).float().mean() < 1e-2


def test_head_merges_streams_by_sigmoid_weights():
    g = torch.Generator().manual_seed(9)
    streams, fn, base, scale = (torch.randn(s, generator=g) for s in ((6, 4, 10), (4, 40), (4,), (1,)))
    merged, weights = head(streams, fn, base, scale, 1e-6, 1e-6)
    model = Float64(variant(hidden_size=10).to_dict(), {"hc_fn": fn, "hc_base": base, "hc_scale": scale})
    for i in range(6):
        assert np.abs(merged[i].numpy() - model.head("hc", streams[i].double().numpy())).max() < 1e-5
    assert torch.allclose(merged, torch.einsum("nm,nmd->nd", weights, streams))


def test_the_reference_takes_any_leading_shape():
    fn, base, scale = random_weights(3, 5, 10)
    streams = torch.randn(2, 4, 3, 5, generator=torch.Generator().manual_seed(11))
    u, pre, post, mix = read(streams, fn, base, scale, 20, 1e-6, 1e-6)
    assert u.shape == (2, 4, 5) and pre.shape == post.shape == (2, 4, 3) and mix.shape == (2, 4, 3, 3)
    flat = coefficients(streams.flatten(0, 1), fn, base, scale, 20, 1e-6, 1e-6)
    assert (pre.flatten(0, 1) - flat[0]).abs().max() < 1e-6 and (
        mix.flatten(0, 1) - flat[2]
    ).abs().max() < 1e-6
    assert write(streams, u, post, mix).shape == streams.shape
