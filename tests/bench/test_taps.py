"""The tap benchmark runs, and all measured steps are replayed from CUDA graphs. Times are not checked."""

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

SHORT = variant(compress_ratios=(0,), num_hash_layers=0, num_nextn_predict_layers=0, hc_sinkhorn_iters=2)


def make_graphs() -> CudaGraphs:
    model = random_on_device(SHORT, DEVICE, dtype=torch.float32, kernels="triton")
    return CudaGraphs(Decoder(model, State.contiguous(SHORT, 2, 128, device=DEVICE), fast=False), 1, 128)


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
    graphs = make_graphs()
    names = NAMES if FULL else ("idle", "vectors", "reconstruction")
    rows = list(cost_rows(graphs, batch=1, start=2, steps=1, features=24, warm=1, names=names))
    assert [row["contender"] for row in rows] == list(names)
    assert all(row["replayed"] and row["ms"]["median"] > 0 for row in rows)
    assert len(graphs._tapped) == len(names) - 1, "idle requests have no pattern of their own"
    assert rows[-1]["times_products"] and rows[-1]["features"] == 24
