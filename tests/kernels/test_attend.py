"""Attention compared with a float64 loop over queries, heads and keys: window, padding, entries, sink."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st


def attend_naively(query, keys, sink, scale):
    """Attention of one query head over its visible keys. Keys are also values; the sink has no value."""
    logits = [scale * float(np.dot(query, key)) for key in keys]
    largest = max([*logits, sink])
    weights = [math.exp(logit - largest) for logit in logits]
    total = sum(weights) + math.exp(sink - largest)
    return sum(weight * key for weight, key in zip(weights, keys)) / total


def definition(queries, recent, oldest, entries, chosen, sink, window, scale):
    batch, length, heads, _ = queries.shape
    past, out = recent.shape[1] - length, np.empty(queries.shape)
    q, recent_keys, far_keys = (None if t is None else t.double().numpy() for t in (queries, recent, entries))
    for b in range(batch):
        for i in range(length):
            position = past + i
            keys = [
                recent_keys[b, j] for j in range(max(position - window + 1, 0, int(oldest[b])), position + 1)
            ]
            if entries is not None:
                keys += [far_keys[b, e] for e in np.flatnonzero(chosen[b, i].numpy())]
            for h in range(heads):
                out[b, i, h] = attend_naively(q[b, i, h], keys, float(sink[h]), scale)
    return out


@st.composite
def problems(draw):
    batch, length, past = draw(st.integers(1, 3)), draw(st.integers(1, 12)), draw(st.integers(0, 9))
    heads, width, entries = draw(st.integers(1, 4)), draw(st.integers(1, 12)), draw(st.integers(0, 9))
    g = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    queries = torch.randn(batch, length, heads, width, generator=g)
    recent = torch.randn(batch, past + length, width, generator=g)
    oldest = torch.randint(0, past + 1, (batch,), generator=g)
    far_keys = torch.randn(batch, entries, width, generator=g) if entries else None
    chosen = torch.rand(batch, length, entries, generator=g) < 0.5 if entries else None
    sink = torch.randn(heads, generator=g) * draw(st.sampled_from([1.0, 20.0]))
    return (
        queries,
        recent,
        oldest,
        far_keys,
        chosen,
        sink,
        draw(st.integers(1, 15)),
        draw(st.sampled_from([0.1, 1.0, 8.0])),
    )


def tolerance(problem) -> float:
    """2e-6 times one plus a bound of the logits: the error of a probability is that of its logit, about 2^-23 of it."""
    queries, recent, _, entries, _, _, _, scale = problem
    longest = max(keys.norm(dim=-1).max().item() for keys in (recent, entries) if keys is not None)
    return 2e-6 * (1 + scale * queries.norm(dim=-1).max().item() * longest)


@given(problem=problems())
def test_attend_matches_the_definition(kernels, problem):
    assert np.abs(kernels.attend(*problem).numpy() - definition(*problem)).max() < tolerance(problem)


@given(problem=problems())
def test_attend_one_matches_the_definition(kernels, problem):
    """The last query of each sequence, with shuffled keys and a mask over them."""
    queries, recent, oldest, entries, chosen, sink, window, scale = problem
    expected = definition(*problem)[:, -1]
    count = recent.shape[1]
    index = torch.arange(count)
    seen = (index > count - 1 - window) & (index >= oldest.unsqueeze(-1))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
    seen, recent = seen[:, order], recent[:, order]
    if entries is not None:
        seen = torch.cat((seen, chosen[:, -1]), dim=-1)
    out = kernels.attend_one(queries[:, -1], recent, entries, seen, sink, scale)
    assert np.abs(out.numpy() - expected).max() < tolerance(problem)


@pytest.mark.parametrize("with_entries", [False, True])
def test_without_a_mask_every_key_is_visible(kernels, with_entries):
    g = torch.Generator().manual_seed(1)
    queries, recent, sink = (torch.randn(s, generator=g) for s in ((3, 4, 8), (3, 6, 8), (4,)))
    entries = torch.randn(3, 5, 8, generator=g) if with_entries else None
    everything = torch.ones(3, 11 if with_entries else 6, dtype=torch.bool)
    out = kernels.attend_one(queries, recent, entries, None, sink, 0.3)
    assert torch.equal(out, kernels.attend_one(queries, recent, entries, everything, sink, 0.3))


def test_queries_in_different_blocks_match_single_queries(kernels):
    """More queries than one block holds; each query alone gives the same result."""
    g = torch.Generator().manual_seed(2)
    length, window = 530, 20
    queries, recent, entries = (
        torch.randn(1, *s, generator=g) for s in ((length, 2, 8), (length, 8), (40, 8))
    )
    chosen, sink = torch.rand(1, length, 40, generator=g) < 0.3, torch.randn(2, generator=g)
    whole = kernels.attend(
        queries, recent, torch.zeros(1, dtype=torch.long), entries, chosen, sink, window, 0.35
    )
    for t in (0, 1, 19, 255, 256, 257, 511, 512, 529):
        recent_keys = recent[:, max(0, t - window + 1) : t + 1]
        seen = torch.cat((torch.ones(1, recent_keys.shape[1], dtype=torch.bool), chosen[:, t]), dim=-1)
        assert (
            whole[:, t] - kernels.attend_one(queries[:, t], recent_keys, entries, seen, sink, 0.35)
        ).abs().max() < 3e-6


def test_a_large_sink_takes_all_weight_and_a_small_one_none(kernels):
    g = torch.Generator().manual_seed(3)
    queries, recent = torch.randn(1, 2, 1, 4, generator=g), torch.randn(1, 2, 4, generator=g)
    zero = torch.zeros(1, dtype=torch.long)
    assert kernels.attend(queries, recent, zero, None, None, torch.tensor([90.0]), 5, 0.5).abs().max() < 1e-30
    first = kernels.attend(queries, recent, zero, None, None, torch.tensor([-300.0]), 5, 0.5)[0, 0, 0]
    assert (first - recent[0, 0]).abs().max() < 1e-6  # one key and no sink: the result is the key


def test_the_sink_is_not_scaled(kernels):
    """One key with logit s and a sink of s give half of the key, for any scale."""
    key = torch.tensor([[[2.0, 0.0]]])
    for scale in (0.25, 4.0):
        sink = torch.tensor([scale * 4.0])
        out = kernels.attend_one(torch.tensor([[[2.0, 0.0]]]), key, None, None, sink, scale)
        assert out[0, 0].tolist() == pytest.approx([1.0, 0.0])


def test_large_logits_do_not_overflow(kernels):
    g = torch.Generator().manual_seed(4)
    queries, recent = torch.randn(2, 3, 16, generator=g) * 200, torch.randn(2, 7, 16, generator=g) * 200
    out = kernels.attend_one(queries, recent, None, None, torch.zeros(3), 1.0)
    assert torch.isfinite(out).all()


def test_bfloat16_stays_within_its_tolerance(kernels):
    g = torch.Generator().manual_seed(5)
    queries, recent = (
        torch.randn(1, 30, 2, 16, generator=g).bfloat16(),
        torch.randn(1, 30, 16, generator=g).bfloat16(),
    )
    sink, zero = torch.randn(2, generator=g), torch.zeros(1, dtype=torch.long)
    out = kernels.attend(queries, recent, zero, None, None, sink, 9, 0.25)
    assert out.dtype == torch.bfloat16
    expected = definition(queries, recent, zero, None, None, sink, 9, 0.25)
    assert np.abs(out.double().numpy() - expected).max() < 2.0**-7 * np.abs(recent.double().numpy()).max()
    alone = kernels.attend_one(queries[:, 3], recent[:, :4], None, None, sink, 0.25)
    assert (alone.float() - out[:, 3].float()).abs().max() < 2.0**-7
