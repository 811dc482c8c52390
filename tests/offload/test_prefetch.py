"""Prefetch of cold experts: results are bit-identical wherever experts are kept."""

from __future__ import annotations

import pytest
import torch

from birkhoff.decode.gpu import Decoder
from birkhoff.hooks.tap import NoTap
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.state import State
from birkhoff.offload.copy_stream import HostCopy
from birkhoff.offload.prefetch import ExpertPrefetch, HashRoutePrefetch
from tests.interpreter import DEVICE, packed_model
from tests.model.offloaded import offloaded_model
from tests.models import random_tokens, variant
from tests.sizes import scaled

SMALL = variant(compress_ratios=(0, 4, 128), num_hash_layers=1, num_nextn_predict_layers=0)
SHORT = variant(compress_ratios=(0, 4), num_hash_layers=1, num_nextn_predict_layers=0)
SHARES = (1.0, 0.5, 0.1, 0.0)


class Counting(HostCopy):
    """Records the source of each copy."""

    def __init__(self):
        self.sources: list[int] = []

    def copy(self, target, source):
        self.sources.append(source.data_ptr())
        super().copy(target, source)


@pytest.fixture(scope="module")
def model():
    return packed_model(SMALL)


@torch.inference_mode()
@pytest.mark.parametrize("share", SHARES)
def test_prefill_is_bit_identical_at_any_share(model, share):
    offloaded, store = offloaded_model(model, share)
    tokens = random_tokens(SMALL, 40).to(DEVICE)
    assert torch.equal(offloaded(tokens), model(tokens))
    assert not any(cached.refcount for cached in store._cached.values()), "every copy was released"


def state_after(model, tokens) -> State:
    """A state after these tokens, computed by the plain path."""
    state = State.contiguous(SHORT, 1, 128, device=DEVICE)
    model.run(Batch.of([SequenceChunk(0, 0, tokens)], DEVICE), state, NoTap())
    return state


def decoded(model, state, token: int, position: int) -> torch.Tensor:
    """Logits of one step by the kernels that read the table."""
    decoder = Decoder(model, state, fast=False)
    buffers = decoder.buffers(1, 128)
    buffers.token_ids.fill_(token)
    buffers.positions.fill_(position)
    return decoder.step(buffers)


@pytest.fixture(scope="module")
def short():
    """A model of two layers, some tokens, and the kernels' logits for the last of them."""
    model, tokens = packed_model(SHORT), random_tokens(SHORT, 11)
    with torch.inference_mode():
        return model, tokens, decoded(model, state_after(model, tokens[:10]), int(tokens[10]), 10)


@torch.inference_mode()
@pytest.mark.parametrize("share", scaled(SHARES, (0.5, 0.0)))
def test_a_decode_step_is_bit_identical_at_any_share(short, share):
    """Through the table, after a swap; both paths count the same reads."""
    model, tokens, true = short
    offloaded, store = offloaded_model(model, share)
    states = [state_after(offloaded, tokens[:10]) for _ in range(2)]
    _exchange_one(store)
    store.read_counts.zero_()
    assert torch.equal(decoded(offloaded, states[0], int(tokens[10]), 10), true)
    by_kernels = store.read_counts.clone()
    offloaded.run(Batch.of([SequenceChunk(0, 10, tokens[10:])], DEVICE), states[1], NoTap())
    assert torch.equal(store.read_counts, 2 * by_kernels)
    assert by_kernels.sum(-1).tolist() == [SHORT.num_experts_per_tok] * 2


def _exchange_one(store):
    hot = store.resident().nonzero().tolist()
    cold = (~store.resident()).nonzero().tolist()
    if hot and cold:
        assert store.swap(tuple(cold[0]), tuple(hot[-1]))
        assert store.publish(wait=True) == 1


@torch.inference_mode()
@pytest.mark.skipif(DEVICE.type == "cuda", reason="counts copies of the CPU's copy_stream")
def test_a_cold_expert_is_copied_once_per_chunk(model):
    copy_stream = Counting()
    offloaded, store = offloaded_model(model, 0.25, spare=3, copy_stream=copy_stream)
    cold = int((~store.resident()).sum())
    offloaded(random_tokens(SMALL, 300).to(DEVICE))
    used = int((store.read_counts[~store.resident()] == 1).sum())
    assert store.read_counts.max() == 1 and cold - 2 <= used <= cold, "a chunk that uses nearly every expert"
    assert len(copy_stream.sources) == len(set(copy_stream.sources)) == used


@pytest.mark.parametrize("spare", [1, 2, 5])
def test_waves_copy_each_expert_to_the_device_in_turn(model, spare):
    _, store = offloaded_model(model, 0.4, spare=spare)
    first, last = store.slots.data_ptr(), store.slots.data_ptr() + store.slots.numel()
    for layer in range(3):
        seen = []
        with ExpertPrefetch(store, layer, range(8)) as prefetch:
            for experts, table in prefetch.waves():
                assert all(first <= address < last for address in table[experts].flatten().tolist())
                seen += experts
        assert sorted(seen) == list(range(8))
    assert store.available_slots() == store.spare, "no copy is in use after the layers"


def test_an_expert_in_a_swap_is_read_at_its_home(model):
    """The cold expert of a swap in progress cannot be cached; the chunk reads it at its home."""
    _, store = offloaded_model(model, 0.5, copy_stream=_Never())
    hot, cold = (tuple(mask.nonzero()[0].tolist()) for mask in (store.resident(), ~store.resident()))
    assert store.swap(cold, hot)
    with ExpertPrefetch(store, cold[0], [cold[1]]) as prefetch:
        home = store.home_parts(cold)
        assert [part.data_ptr() for part in prefetch.parts(cold[1])] == [part.data_ptr() for part in home]


class _Never(HostCopy):
    def is_complete(self, event):
        return False


def test_experts_of_hash_routed_layers_are_known_before_the_step(model):
    offloaded, store = offloaded_model(model, 0.0, spare=16)
    tables = {0: offloaded.layers[0].ffn.gate.tid2eid.cpu()}
    prefetch = HashRoutePrefetch(store, tables)
    tokens = [3, 400, 3]
    expected = sorted({(0, index) for token in tokens for index in tables[0][token].tolist()})
    assert prefetch.cold_experts(tokens) == expected
    assert prefetch.begin(tokens) == len(expected)
    store.publish()
    first, last = store.slots.data_ptr(), store.slots.data_ptr() + store.slots.numel()
    assert all(first <= int(store.table[expert][0]) < last for expert in expected), "they are in the table"
    with torch.inference_mode():
        ids = torch.tensor(tokens, device=DEVICE)
        assert torch.equal(offloaded(ids), model(ids))
    prefetch.release()
    assert store.available_slots() == 16
    _, narrow = offloaded_model(model, 0.0, spare=2)
    assert HashRoutePrefetch(narrow, tables).begin(range(100)) == 1, (
        "half of the spare slots are left for other layers"
    )


@torch.inference_mode()
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
def test_a_captured_step_is_bit_identical_while_experts_are_swapped(short):
    """Copies on another stream during replays: no replay reads an incomplete expert."""
    model, tokens, true = short
    offloaded, store = offloaded_model(model, 0.5, spare=4)
    decoder = Decoder(offloaded, state_after(offloaded, tokens[:10]), fast=False)
    buffers = decoder.buffers(1, 128)
    buffers.token_ids.fill_(int(tokens[10]))
    buffers.positions.fill_(10)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        decoder.step(buffers)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.step(buffers)
    made, moved = [], 0
    for turn in range(200):
        moved += store.publish()
        hot, cold = store.resident().nonzero().tolist(), (~store.resident()).nonzero().tolist()
        store.swap(tuple(cold[turn % len(cold)]), tuple(hot[(3 * turn) % len(hot)]))
        graph.replay()
        made.append(buffers.logits.clone())
    moved += store.publish(wait=True)
    assert moved > 20
    assert all(torch.equal(logits, true) for logits in made)
