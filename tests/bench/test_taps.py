"""The tap benchmark runs, and all measured steps are replayed from CUDA graphs. Times are not checked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from birkhoff.bench.synthetic import random_on_device
from birkhoff.bench.taps import NAMES, TappedSteps, TapPlans, cost_rows
from birkhoff.config import V4Config
from birkhoff.decode.gpu import Decoder
from birkhoff.engine.cuda_graphs import CudaGraphs
from birkhoff.model.state import State
from tests.interpreter import DEVICE
from tests.models import variant
from tests.sizes import FULL

SHORT = variant(compress_ratios=(0,), num_hash_layers=0, num_nextn_predict_layers=0, hc_sinkhorn_iters=2)


INDEXED = replace(SHORT, compress_ratios=(0, 4), num_hidden_layers=2)  # has layers for every contender
ATTENTION = ("key mask", "sink", "blocks", "entries")


def make_graphs(config: V4Config = SHORT) -> CudaGraphs:
    model = random_on_device(config, DEVICE, dtype=torch.float32, kernels="triton")
    return CudaGraphs(Decoder(model, State.contiguous(config, 2, 128, device=DEVICE), fast=False), 1, 128)


@torch.inference_mode()
def test_steps_are_measured_as_an_engine_runs_them():
    """Rows are delivered one step later, and the layout of a step is reused by the next."""
    steps = TappedSteps(
        graphs := make_graphs(), TapPlans(graphs.decoder.model, 1, 24).plans("outputs", 100), 1
    )
    layouts, delivered = [], steps.plans[0].jobs[0].rows
    for position in range(2, 5):
        assert steps.step(position) > 0
        layouts.append(steps._pending.layout)
        assert [len(rows) for rows in delivered.values()] == ([position - 2] * 2 if position > 2 else [])
    steps.deliver_pending()
    assert (
        [len(rows) for rows in delivered.values()] == [3, 3]
        and len(set(map(id, layouts))) == 1
        and steps.all_replayed
    )


def test_every_contender_is_replayed():
    graphs = make_graphs(INDEXED if FULL else SHORT)
    names = NAMES if FULL else ("idle", "vectors", "reconstruction")
    rows = list(cost_rows(graphs, batch=1, start=2, steps=1, features=24, warm=1, names=names))
    assert [row["contender"] for row in rows] == list(names)
    assert all(row["replayed"] and row["ms"]["median"] > 0 for row in rows)
    # Idle requests have no pattern, and edits of the attention in the same layer have the same pattern.
    patterns = {"attention" if name in ATTENTION else name for name in names if name != "idle"}
    assert len(graphs._tapped) == len(patterns)
    assert rows[-1]["times_products"] and rows[-1]["features"] == 24


@pytest.mark.parametrize("ratio, missing", [(0, {"blocks", "entries"}), (128, {"blocks"}), (4, set())])
def test_contenders_that_the_model_has_no_layer_for_are_left_out(ratio, missing):
    graphs = make_graphs(replace(SHORT, compress_ratios=(ratio,)))
    plans = TapPlans(graphs.decoder.model, 1, 24)
    assert {name for name in NAMES if plans.lacks(name)} == missing
    assert all(plans.plans(name, 100) for name in NAMES if name not in missing)
    rows = cost_rows(graphs, batch=1, start=2, steps=1, features=24, warm=1, names=tuple(missing))
    assert not list(rows)
