"""Steps with several tokens of a sequence, and the MTP block, on the GPU path against the plain forward pass.

In Triton's interpreter. Start positions are such that draft tokens complete CSA and HCA blocks, end a page and wrap
around the ring of the window.
"""

from __future__ import annotations

import pytest
import torch

from birkhoff.decode.gpu import Decoder
from birkhoff.hooks.tap import NoTap
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.state import State
from tests.interpreter import DEVICE, packed_model
from tests.models import random_tokens, variant
from tests.sizes import FULL, scaled

SMALL = variant(
    compress_ratios=(0, 4, 128), num_hash_layers=1, num_nextn_predict_layers=1, hc_sinkhorn_iters=2
)
STARTS = (1, 2, 3, 7, 50, 125, 126, 127, 253) if FULL else (2, 53, 126)


@pytest.fixture(scope="module")
def model():
    return packed_model(SMALL, mtp=True)


def sequential(model, state, slot, start, tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and streams of tokens that are computed one by one."""
    results = []
    for offset, token in enumerate(tokens):
        batch = Batch.of([SequenceChunk(slot, start + offset, token.view(1))], DEVICE)
        hidden, streams = model.run(batch, state, NoTap())
        results.append((model.logits(hidden), streams))
    logits, streams = zip(*results)
    return torch.cat(logits), torch.cat(streams)


@pytest.mark.parametrize(("drafts", "order"), [(1, "forward"), (3, "backward")])
@torch.inference_mode()
def test_rows_of_one_sequence_in_a_step_equal_tokens_one_by_one(model, drafts, order, monkeypatch):
    """Sequences with and without draft tokens share the step; after it, one continues from a rejected draft.

    A GPU runs the programs of a launch in any order; the interpreter runs them forward, or backward here."""
    if order == "backward" and DEVICE.type == "cpu":
        from triton.runtime.interpreter import interpreter_builder

        forward = interpreter_builder.set_grid_idx

        def backward(*index):
            forward(*(size - 1 - i for size, i in zip(interpreter_builder.grid_dim, index)))

        monkeypatch.setattr(interpreter_builder, "set_grid_idx", backward)
    rows = len(STARTS)
    counts = [1 + drafts if slot % 3 < 2 else 1 for slot in range(rows)]
    tokens = [random_tokens(SMALL, max(STARTS) + 2 * (drafts + 1), seed).to(DEVICE) for seed in range(rows)]
    options = {"device": DEVICE, "lookback": drafts, "mtp": True}
    states = [State.contiguous(SMALL, rows, 384, **options) for _ in range(2)]
    for state in states:
        for slot, start in enumerate(STARTS):
            model.run(Batch.of([SequenceChunk(slot, 0, tokens[slot][:start])], DEVICE), state, NoTap())
    decoder = Decoder(model, states[1], fast=False)
    starts = list(STARTS)
    for _ in range(scaled(2, 1)):
        plan = [(slot, starts[slot] + offset) for slot in range(rows) for offset in range(counts[slot])]
        buffers = decoder.buffers(len(plan), 384)
        buffers.poison()
        buffers.token_ids.copy_(torch.stack([tokens[slot][at] for slot, at in plan]))
        buffers.positions.copy_(torch.tensor([at for _, at in plan]))
        buffers.slots.copy_(torch.tensor([slot for slot, _ in plan]))
        decoder.step(buffers)
        for slot in range(rows):
            own = [row for row, (of, _) in enumerate(plan) if of == slot]
            wanted = tokens[slot][starts[slot] : starts[slot] + counts[slot]]
            logits, streams = sequential(model, states[0], slot, starts[slot], wanted)
            assert (buffers.logits[own] - logits).abs().max() < 1e-4, (slot, starts[slot])
            assert (buffers.streams[own] - streams).abs().max() < 1e-4, (slot, starts[slot])
        # one token was accepted: the rows after it are computed again, from other tokens
        for slot in range(rows):
            starts[slot] += 1
            tokens[slot] = tokens[slot].roll(-1) if slot % 2 else tokens[slot]


@torch.inference_mode()
def test_the_mtp_block_equals_that_of_the_plain_model(model):
    """Rows of several positions of a sequence, then a second draft that continues from the first one's streams."""
    generator = torch.Generator().manual_seed(1)
    options = {"device": DEVICE, "lookback": 2, "mtp": True}
    states = [State.contiguous(SMALL, 2, 384, **options) for _ in range(2)]
    prompt = random_tokens(SMALL, 30, 5)
    for state in states:
        _, streams = model.run(Batch.of([SequenceChunk(0, 0, prompt[:-1])], DEVICE), state, NoTap())
        model.mtp_prefill(streams, Batch.of([SequenceChunk(0, 0, prompt[1:])], DEVICE), state)
    plan = [(0, 29), (0, 30), (0, 31), (1, 0)]
    tokens = random_tokens(SMALL, 4, 6)
    streams = torch.randn(4, 4, SMALL.hidden_size, generator=generator).to(DEVICE)
    decoder = Decoder(model, states[1], fast=False)
    buffers = decoder.draft_buffers(4)
    buffers.poison()
    buffers.streams.copy_(streams)
    for ahead in range(2):
        pieces = [SequenceChunk(slot, at + ahead, tokens[row].view(1)) for row, (slot, at) in enumerate(plan)]
        batch = Batch.of(pieces, DEVICE)
        assert list(batch.chunks) == pieces
        hidden, streams = model.draft(streams, batch, states[0])
        true = model.logits(hidden)
        buffers.token_ids.copy_(tokens)
        buffers.positions.copy_(torch.tensor([at + ahead for _, at in plan]))
        buffers.slots.copy_(torch.tensor([slot for slot, _ in plan]))
        assert (decoder.draft(buffers) - true).abs().max() < 1e-4
        assert (buffers.streams - streams).abs().max() < 1e-4
        if not ahead:  # the last row of each sequence drafts on
            plan, tokens, streams = plan[2:], true.argmax(-1)[2:].cpu(), streams[2:]
            kept = buffers.streams[2:].clone()
            buffers = decoder.draft_buffers(2)
            buffers.streams.copy_(kept)
    actual, true = (state.mtp.keys.rows for state in reversed(states))
    assert (actual - true).abs().max() < 1e-5
