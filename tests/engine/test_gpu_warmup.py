"""Warm-up of a GPU engine: which batches run, which graphs are recorded, and that the state stays clean."""

from __future__ import annotations

import pytest
import torch

from birkhoff.decode.gpu import Decoder
from birkhoff.engine.cuda_graphs import ROWS, CudaGraphs
from birkhoff.engine.gpu_warmup import graph_shapes, warm_up, warm_up_batches
from birkhoff.hooks.tap import NoTap
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.state import State
from tests.interpreter import DEVICE, packed_model
from tests.models import variant

SMALL = variant(
    compress_ratios=(0, 4, 128),
    num_hash_layers=1,
    num_nextn_predict_layers=0,
    index_topk=4,
    hc_sinkhorn_iters=2,
)


@pytest.mark.parametrize(
    ("context", "batch", "pages"), [(8192, 4096, 1000), (300, 4096, 1000), (8192, 64, 2)]
)
def test_batches_stay_within_the_limits(context, batch, pages):
    batches = list(warm_up_batches(3, context, batch, pages))
    assert max(len(chunk.token_ids) for chunks in batches for chunk in chunks) <= min(batch, context)
    assert max(chunk.stop for chunks in batches for chunk in chunks) <= min(context, 128 * pages)
    lengths = {len(chunk.token_ids) for chunks in batches for chunk in chunks}
    assert min(batch, context, 128 * pages) in lengths


def test_warm_up_does_not_change_results():
    model = packed_model(SMALL)
    ids = torch.randint(1, SMALL.vocab_size, (20,), generator=torch.Generator().manual_seed(1)).tolist()

    def logits(warm: bool) -> torch.Tensor:
        state = State(SMALL, 4, 8, DEVICE, torch.float32)
        graphs = CudaGraphs(Decoder(model, state, fast=False), scratch_slot=3, max_context=40)
        if warm:
            calls = []
            assert warm_up(model, state, graphs, 24, lambda done, total: calls.append((done, total))) > 0
            assert calls[0][0] == 0 and calls[-1][0] == calls[-1][1] == len(calls) - 1
            assert not state.page_table.any()
            assert sorted({rows for rows, _ in graphs._plain}) == [rows for rows in ROWS if rows <= 4]
        state.give_pages(0, [5])
        with torch.inference_mode():
            hidden, _ = model.run(Batch.of([SequenceChunk(0, 0, ids)], DEVICE), state, NoTap())
            first = model.logits(hidden[-1:])
            second, _ = graphs.step([int(first.argmax())], [20], [0])
        return torch.cat([first, second])

    assert torch.equal(logits(True), logits(False))


def test_graphs_are_recorded_for_the_batch_sizes_in_use():
    model = packed_model(SMALL)
    graphs = CudaGraphs(
        Decoder(model, State(SMALL, 9, 8, DEVICE), fast=False), scratch_slot=8, max_context=5000
    )
    assert list(graph_shapes(graphs)) == [(rows, c) for rows in (1, 2, 4, 8) for c in (2048, 5000)]
