"""The training forward equals transformers' V4 and our exact model, including MTP."""

from __future__ import annotations

import pytest
import torch

from birkhoff.hooks.tap import NoTap
from birkhoff.model.batch import Batch
from birkhoff.model.state import Fresh
from birkhoff.model.transformer import Transformer
from tests.oracle import build_oracle
from tests.training.tiny import randomise, released_name, tiny_config
from training.forward import Forward, Knobs
from training.parameters import Store

LENGTH = 264  # two HCA blocks and a rest, 66 CSA entries, 33 windows


@pytest.fixture(scope="module")
def model():
    config = tiny_config()
    store = Store(config)
    tensors = randomise(store, seed=3)
    ids = torch.randint(0, config.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(4))
    return config, store, tensors, ids


def run(model, knobs=Knobs()):  # noqa: B008 - an immutable tuple
    config, store, _, ids = model
    weights = store.named(store.leaves(torch.float32))
    forward = Forward(config, ids.shape[1], "cpu")
    valid = torch.ones_like(ids)
    trunk = forward.trunk(weights, ids, valid, knobs, torch.float32)
    drafted, _ = forward.mtp(weights, trunk.streams, ids.roll(-1, 1), valid, knobs)
    logits = trunk.hidden @ weights["head.weight"].T
    return trunk, logits, drafted @ weights["head.weight"].T


@pytest.fixture(scope="module")
def exact(model):
    config, _, tensors, _ = model
    out = Transformer(config)
    with torch.no_grad():
        for destination in out.destinations():
            destination.tensor.copy_(
                released_name(tensors, destination.name).reshape(destination.tensor.shape)
            )
    return out


def test_logits_equal_the_transformers_class(model, exact):
    other = build_oracle(exact)
    with torch.no_grad():
        theirs = other(input_ids=model[3]).logits
    _, ours, _ = run(model)
    assert theirs.std() > 0.5
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_logits_and_drafts_equal_our_own_model(model, exact):
    *_, ids = model
    with torch.no_grad():
        hidden, streams = exact.run(Batch.whole(ids), Fresh(), NoTap())
        theirs = exact.logits(hidden).unflatten(0, ids.shape)
        drafted, _ = exact.draft(streams, Batch.whole(ids.roll(-1, 1)), Fresh())
        their_drafts = exact.logits(drafted).unflatten(0, ids.shape)
    trunk, ours, drafts = run(model)
    torch.testing.assert_close(trunk.streams.flatten(0, 1), streams, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    torch.testing.assert_close(drafts, their_drafts, atol=1e-4, rtol=0)


def test_dense_selection_changes_only_late_positions(model):
    config, *_ = model
    _, sparse, _ = run(model)
    _, dense, _ = run(model, Knobs(dense=torch.tensor(1.0)))
    _, same, _ = run(model, Knobs(dense=torch.tensor(0.0)))
    first = 4 * (config.index_topk + 1) - 1  # the first query with more visible entries than index_topk
    torch.testing.assert_close(dense[:, :first], sparse[:, :first], atol=1e-5, rtol=0)
    assert (dense[:, first:] - sparse[:, first:]).abs().max() > 1e-3
    assert torch.equal(same, sparse)


def test_nothing_sees_the_future(model):
    config, store, tensors, ids = model
    _, before, drafts = run(model)
    changed = ids.clone()
    changed[:, 150:] = (changed[:, 150:] + 1) % config.vocab_size
    _, after, later_drafts = run((config, store, tensors, changed))
    torch.testing.assert_close(after[:, :150], before[:, :150], atol=1e-5, rtol=0)
    torch.testing.assert_close(later_drafts[:, :149], drafts[:, :149], atol=1e-5, rtol=0)
    assert (after[:, 150:] - before[:, 150:]).abs().max() > 1e-2


def test_every_parameter_learns_and_the_indexer_only_from_its_own_loss(model):
    config, store, _, ids = model
    leaves = store.leaves(torch.float32)
    weights = store.named(leaves)
    for weight in weights.values():
        if weight.is_floating_point() and weight.requires_grad:
            weight.retain_grad()
    forward = Forward(config, ids.shape[1], "cpu")
    valid = torch.ones_like(ids)
    trunk = forward.trunk(weights, ids, valid, Knobs(), torch.float32)
    drafted, load = forward.mtp(weights, trunk.streams, ids.roll(-1, 1), valid, Knobs())
    text = (
        forward.losses(trunk.hidden, weights, ids.roll(-1, 1)).mean()
        + forward.losses(drafted, weights, ids).mean()
    )
    (text + sum(entry.loss for entry in (*trunk.loads, load))).backward(retain_graph=True)
    silent = {name for name, weight in weights.items() if weight.requires_grad and weight.grad is None}
    indexer = {name for name in weights if ".indexer." in name}
    assert silent == indexer and len(indexer) == 2 * 6
    assert all(
        weight.grad.any() for name, weight in weights.items() if weight.requires_grad and name not in indexer
    )
    sum(trunk.index_losses).backward()
    assert all(weights[name].grad.any() for name in indexer)


def test_padding_does_not_count_as_load(model):
    config, store, _, ids = model
    weights = store.named(store.leaves(torch.float32))
    forward = Forward(config, ids.shape[1], "cpu")
    valid = torch.ones_like(ids)
    valid[1] = 0
    half = forward.trunk(weights, ids, valid, Knobs(), torch.float32)
    alone = forward.trunk(weights, ids[:1], valid[:1], Knobs(), torch.float32)
    for with_padding, without in zip(half.loads, alone.loads):
        torch.testing.assert_close(with_padding.share, without.share)
        assert abs(float(with_padding.share.sum()) - 1) < 1e-5


def test_dropout_is_unbiased_and_off_at_zero(model):
    _, plain, _ = run(model)
    _, zero, _ = run(model, Knobs(dropout=torch.tensor(0.0)))
    _, some, _ = run(model, Knobs(dropout=torch.tensor(0.2)))
    torch.testing.assert_close(zero, plain)
    assert (some - plain).abs().mean() > 0.05
