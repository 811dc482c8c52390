"""CUDA graph selection: rows and contexts are rounded up to a few sizes, and padding rows use the scratch slot."""

from __future__ import annotations

import pytest
import torch

from birkhoff.decode.gpu import Decoder
from birkhoff.engine.cuda_graphs import CONTEXTS, ROWS, CudaGraphs
from birkhoff.hooks.tap import NoTap
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.state import State
from tests.interpreter import DEVICE, packed_model
from tests.models import variant

SHORT = variant(
    compress_ratios=(0,), num_hash_layers=0, num_nextn_predict_layers=0, max_position_embeddings=131072
)


@pytest.fixture(scope="module")
def model():
    return packed_model(SHORT)


def make_graphs(model, max_context: int = 100000) -> tuple[CudaGraphs, State]:
    state = State.contiguous(SHORT, 4, 256, device=DEVICE)
    return CudaGraphs(Decoder(model, state, fast=False), scratch_slot=3, max_context=max_context), state


@torch.inference_mode()
def test_rows_keep_their_order_and_padding_rows_write_only_the_scratch_slot(model):
    graphs, state = make_graphs(model)
    plain = State.contiguous(SHORT, 4, 256, device=DEVICE)
    tokens, positions, slots = [5, 6, 8], [0, 3, 1], [2, 0, 1]
    logits, streams = graphs.step(tokens, positions, slots)
    assert list(graphs._plain) == [(4, 2048)]
    pieces = [SequenceChunk(s, p, torch.tensor([t])) for t, p, s in zip(tokens, positions, slots)]
    batch = Batch.of(pieces, DEVICE)
    hidden, true = model.run(batch, plain, NoTap())
    order = [batch.chunks.index(piece) for piece in pieces]
    assert (logits - model.logits(hidden)[order]).abs().max() < 1e-4
    assert (streams - true[order]).abs().max() < 1e-4
    rows, same = state.layers[0].keys.rows, plain.layers[0].keys.rows
    assert (rows[:3] - same[:3]).abs().max() < 1e-5
    assert rows[3].abs().sum() > 0 and (rows[3, 1:] == 0).all(), "the padding row is at position 0"
    kept = logits.clone()
    graphs.step([1, 2, 3], [4, 5, 6], slots)
    assert torch.equal(logits, kept), "the next step does not overwrite returned tensors"


@pytest.mark.parametrize("length, context", [(1, 2048), (2048, 2048), (2049, 8192), (40000, 100000)])
def test_a_graph_size_is_created_once_and_is_limited_by_max_context(model, length, context):
    graphs, _ = make_graphs(model)
    first = graphs._find_plain(5, length)
    assert (first[0].rows, first[0].context) == (8, context) and graphs._find_plain(6, length) is first


def test_fits_accepts_the_largest_size_and_sizes_are_sorted(model):
    graphs, _ = make_graphs(model)
    assert graphs.fits(ROWS[-1]) and not graphs.fits(ROWS[-1] + 1)
    assert list(ROWS) == sorted(ROWS) and list(CONTEXTS) == sorted(CONTEXTS)
