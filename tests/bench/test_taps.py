"""The measurement of taps runs, and everything it measures went the way of recorded steps; times are not looked at."""

from __future__ import annotations

import torch

from birkhoff.bench.synthetic import random_on_device
from birkhoff.bench.taps import NAMES, cost_rows
from birkhoff.engine.graphs import Graphs
from birkhoff.model.device import Decoder
from birkhoff.model.state import State
from tests.interpreter import DEVICE
from tests.models import variant
from tests.sizes import FULL

SHORT = variant(compress_ratios=(0,), num_hash_layers=0, num_nextn_predict_layers=0)


def test_every_contender_is_replayed():
    model = random_on_device(SHORT, DEVICE, dtype=torch.float32, kernels="triton")
    state = State.contiguous(SHORT, 2, 128, device=DEVICE)
    graphs = Graphs(Decoder(model, state, fast=False), 1, 128)
    names = NAMES if FULL else ("idle", "vectors", "reconstruction")
    rows = list(cost_rows(graphs, batch=1, start=2, steps=1, features=24, warm=1, names=names))
    assert [row["contender"] for row in rows] == list(names)
    assert all(row["replayed"] and row["ms"]["median"] > 0 for row in rows)
    assert len(graphs._watched) == len(names) - 1, "idle requests have no pattern of their own"
    assert rows[-1]["times_products"] and rows[-1]["features"] == 24
