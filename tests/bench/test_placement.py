"""The placement benchmark on a CPU at the smallest size: its rows are complete and consistent."""

from __future__ import annotations

import json

import pytest
import torch

from birkhoff.bench.placement import (
    CPU_SHARES,
    PlacedSteps,
    bench_placement,
    hot_fraction,
    move_to,
    random_resident,
)
from birkhoff.bench.synthetic import filled_state, random_placed, skew_routing
from birkhoff.convert.presets import preset
from birkhoff.decode.gpu import Decoder
from birkhoff.decode.layer_weights import layer_weights
from birkhoff.decode.step_time import step_seconds
from birkhoff.kernels.packed import native
from birkhoff.offload.expert_usage import ExpertUsage
from tests.models import variant

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the measurement itself")
CPU = torch.device("cpu")
LEAST = variant(compress_ratios=(0,), num_hash_layers=0, num_nextn_predict_layers=0, hc_sinkhorn_iters=2)
SMALL = variant(compress_ratios=(0, 4), num_hash_layers=1, num_nextn_predict_layers=0, hc_sinkhorn_iters=2)


def test_hot_fractions_are_shares_or_sizes():
    flash = preset("flash", mtp=False)
    assert hot_fraction("0.925", flash) == 0.925
    assert 0.05 < hot_fraction("24GiB", flash) < hot_fraction("48GiB", flash) < 0.3


def test_all_rows_are_produced_and_consistent():
    small = {"config": LEAST, "device": CPU, "count": 1, "checked": 1, "kernels": "reference", "chunk": 16}
    rows = list(bench_placement(["0.5"], [1], 128, **small))
    kinds = ["same bits", "bus", "placement", "placement", "moving", "chunk"]
    on_cpu = ["cpu experts"] * len(CPU_SHARES)
    assert [row["kind"] for row in rows] == kinds + (["rates", *on_cpu] if native.available() else [])
    if native.available():
        assert rows[6]["cpu_bytes_per_second"] > 0 and [row["cpu_share"] for row in rows[7:]] == [*CPU_SHARES]
        assert all(row["passed"] and row["tokens_per_second"] > 0 for row in rows[7:])
    assert all(json.loads(json.dumps(row)) == row for row in rows)
    assert rows[0]["passed"] and rows[0]["equal"] == {"1": True, "0.5": True, "0": True}
    random_row, counted_row = rows[2], rows[3]
    assert random_row["placement"] == "random" and random_row["hot"] == counted_row["hot"] == 0.5
    assert 0 <= counted_row["misses"] <= 1 and counted_row["exchanged"] >= 0
    assert rows[4]["exchanged"] > 0 and rows[5]["cold_bytes"] > 0


@pytest.mark.skipif(not native.available(), reason="no C++ compiler")
def test_kernels_know_of_experts_in_host_memory_unless_the_cpu_computes_all_of_them():
    model, store = random_placed(LEAST, CPU, random_resident(1, 8, 0.5), dtype=torch.float32)
    ranges = {}
    for share in (0.5, 1.0, 0.0):
        assert model.compute_cold_experts_on_host(share)
        ranges[share] = layer_weights(model.blocks()[0]).host_range
        assert bool(store.on_host.any()) == (share > 0)
    assert ranges == {0.5: store.host_range(), 1.0: None, 0.0: store.host_range()}
    assert step_seconds(model, CPU, count=1) > 0


def test_skewed_routing_is_counted_and_hot_experts_are_moved():
    """Two layers share the experts of one store layer, so their counts are added."""
    model, store = random_placed(SMALL, CPU, random_resident(1, 8, 0.5), spare=3, dtype=torch.float32)
    skew_routing(model, 0.5)
    with torch.inference_mode():
        decoder = Decoder(model, filled_state(SMALL, 1, 64, CPU, torch.float32))
        reads = PlacedSteps(decoder, 1, 64).reads(2)
    assert reads.sum() == 2 * 2 * SMALL.num_experts_per_tok
    usage = ExpertUsage(1, 8)
    usage.add(reads, 2)
    hottest = usage.hottest(4)
    expected_moves = int((hottest & ~store.resident()).sum())
    moved, _ = move_to(store, hottest)
    assert moved == expected_moves and torch.equal(store.resident(), hottest)
