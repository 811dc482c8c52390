"""Off means absent: with `NoTap` a layer traces to the very operators of a layer written without taps."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from birkhoff.hooks.tap import EagerTap, NoTap
from birkhoff.kernels.experts import route
from birkhoff.model.batch import Batch
from birkhoff.model.state import Fresh
from tests.models import TINY, random_model, random_tokens

LENGTH = 140  # one HCA entry, and more CSA entries than are chosen


def tapless_layer(block, streams, batch, phases, state):
    """`Block.forward` and `MoE.forward` with every line about taps left out."""
    u, _, post, mix = block.hc_attn.read(streams)
    y = block.attn(block.attn_norm(u), batch, phases, state)
    streams = block.hc_attn.write(streams, y, post, mix)
    u, _, post, mix = block.hc_ffn.read(streams)
    return block.hc_ffn.write(streams, tapless_experts(block.ffn, block.ffn_norm(u), batch), post, mix)


def tapless_experts(moe, x, batch):
    gate = moe.gate
    logits = x.float() @ gate.weight.T
    given = None if gate.tid2eid is None else gate.tid2eid[batch.token_ids].long()
    ids, weights = route(logits, gate.bias, given, gate.topk, gate.factor)
    return (moe.experts(x, ids, weights) + moe.shared_experts(x).float()).to(x.dtype)


def operators(function, streams):
    """Every operator of a trace with what it takes, in order; nothing is simplified away."""
    with torch.no_grad():
        graph = make_fx(function)(streams).graph
    return [(node.op, str(node.target), str(node.args), str(node.kwargs)) for node in graph.nodes]


@pytest.fixture(scope="module")
def tiny():
    return random_model(seed=6)


@pytest.fixture(scope="module")
def step(tiny):
    batch = Batch.whole(random_tokens(TINY, LENGTH, 6))
    return batch, tiny.rope.step(batch.positions)


@pytest.fixture(scope="module")
def streams():
    return torch.randn(LENGTH, TINY.hc_mult, TINY.hidden_size, generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize("layer", [0, 2, 3])  # sliding and hash-routed, CSA and HCA and score-routed
def test_without_a_tap_a_layer_is_the_layer_without_taps(layer, tiny, step, streams):
    block = tiny.layers[layer]
    untapped = operators(lambda x: block(x, *step, Fresh(), NoTap()), streams)
    written_without = operators(lambda x: tapless_layer(block, x, *step, Fresh()), streams)
    assert len(untapped) > 200
    assert untapped == written_without


def test_a_tap_that_edits_does_show_in_the_trace(tiny, step, streams):
    """So that the equality above is known to be able to fail."""
    block, tap = tiny.layers[0], EagerTap(edit=lambda site, layer, x: x + 1.0)
    tapped = operators(lambda x: block(x, *step, Fresh(), tap), streams)
    assert len(tapped) == len(operators(lambda x: block(x, *step, Fresh(), NoTap()), streams)) + 6
