"""Expert placement: decayed rates, swaps that pay, and hit rates on skewed traffic against theory."""

from __future__ import annotations

import threading

import pytest
import torch

from birkhoff.engine.engine import EngineCore
from birkhoff.engine.request import Request
from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.errors import CapacityError
from birkhoff.offload.expert_usage import ExpertCounts, ExpertUsage
from birkhoff.offload.placement import Placement
from tests.engine.traffic import Traffic, hit_rate, zipf
from tests.interpreter import DEVICE, packed_model
from tests.model.offloaded import offloaded_model, some_resident
from tests.models import random_tokens, variant
from tests.sizes import scaled

SMALL = variant(compress_ratios=(0, 4), num_hash_layers=1, num_nextn_predict_layers=0)
LAYERS, EXPERTS = 4, 64


def run_policy(usage, resident, traffic, looks, every=16, most=4):
    """Read the counters after every few steps; returns the final placement and the swaps begun at each reading."""
    begun = []
    for _ in range(looks):
        usage.add(traffic.reads(every), every)
        pairs = usage.swaps(resident, most)
        assert len(pairs) <= most
        for arriving, leaving in pairs:
            assert not resident[arriving] and resident[leaving]
            resident[arriving], resident[leaving] = True, False
        begun.append(len(pairs))
    return resident, begun


def test_synthetic_traffic_has_the_given_shares():
    shares = zipf(2, 8, 1.0, 0)
    assert torch.allclose(shares.sum(-1), torch.ones(2, dtype=torch.float64))
    trace = Traffic(shares, 3, 0).steps(500)
    assert bool((trace.sum(-1) == 3).all())
    assert hit_rate(trace, torch.ones(2, 8, dtype=torch.bool)) == 1.0
    alone = Traffic(shares, 1, 0).steps(4000).double().mean(0)
    assert torch.allclose(alone, shares, atol=0.03)


def test_the_hit_rate_on_zipf_traffic_equals_theory():
    """One expert per token: the n likeliest hit with the sum of their probabilities, n random ones with n / total."""
    shares = zipf(LAYERS, EXPERTS, 1.1, seed=3)
    count = LAYERS * EXPERTS * 9 // 10
    traffic = Traffic(shares, 1, seed=5)
    trace = traffic.steps(scaled(20_000, 4_000))
    usage = ExpertUsage(LAYERS, EXPERTS)
    usage.add(Traffic(shares, 1, seed=6).reads(scaled(20_000, 4_000)), scaled(20_000, 4_000))
    best = shares.flatten().sort(descending=True).values[:count].sum() / LAYERS
    result = hit_rate(trace, usage.hottest(count))
    assert result == pytest.approx(float(best), abs=0.01), "frequency placement reaches the optimum"
    random_rates = [hit_rate(trace, some_resident(LAYERS, EXPERTS, 0.9, seed)) for seed in range(8)]
    assert sum(random_rates) / 8 == pytest.approx(0.9, abs=0.05), "a random set hits with its share"
    assert 1 - result < 0.25 * (1 - sum(random_rates) / 8), "and a random set misses several times as often"


def test_swaps_converge_to_the_best_set():
    shares = zipf(LAYERS, EXPERTS, 1.1, seed=3)
    count = LAYERS * EXPERTS // 2
    usage = ExpertUsage(LAYERS, EXPERTS, half_life=4000)
    begin = some_resident(LAYERS, EXPERTS, 0.5, 1)
    fresh = Traffic(shares, 2, seed=9).steps(2000)
    before = hit_rate(fresh, begin)
    resident, begun = run_policy(usage, begin.clone(), Traffic(shares, 2, seed=8), 400)
    after, best = hit_rate(fresh, resident), hit_rate(fresh, usage.hottest(count))
    assert int(resident.sum()) == count
    assert after > best - 0.04 and before < best - 0.2, (
        before,
        after,
        best,
    )  # swaps that were not significant cost little
    assert sum(begun[:200]) > 20 and sum(begun[-100:]) <= 2, "experts of about equal use are not swapped"


def test_equally_used_experts_are_not_swapped():
    flat = torch.full((LAYERS, EXPERTS), 1 / EXPERTS)
    _, begun = run_policy(
        ExpertUsage(LAYERS, EXPERTS), some_resident(LAYERS, EXPERTS, 0.5), Traffic(flat, 4, seed=2), 300
    )
    assert sum(begun) == 0


def test_placement_adapts_to_changed_traffic():
    first, second = zipf(LAYERS, EXPERTS, 1.2, seed=3), zipf(LAYERS, EXPERTS, 1.2, seed=4)
    usage = ExpertUsage(LAYERS, EXPERTS, half_life=1500)
    resident, _ = run_policy(usage, some_resident(LAYERS, EXPERTS, 0.3), Traffic(first, 2, seed=1), 300)
    fresh = Traffic(second, 2, seed=9).steps(2000)
    stale = hit_rate(fresh, resident)
    resident, _ = run_policy(usage, resident, Traffic(second, 2, seed=7), 500)
    result, best = hit_rate(fresh, resident), hit_rate(fresh, usage.hottest(int(resident.sum())))
    assert result > best - 0.07 and result > stale + 0.2, (stale, result, best)


def test_initial_counts_decide_the_initial_placement():
    reads = torch.zeros(2, 4, dtype=torch.int64)
    reads[1, 3], reads[0, 2] = 90, 80
    usage = ExpertUsage(2, 4, ExpertCounts(reads, 100))
    assert usage.hottest(2).nonzero().tolist() == [[0, 2], [1, 3]]
    assert ExpertUsage(2, 4).hottest(3).tolist() == [
        [True, True, False, False],
        [True, False, False, False],
    ], "layers are filled in turn"
    assert ExpertUsage(2, 4).swaps(torch.eye(2, 4, dtype=torch.bool), 5) == [], "no counts yet"
    long = ExpertUsage(2, 4, ExpertCounts(reads * 10**6, 100 * 10**6), half_life=1000)
    long.add(torch.ones(2, 4), 1)
    assert 900 < long.counts().steps <= 1001, "old counts are limited to a half-life"


def test_saved_counts_restore_the_placement(tmp_path):
    usage = ExpertUsage(LAYERS, EXPERTS)
    shares = zipf(LAYERS, EXPERTS, 1.1, seed=3)
    usage.add(Traffic(shares, 2, seed=4).reads(3000), 3000)
    usage.counts().save(tmp_path / "c.json")
    again = ExpertUsage(LAYERS, EXPERTS, ExpertCounts.load(tmp_path / "c.json", LAYERS, EXPERTS))
    assert torch.equal(again.hottest(40), usage.hottest(40))
    assert torch.allclose(again.rates, usage.rates, atol=1e-3)


@pytest.fixture(scope="module")
def model():
    return packed_model(SMALL)


def answers(network, placement, prompts):
    from tests.decode.test_gpu import requests

    core = EngineCore(
        network, max_requests=2, max_context=256, num_pages=8, device=DEVICE, placement=placement
    )
    try:
        return requests(core, prompts, scaled(24, 12))
    finally:
        core.close()


@pytest.mark.parametrize("prefetch", ["chunks", "always", "never"])
def test_outputs_are_equal_while_experts_move(model, prefetch):
    prompts = [random_tokens(SMALL, length, length).tolist() for length in (9, 30)]
    true = answers(model, None, prompts)
    offloaded, store = offloaded_model(model, 0.5, spare=6)
    first = store.resident()
    placement = Placement(
        store, _AlwaysSwap(2, 8), offloaded.hash_routing_tables(), interval=1, max_swaps=3, prefetch=prefetch
    )
    assert answers(offloaded, placement, prompts) == true
    report = placement.report()
    assert report["exchanged"] > 5 and not torch.equal(store.resident(), first), "experts were swapped"
    assert report["experts"] == 16 and report["experts_on_device"] == 8 == int(store.resident().sum())
    assert report["reads"] == int(store.read_counts.sum()) > 0 and 0 < report["share_of_reads_on_device"] < 1
    assert not any(cached.refcount for cached in store._cached.values())


def test_a_request_that_can_never_fit_is_refused_with_the_bytes_by_kind_of_layer(model):
    core = EngineCore(model, max_requests=1, max_context=1024, num_pages=3, device=DEVICE)
    with pytest.raises(
        CapacityError, match=r"4 pages\), .* free \(3 pages\)\. It would be 24\.00 KiB in csa layers\."
    ):
        core.submit(Request(tuple(range(400)), SamplingParams(max_tokens=100), 100, seed=0))
    core.close()


def test_traces_of_another_thread_are_not_affected_by_swaps(model):
    """Traces of another thread read experts that engine steps move."""
    offloaded, store = offloaded_model(model, 0.4, spare=3)
    ids = random_tokens(SMALL, 20).to(DEVICE)
    with torch.no_grad():
        true = model(ids)
    placement = Placement(store, _AlwaysSwap(2, 8), offloaded.hash_routing_tables(), interval=1, max_swaps=3)
    wrong: list[int] = []

    def run_traces():
        with torch.no_grad():
            wrong.extend(turn for turn in range(scaled(60, 15)) if not torch.equal(offloaded(ids), true))

    other = threading.Thread(target=run_traces)
    other.start()
    prompts = [random_tokens(SMALL, length, length).tolist() for length in (9, 30)]
    result = answers(offloaded, placement, prompts)
    other.join()
    assert result == answers(model, None, prompts) and not wrong


class _AlwaysSwap(ExpertUsage):
    """Swaps unconditionally, regardless of the rates."""

    def swaps(self, resident, limit):
        hot, cold = resident.nonzero().tolist(), (~resident).nonzero().tolist()
        shift = int(self._steps)
        pairs = [
            (tuple(cold[(i + shift) % len(cold)]), tuple(hot[(i + 2 * shift) % len(hot)]))
            for i in range(limit)
        ]
        return pairs[:limit]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU's counters come when they come")
def test_counters_are_read_every_few_steps_and_never_twice(model):
    offloaded, store = offloaded_model(model, 0.5)
    placement = Placement(store, ExpertUsage(2, 8), offloaded.hash_routing_tables(), interval=4)
    for step in range(1, 13):
        placement.before_step([1], chunk=False)
        store.count_reads(torch.tensor([[[step % 8]], [[3]]], dtype=torch.int32))
        placement.after_step()
        assert sum(placement.reads.values()) == 2 * (step // 4 * 4)
    assert placement.counts().steps == 12 and placement.counts().reads[1, 3] == 12
