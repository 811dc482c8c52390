"""Attention against a loop in float64, one query, head and key at a time: window, padding, entries, sink."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st


def naive(query, keys, sink, scale):
    """One query head over the keys it sees; keys are values, the sink has none."""
    logits = [scale * float(np.dot(query, key)) for key in keys]
    top = max([*logits, sink])
    weights = [math.exp(logit - top) for logit in logits]
    total = sum(weights) + math.exp(sink - top)
    return sum(weight * key for weight, key in zip(weights, keys)) / total


def definition(queries, recent, oldest, entries, chosen, sink, window, scale):
    batch, length, heads, _ = queries.shape
    past, out = recent.shape[1] - length, np.empty(queries.shape)
    q, near, far = (None if t is None else t.double().numpy() for t in (queries, recent, entries))
    for b in range(batch):
        for i in range(length):
            at = past + i
            keys = [near[b, j] for j in range(max(at - window + 1, 0, int(oldest[b])), at + 1)]
            if entries is not None:
                keys += [far[b, e] for e in np.flatnonzero(chosen[b, i].numpy())]
            for h in range(heads):
                out[b, i, h] = naive(q[b, i, h], keys, float(sink[h]), scale)
    return out


@st.composite
def problems(draw):
    batch, length, past = draw(st.integers(1, 3)), draw(st.integers(1, 12)), draw(st.integers(0, 9))
    heads, width, entries = draw(st.integers(1, 4)), draw(st.integers(1, 12)), draw(st.integers(0, 9))
    g = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    queries = torch.randn(batch, length, heads, width, generator=g)
    recent = torch.randn(batch, past + length, width, generator=g)
    oldest = torch.randint(0, past + 1, (batch,), generator=g)
    far = torch.randn(batch, entries, width, generator=g) if entries else None
    chosen = torch.rand(batch, length, entries, generator=g) < 0.5 if entries else None
    sink = torch.randn(heads, generator=g) * draw(st.sampled_from([1.0, 20.0]))
    return (
        queries,
        recent,
        oldest,
        far,
        chosen,
        sink,
        draw(st.integers(1, 15)),
        draw(st.sampled_from([0.1, 1.0, 8.0])),
    )


def slack(problem) -> float:
    """float32 knows a logit to 2^-23 of its size or so, and a probability no better than its logit."""
    queries, recent, _, entries, _, _, _, scale = problem
    longest = max(keys.norm(dim=-1).max().item() for keys in (recent, entries) if keys is not None)
    return 2e-6 * (1 + scale * queries.norm(dim=-1).max().item() * longest)


@given(problem=problems())
def test_many_queries_are_the_definition(kernels, problem):
    assert np.abs(kernels.attend(*problem).numpy() - definition(*problem)).max() < slack(problem)


@given(problem=problems())
def test_one_query_is_the_definition(kernels, problem):
    """The last query of each sequence, against its keys in any order with a mask over all of them."""
    queries, recent, oldest, entries, chosen, sink, window, scale = problem
    true = definition(*problem)[:, -1]
    count = recent.shape[1]
    place = torch.arange(count)
    seen = (place > count - 1 - window) & (place >= oldest.unsqueeze(-1))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
    seen, recent = seen[:, order], recent[:, order]
    if entries is not None:
        seen = torch.cat((seen, chosen[:, -1]), dim=-1)
    out = kernels.attend_one(queries[:, -1], recent, entries, seen, sink, scale)
    assert np.abs(out.numpy() - true).max() < slack(problem)


@pytest.mark.parametrize("with_entries", [False, True])
def test_no_mask_means_every_key(kernels, with_entries):
    g = torch.Generator().manual_seed(1)
    queries, recent, sink = (torch.randn(s, generator=g) for s in ((3, 4, 8), (3, 6, 8), (4,)))
    entries = torch.randn(3, 5, 8, generator=g) if with_entries else None
    everything = torch.ones(3, 11 if with_entries else 6, dtype=torch.bool)
    out = kernels.attend_one(queries, recent, entries, None, sink, 0.3)
    assert torch.equal(out, kernels.attend_one(queries, recent, entries, everything, sink, 0.3))


def test_blocks_of_queries_join_without_a_seam(kernels):
    """More queries than are scored at a time; each alone gives the same."""
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
        near = recent[:, max(0, t - window + 1) : t + 1]
        seen = torch.cat((torch.ones(1, near.shape[1], dtype=torch.bool), chosen[:, t]), dim=-1)
        assert (
            whole[:, t] - kernels.attend_one(queries[:, t], near, entries, seen, sink, 0.35)
        ).abs().max() < 3e-6


def test_a_large_sink_swallows_and_a_small_one_is_none(kernels):
    g = torch.Generator().manual_seed(3)
    queries, recent = torch.randn(1, 2, 1, 4, generator=g), torch.randn(1, 2, 4, generator=g)
    zero = torch.zeros(1, dtype=torch.long)
    assert kernels.attend(queries, recent, zero, None, None, torch.tensor([90.0]), 5, 0.5).abs().max() < 1e-30
    first = kernels.attend(queries, recent, zero, None, None, torch.tensor([-300.0]), 5, 0.5)[0, 0, 0]
    assert (first - recent[0, 0]).abs().max() < 1e-6  # one key, no sink: the key itself


def test_the_sink_is_not_scaled(kernels):
    """One key whose logit is s against a sink of s: half of the key, whatever the scale."""
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


def test_bfloat16_rounds_probabilities_before_the_values(kernels):
    g = torch.Generator().manual_seed(5)
    queries, recent = (
        torch.randn(1, 30, 2, 16, generator=g).bfloat16(),
        torch.randn(1, 30, 16, generator=g).bfloat16(),
    )
    sink, zero = torch.randn(2, generator=g), torch.zeros(1, dtype=torch.long)
    out = kernels.attend(queries, recent, zero, None, None, sink, 9, 0.25)
    assert out.dtype == torch.bfloat16
    true = definition(queries, recent, zero, None, None, sink, 9, 0.25)
    assert np.abs(out.double().numpy() - true).max() < 2.0**-7 * np.abs(recent.double().numpy()).max()
    alone = kernels.attend_one(queries[:, 3], recent[:, :4], None, None, sink, 0.25)
    assert (alone.float() - out[:, 3].float()).abs().max() < 2.0**-7
