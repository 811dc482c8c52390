"""The measurement of taps runs, and everything it measures went the way of recorded steps; times are not looked at."""

from __future__ import annotations

import torch

from birkhoff.bench.synthetic import random_on_device
from birkhoff.bench.taps import NAMES, TappedSteps, TapPlans, cost_rows
from birkhoff.decode.gpu import Decoder
from birkhoff.engine.cuda_graphs import CudaGraphs
from birkhoff.model.state import State
from tests.interpreter import DEVICE
from tests.models import variant
from tests.sizes import FULL

SHORT = variant(compress_ratios=(0,), num_hash_layers=0, num_nextn_predict_layers=0)


def made() -> CudaGraphs:
    model = random_on_device(SHORT, DEVICE, dtype=torch.float32, kernels="triton")
    return CudaGraphs(Decoder(model, State.contiguous(SHORT, 2, 128, device=DEVICE), fast=False), 1, 128)


@torch.inference_mode()
def test_steps_are_measured_as_an_engine_runs_them():
    """Rows are handed out one step later, and what a step leaves for the next one is not made again."""
    steps = TappedSteps(graphs := made(), TapPlans(graphs.decoder.model, 1, 24).plans("outputs", 100), 1)
    layouts, taken = [], steps.plans[0].jobs[0].rows
    for at in range(2, 5):
        assert steps.step(at) > 0
        layouts.append(steps._pending.layout)
        assert [len(rows) for rows in taken.values()] == ([at - 2] * 2 if at > 2 else [])
    steps.deliver_pending()
    assert (
        [len(rows) for rows in taken.values()] == [3, 3]
        and len(set(map(id, layouts))) == 1
        and steps.all_replayed
    )


def test_every_contender_is_replayed():
    graphs = made()
    names = NAMES if FULL else ("idle", "vectors", "reconstruction")
    rows = list(cost_rows(graphs, batch=1, start=2, steps=1, features=24, warm=1, names=names))
    assert [row["contender"] for row in rows] == list(names)
    assert all(row["replayed"] and row["ms"]["median"] > 0 for row in rows)
    assert len(graphs._tapped) == len(names) - 1, "idle requests have no pattern of their own"
    assert rows[-1]["times_products"] and rows[-1]["features"] == 24
