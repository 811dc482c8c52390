"""Indexer scores compared with their definition, and top-k compared with a stable sort: ties go to the lowest index."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from birkhoff.kernels.index import score, topk_mask


@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 9),
    heads=st.integers(1, 8),
    entries=st.integers(1, 30),
    width=st.integers(1, 16),
    seed=st.integers(0, 999),
)
def test_scores_match_the_definition(batch, length, heads, entries, width, seed):
    g = torch.Generator().manual_seed(seed)
    queries, keys = (
        torch.randn(batch, length, heads, width, generator=g),
        torch.randn(batch, entries, width, generator=g),
    )
    weights = torch.randn(batch, length, heads, generator=g)
    expected = np.zeros((batch, length, entries))
    for b, t, w in np.ndindex(expected.shape):
        for h in range(heads):
            product = float(queries[b, t, h].double() @ keys[b, w].double())
            expected[b, t, w] += float(weights[b, t, h]) * max(product, 0.0)
    with torch.no_grad():
        assert np.abs(score(queries, keys, weights).numpy() - expected).max() < 1e-5 * (
            1 + np.abs(expected).max()
        )


def test_scores_keep_their_inputs_and_have_a_gradient():
    g = torch.Generator().manual_seed(1)
    queries, keys = torch.randn(1, 3, 4, 8, generator=g), torch.randn(1, 5, 8, generator=g)
    weights, before = torch.randn(1, 3, 4, generator=g), queries.clone()
    plain = score(queries, keys, weights)
    assert torch.equal(queries, before)
    score(queries.requires_grad_(), keys, weights).sum().backward()  # needed by an indexer loss
    assert queries.grad is not None and queries.grad.abs().sum() > 0
    assert torch.equal(score(queries, keys, weights).detach(), plain)


def stable_topk(scores, visible, topk):
    """The definition: sort visible entries by score, the lower index first among equals, and take the first `topk`."""
    out = np.zeros(scores.shape, bool)
    for query in np.ndindex(scores.shape[:-1]):
        order = sorted(np.flatnonzero(visible[query]), key=lambda w, query=query: (-scores[query][w], w))
        out[query][order[:topk]] = True
    return out


@given(
    scores=hnp.arrays(np.float32, (2, 5, 12), elements=st.integers(-2, 2).map(float)),
    visible=hnp.arrays(np.bool_, (2, 5, 12)),
    topk=st.integers(1, 14),
)
def test_topk_with_many_ties_is_a_stable_sort(scores, visible, topk):
    chosen = topk_mask(torch.tensor(scores), torch.tensor(visible), topk)
    assert np.array_equal(chosen.numpy(), stable_topk(scores, visible, topk))


@given(seed=st.integers(0, 999), entries=st.integers(1, 80), topk=st.integers(1, 40))
def test_topk_without_ties_is_a_stable_sort(seed, entries, topk):
    g = torch.Generator().manual_seed(seed)
    scores, visible = torch.randn(1, 6, entries, generator=g), torch.rand(1, 6, entries, generator=g) < 0.8
    assert np.array_equal(
        topk_mask(scores, visible, topk).numpy(), stable_topk(scores.numpy(), visible.numpy(), topk)
    )


def test_zeros_of_either_sign_tie():
    """If every ReLU is zero, a negative weight gives minus zero."""
    scores = torch.tensor([[[-0.0, 0.0, -0.0, 0.0, -1.0]]])
    assert topk_mask(scores, torch.ones(1, 1, 5, dtype=torch.bool), 2).tolist() == [
        [[True, True, False, False, False]]
    ]


@given(cuts=st.lists(st.integers(1, 39), max_size=5), seed=st.integers(0, 99))
def test_topk_does_not_depend_on_the_chunking_of_queries(cuts, seed):
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(-3, 4, (2, 40, 10), generator=g).float()
    visible = torch.arange(10) < (torch.arange(40) // 4).unsqueeze(-1)
    visible = visible.expand(2, 40, 10)
    whole, bounds = topk_mask(scores, visible, 4), [0, *sorted(set(cuts)), 40]
    parts = [topk_mask(scores[:, a:b], visible[:, a:b], 4) for a, b in pairwise(bounds)]
    assert torch.equal(torch.cat(parts, 1), whole)
    assert torch.equal(topk_mask(scores[1:], visible[1:], 4), whole[1:])


def test_invisible_entries_do_not_change_the_selection():
    """In a longer prompt a query has the same visible entries, followed by masked ones."""
    g = torch.Generator().manual_seed(2)
    scores = torch.randint(-2, 3, (1, 1, 64), generator=g).float()
    for count in (1, 5, 20):
        visible = (torch.arange(64) < count).view(1, 1, 64)
        alone = topk_mask(scores[..., :count], visible[..., :count], 6)
        assert torch.equal(topk_mask(scores, visible, 6)[..., :count], alone)
        assert not topk_mask(scores, visible, 6)[..., count:].any()


def test_with_room_for_all_every_visible_entry_is_selected():
    visible = torch.rand(2, 3, 7, generator=torch.Generator().manual_seed(3)) < 0.5
    assert torch.equal(topk_mask(torch.randn(2, 3, 7), visible, 7), visible)
