"""The measurement of placements, on a CPU at the smallest size: its rows are there, agree and add up."""

from __future__ import annotations

import json

import pytest
import torch

from birkhoff.bench.placement import PlacedSteps, bench_placement, hot_fraction, move_to, random_resident
from birkhoff.bench.synthetic import filled_state, random_placed, skew_routing
from birkhoff.convert.presets import preset
from birkhoff.decode.gpu import Decoder
from birkhoff.offload.expert_usage import ExpertUsage
from tests.models import variant

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the measurement itself")
CPU = torch.device("cpu")
LEAST = variant(compress_ratios=(0,), num_hash_layers=0, num_nextn_predict_layers=0, hc_sinkhorn_iters=2)
SMALL = variant(compress_ratios=(0, 4), num_hash_layers=1, num_nextn_predict_layers=0, hc_sinkhorn_iters=2)


def test_wishes_are_shares_or_sizes():
    flash = preset("flash", mtp=False)
    assert hot_fraction("0.925", flash) == 0.925
    assert 0.05 < hot_fraction("24GiB", flash) < hot_fraction("48GiB", flash) < 0.3


def test_all_rows_come_and_their_numbers_fit_together():
    small = {"config": LEAST, "device": CPU, "count": 1, "checked": 1, "kernels": "reference", "chunk": 16}
    rows = list(bench_placement(["0.5"], [1], 128, **small))
    assert [row["kind"] for row in rows] == ["same bits", "bus", "placement", "placement", "moving", "chunk"]
    assert all(json.loads(json.dumps(row)) == row for row in rows)
    assert rows[0]["passed"] and rows[0]["equal"] == {"1": True, "0.5": True, "0": True}
    by_chance, by_counts = rows[2], rows[3]
    assert by_chance["placement"] == "random" and by_chance["hot"] == by_counts["hot"] == 0.5
    assert 0 <= by_counts["misses"] <= 1 and by_counts["exchanged"] >= 0
    assert rows[4]["exchanged"] > 0 and rows[5]["cold_bytes"] > 0


def test_experts_go_where_they_are_wanted_and_skew_is_found():
    """Two layers share the experts of one; the counts of both are those of the one."""
    model, store = random_placed(SMALL, CPU, random_resident(1, 8, 0.5), spare=3, dtype=torch.float32)
    skew_routing(model, 0.5)
    with torch.inference_mode():
        decoder = Decoder(model, filled_state(SMALL, 1, 64, CPU, torch.float32))
        reads = PlacedSteps(decoder, 1, 64).reads(2)
    assert reads.sum() == 2 * 2 * SMALL.num_experts_per_tok
    usage = ExpertUsage(1, 8)
    usage.add(reads, 2)
    wanted = usage.hottest(4)
    different = int((wanted & ~store.resident()).sum())
    moved, _ = move_to(store, wanted)
    assert moved == different and torch.equal(store.resident(), wanted)
