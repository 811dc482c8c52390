"""The MTP block against float64 (spec 9): on a whole prompt, step by step, and drafting from its own streams."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from birkhoff.hooks import sites
from birkhoff.hooks.tap import EagerTap, NoTap
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.state import Fresh, State
from birkhoff.model.transformer import Transformer
from tests.model.float64 import Float64
from tests.model.recorded import array
from tests.models import TINY, random_model, random_tokens, weights_of

LENGTH = 60  # several windows of 8
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def tiny():
    return random_model(seed=9)


@pytest.fixture(scope="module")
def tokens():
    return random_tokens(TINY, LENGTH + 1, 9)


def reference(model):
    return Float64(
        model.config.to_dict(), {name: array(tensor) for name, tensor in weights_of(model).items()}
    )


@pytest.fixture(scope="module")
def trunk(tiny, tokens):
    """Streams of the trunk at every position but the last."""
    with torch.no_grad():
        return tiny.run(Batch.whole(tokens[:-1]), Fresh(), NoTap())[1]


@pytest.fixture(scope="module")
def true(tiny, tokens):
    """float64 trunk and block: logits and streams of the block at every position."""
    model, logits, streams = reference(tiny), [], []
    for t in range(LENGTH):
        model.step(int(tokens[t]))
        row, after = model.draft(model.streams, int(tokens[t + 1]), t)
        logits.append(row)
        streams.append(after)
    return np.stack(logits), np.stack(streams)


def test_a_whole_prompt_at_once(tiny, tokens, trunk, true):
    with torch.no_grad():
        hidden, streams = tiny.draft(trunk, Batch.whole(tokens[1:]), Fresh())
        logits = tiny.logits(hidden)
    assert hidden.shape == (LENGTH, TINY.hidden_size) and streams.shape == (
        LENGTH,
        TINY.hc_mult,
        TINY.hidden_size,
    )
    print(f"MTP logits: max abs error {np.abs(array(logits) - true[0]).max():.1e}")
    assert np.abs(array(logits) - true[0]).max() <= TOLERANCE
    assert np.abs(array(streams) - true[1]).max() <= TOLERANCE


@pytest.mark.parametrize(
    "sizes", [[1] * LENGTH, [13, 1, 1, 30, 1, 14], [59, 1]], ids=["single", "mixed", "late"]
)
def test_step_by_step_with_its_own_window(tiny, tokens, trunk, true, sizes):
    """The block has its own ring of keys and does not change the rings of the trunk."""
    state, at, rows = State.contiguous(TINY, 1, LENGTH, mtp=True), 0, []
    for size in sizes:
        batch = Batch.of([SequenceChunk(0, at, tokens[at + 1 : at + 1 + size])])
        with torch.no_grad():
            hidden, _ = tiny.draft(trunk[at : at + size], batch, state)
            rows.append(tiny.logits(hidden))
        at += size
    assert np.abs(array(torch.cat(rows)) - true[0]).max() <= TOLERANCE
    assert all(not layer.keys.rows.any() for layer in state.layers)


def test_two_sequences_in_one_step(tiny, tokens, trunk, true):
    state = State.contiguous(TINY, 2, LENGTH, mtp=True)
    other = tokens.flip(0)
    with torch.no_grad():
        elsewhere = tiny.run(Batch.whole(other[:-1]), Fresh(), NoTap())[1]
        for t in range(LENGTH):
            batch = Batch.of(
                [SequenceChunk(0, t, tokens[t + 1 : t + 2]), SequenceChunk(1, t, other[t + 1 : t + 2])]
            )
            hidden, _ = tiny.draft(torch.stack((trunk[t], elsewhere[t])), batch, state)
            assert np.abs(array(tiny.logits(hidden))[0] - true[0][t]).max() <= TOLERANCE


def test_repeated_drafting_uses_the_streams_of_the_block(tiny, tokens, trunk):
    """Step 3 of the drafting loop: output streams and the drafted token are the next input, at the next position."""
    start, ahead = 40, 4
    state, model = State.contiguous(TINY, 1, LENGTH + ahead, mtp=True), reference(tiny)
    with torch.no_grad():
        hidden, streams = tiny.draft(
            trunk[:start], Batch.of([SequenceChunk(0, 0, tokens[1 : start + 1])]), state
        )
    for t in range(start):
        row, after = model.draft(array(trunk[t]), int(tokens[t + 1]), t)
    hidden, streams = hidden[-1:], streams[-1:]
    for k in range(ahead):
        drafted = int(tiny.logits(hidden).argmax())
        assert drafted == row.argmax()
        with torch.no_grad():
            hidden, streams = tiny.draft(streams, Batch.of([SequenceChunk(0, start + k, [drafted])]), state)
        row, after = model.draft(after, drafted, start + k)
        assert hidden.shape == (1, TINY.hidden_size) and streams.shape == (1, TINY.hc_mult, TINY.hidden_size)
        assert np.abs(array(tiny.logits(hidden))[0] - row).max() <= TOLERANCE
        assert np.abs(array(streams)[0] - after).max() <= TOLERANCE


def test_released_numerics_round_the_inputs_of_the_projections(tokens):
    """A single token attends to itself, so the block is a chain that float64 with rounding can follow."""
    model = random_model(seed=9, released=True)
    with torch.no_grad():
        trunk = model.run(Batch.whole(tokens[:-1]), Fresh(), NoTap())[1]
        hidden, _ = model.draft(trunk[:1], Batch.of([SequenceChunk(0, 0, tokens[1:2])]), Fresh())
        logits = array(model.logits(hidden))[0]
    weights = {name: array(tensor) for name, tensor in weights_of(model).items()}
    rounded = Float64(TINY.to_dict(), weights, released=True).draft(array(trunk[0]), int(tokens[1]), 0)[0]
    plain = Float64(TINY.to_dict(), weights).draft(array(trunk[0]), int(tokens[1]), 0)[0]
    assert np.abs(logits - rounded).max() <= TOLERANCE < 0.05 < np.abs(logits - plain).max()


def test_an_edit_of_the_final_streams_changes_the_draft(tiny, tokens):
    """A steered model and its drafts agree (H10)."""
    tap = EagerTap(edit=lambda site, layer, x: x + 0.3 if site is sites.MHC_STREAMS_FINAL else None)
    with torch.no_grad():
        edited = tiny.run(Batch.whole(tokens[:-1]), Fresh(), tap)[1]
        plain = tiny.run(Batch.whole(tokens[:-1]), Fresh(), NoTap())[1]
        assert torch.equal(edited, plain + 0.3)


def test_a_model_can_be_built_without_the_mtp_block(tokens):
    model = Transformer(TINY, mtp=False)
    assert model.mtp is None and not any(d.name.startswith("mtp.") for d in model.destinations())
    with pytest.raises(AssertionError, match="without its MTP block"):
        model.draft(torch.zeros(1, 4, 64), Batch.whole(tokens[:1]), Fresh())
