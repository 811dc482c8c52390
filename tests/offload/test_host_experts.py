"""Cold experts computed on the CPU: results, experts that move between steps, and the measured choice."""

from __future__ import annotations

import pytest
import torch

from birkhoff.kernels.experts import Stack, experts
from birkhoff.kernels.packed import TYPES, native
from birkhoff.offload.expert_layout import PackedExpertLayout, matrices_of
from birkhoff.offload.expert_store import ExpertStore
from birkhoff.offload.host_experts import HostExperts, Rates, measure_rates
from tests.models import variant
from tests.packed_matrices import random_matrix

pytestmark = pytest.mark.skipif(not native.available(), reason="no C++ compiler")

HIDDEN, INNER, COUNT, TOPK = 256, 512, 6, 3
CONFIG = variant(hidden_size=HIDDEN, moe_intermediate_size=INNER)
KINDS = {0: (TYPES["FP4"], TYPES["FP4"]), 1: (TYPES["Q2_K"], TYPES["Q3_K"]), 2: (TYPES["FP8"], TYPES["BF16"])}


def filled_store(resident):
    """Layers of different types with random weights."""
    layouts = [PackedExpertLayout.of(CONFIG, KINDS[layer]) for layer in range(3)]
    store = ExpertStore(layouts, resident, spare=2)
    for layer, (gate, down) in KINDS.items():
        for index in range(COUNT):
            seed = 100 * layer + 10 * index
            sources = [
                random_matrix(gate, INNER, HIDDEN, seed),
                random_matrix(gate, INNER, HIDDEN, seed + 1),
                random_matrix(down, HIDDEN, INNER, seed + 2),
            ]
            targets = matrices_of(store.home_parts((layer, index)), KINDS[layer], HIDDEN, INNER)
            for target, source in zip(targets, sources):
                target.codes.copy_(source.codes)
                if target.scales is not None:
                    target.scales.copy_(source.scales)
    return store


def stack_of(store, layer):
    def dense(expert):
        parts = store.home_parts((layer, expert))
        return [matrix.dense() for matrix in matrices_of(parts, KINDS[layer], HIDDEN, INNER)]

    return Stack(COUNT, lambda e: torch.cat(dense(e)[:2]), lambda e: dense(e)[2].T)


def routed(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(COUNT, generator=generator)[:TOPK] for _ in range(rows)])
    x = 0.1 * torch.randn(rows, HIDDEN, generator=generator)
    return x, ids.to(torch.int32), torch.rand(rows, TOPK, generator=generator)


def run_step(host, store, layer, x, ids, weights):
    """A step whose device side is the plain twin, without the experts that it leaves to the host."""
    own = store.decode_table[layer][ids.long(), 0] != 0
    out = torch.full((len(x), TOPK + 1, HIDDEN), torch.nan)
    host.begin(layer, x, ids, weights)
    for choice in range(TOPK):
        one = experts(
            x,
            ids[:, choice : choice + 1],
            weights[:, choice : choice + 1],
            stack_of(store, layer),
            10.0,
            None,
        )
        out[:, choice][own[:, choice]] = one[own[:, choice]]
    out[:, -1] = 0
    host.end(layer, x, ids, out)
    return out.sum(1)


@pytest.mark.parametrize("share", [1.0, 0.4])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("layer", KINDS)
def test_host_and_device_together_compute_all_experts(layer, rows, share):
    every = filled_store(torch.zeros(3, COUNT, dtype=torch.bool))
    HostExperts(every, list(KINDS.values()), HIDDEN, INNER, 10.0, share)
    of_host = every.on_host  # if all experts are cold
    assert abs(of_host.float().mean() - share) < 0.1
    resident = torch.zeros(3, COUNT, dtype=torch.bool)
    resident[:, ::2] = True
    store = filled_store(resident)
    host = HostExperts(store, list(KINDS.values()), HIDDEN, INNER, 10.0, share)
    assert torch.equal(store.on_host, ~resident & of_host)
    assert torch.equal(store.decode_table[..., 0] == 0, store.on_host)
    for seed in range(3):
        x, ids, weights = routed(rows, seed)
        expected = experts(x, ids, weights, stack_of(store, layer), 10.0, None)
        actual = run_step(host, store, layer, x, ids, weights)
        assert (actual - expected).abs().max() <= 2e-5 * expected.abs().max()
        store.swap((layer, 1), (layer, 0)) if store.is_cold((layer, 1)) else store.swap(
            (layer, 0), (layer, 1)
        )
        store.publish(wait=True)
        assert torch.equal(store.on_host, ~store.resident() & of_host), "as the experts moved"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_inputs_of_16_bits_are_read_as_they_are(dtype):
    store = filled_store(torch.zeros(3, COUNT, dtype=torch.bool))
    host = HostExperts(store, list(KINDS.values()), HIDDEN, INNER, 10.0)
    x, ids, weights = routed(2, 7)
    x = x.to(dtype)
    expected = experts(x.float(), ids, weights, stack_of(store, 1), 10.0, None)
    out = torch.zeros(2, TOPK + 1, HIDDEN)
    host.begin(1, x, ids, weights)
    host.end(1, x, ids, out)
    assert (out.sum(1) - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_a_copy_on_the_device_is_not_left_to_the_host():
    store = filled_store(torch.zeros(3, COUNT, dtype=torch.bool))
    HostExperts(store, list(KINDS.values()), HIDDEN, INNER, 10.0)
    assert store.on_host.all() and (store.decode_table == 0).all() and (store.table != 0).any()
    cached = store.acquire((1, 4))
    assert store.on_host[1, 4]
    store.publish(wait=True)
    assert not store.on_host[1, 4] and torch.equal(store.decode_table[1, 4], store.table[1, 4])
    store.release(cached)
    for index in (0, 1):  # its slot is needed
        store.release(store.acquire((0, index)))
    assert store.on_host[1, 4] and (store.decode_table[1, 4] == 0).all()


def test_a_check_that_fails_leaves_everything_on_the_device(monkeypatch):
    store = filled_store(torch.zeros(3, COUNT, dtype=torch.bool))
    host = HostExperts(store, list(KINDS.values()), HIDDEN, INNER, 10.0)
    assert host.works(torch.float32) and host.works(torch.bfloat16)
    monkeypatch.setattr(host._calls, "begin", lambda copies, job, result: result[0].zero_())
    assert not host.works(torch.float32)
    store.compute_on_device()
    assert not store.on_host.any() and store.decode_table is store.table
    store.swap((0, 1), (0, 0)) if not store.is_cold((0, 0)) else store.release(store.acquire((0, 0)))
    store.publish(wait=True)
    assert not store.on_host.any()


def test_rates_are_measured_and_decide():
    store = filled_store(torch.zeros(3, COUNT, dtype=torch.bool))
    rates = measure_rates(store, list(KINDS.values()), HIDDEN, INNER)
    assert rates.cpu > 0 and rates.bus > 0 and "GB/s" in str(rates)
    assert Rates(cpu=57e9, bus=50e9).balanced_share == 0.45 and Rates(cpu=0.0, bus=1e9).balanced_share == 0
