"""Any division of a prompt into steps gives the same logits: chunks, single tokens, other sequences in the batch."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.hooks.tap import NoTap
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.state import State
from tests.models import TINY, random_model, random_tokens, variant
from tests.sizes import scaled

LENGTH = 300
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def tiny():
    return random_model()


@pytest.fixture(scope="module")
def whole(tiny):
    with torch.no_grad():
        return tiny(random_tokens(TINY, LENGTH))


def run_pieces(model, state, pieces):
    """Logits of every chunk of one step, by slot."""
    batch = Batch.of(pieces)
    with torch.no_grad():
        hidden, _ = model.run(batch, state, NoTap())
        logits = model.logits(hidden)
    return {p.slot: logits[o : o + len(p.token_ids)] for p, o in zip(batch.chunks, batch.offsets)}


def run_cuts(model, tokens, cuts, state=None, slot=0):
    state = state or State.contiguous(model.config, slot + 1, len(tokens))
    bounds = [0, *sorted(set(cuts)), len(tokens)]
    out = [
        run_pieces(model, state, [SequenceChunk(slot, a, tokens[a:b])])[slot]
        for a, b in itertools.pairwise(bounds)
        if b > a
    ]
    return torch.cat(out)


@settings(max_examples=scaled(200, 25), deadline=None)
@given(cuts=st.lists(st.integers(1, LENGTH - 1), max_size=12))
def test_any_chunking_equals_whole_prefill(tiny, whole, cuts):
    assert (run_cuts(tiny, random_tokens(TINY, LENGTH), cuts) - whole).abs().max() < TOLERANCE


@settings(max_examples=scaled(30, 4), deadline=None)
@given(start=st.integers(0, LENGTH - 40), steps=st.integers(5, 40))
def test_decoding_token_by_token_from_any_position_equals_whole_prefill(tiny, whole, start, steps):
    cuts = range(start, start + steps)
    assert (
        run_cuts(tiny, random_tokens(TINY, LENGTH), [c for c in cuts if c]) - whole
    ).abs().max() < TOLERANCE


def test_decoding_every_token_equals_whole_prefill(tiny, whole):
    assert (run_cuts(tiny, random_tokens(TINY, LENGTH), range(1, LENGTH)) - whole).abs().max() < TOLERANCE


@settings(max_examples=scaled(60, 8), deadline=None)
@given(data=st.data())
def test_mixed_batches_at_different_positions_equal_single_runs(tiny, data):
    """Four sequences advance by random amounts in common steps, some decoding while others prefill."""
    lengths = data.draw(st.lists(st.integers(3, 160), min_size=4, max_size=4), label="lengths")
    tokens = [random_tokens(TINY, n, seed) for seed, n in enumerate(lengths)]
    with torch.no_grad():
        expected = [tiny(t) for t in tokens]
    state = State.contiguous(TINY, 4, max(lengths))
    at, got = [0] * 4, [[] for _ in range(4)]
    while any(a < n for a, n in zip(at, lengths)):
        pieces = []
        for slot in range(4):
            room = lengths[slot] - at[slot]
            take = min(
                room,
                data.draw(st.sampled_from([0, 1, 1, 1, 3, 4, 17, 64]), label="take") or (0 if pieces else 1),
            )
            if take:
                pieces.append(SequenceChunk(slot, at[slot], tokens[slot][at[slot] : at[slot] + take]))
                at[slot] += take
        for slot, logits in run_pieces(tiny, state, pieces).items() if pieces else ():
            got[slot].append(logits)
    for rows, expected_rows in zip(got, expected):
        assert (torch.cat(rows) - expected_rows).abs().max() < TOLERANCE


def test_a_slot_needs_no_clearing_between_sequences(tiny):
    """A short prompt after a long one in the same slot sees none of its rows."""
    state = State.contiguous(TINY, 1, LENGTH)
    run_cuts(tiny, random_tokens(TINY, LENGTH, 7), [130], state)
    for count in (1, 2, 3, 5, 9, 130):
        tokens = random_tokens(TINY, count, count)
        with torch.no_grad():
            expected = tiny(tokens)
        assert (run_cuts(tiny, tokens, range(1, count), state) - expected).abs().max() < TOLERANCE


def test_pages_can_be_anywhere_in_the_pool(tiny, whole):
    state = State(TINY, 2, 9)
    state.give_pages(1, [7, 2, 5])
    assert (
        run_cuts(tiny, random_tokens(TINY, LENGTH), [100, 101, 256], state, slot=1) - whole
    ).abs().max() < TOLERANCE


@pytest.mark.parametrize("back", [1, 3, 7])
def test_stepping_back_within_the_lookback_gives_equal_logits(tiny, whole, back):
    """Wrong tokens are run and then overwritten by the right ones, as after a rejected draft."""
    tokens, state = random_tokens(TINY, LENGTH), State.contiguous(TINY, 1, LENGTH, lookback=8)
    rows = [run_pieces(tiny, state, [SequenceChunk(0, 0, tokens[:125])])[0]]
    at = 125
    while at < LENGTH:
        wrong = random_tokens(TINY, back, at)
        run_pieces(tiny, state, [SequenceChunk(0, at, wrong[: LENGTH - at])])
        step = tokens[at : at + back + 1]
        rows.append(run_pieces(tiny, state, [SequenceChunk(0, at, step)])[0])
        at += len(step)
    assert (torch.cat(rows) - whole).abs().max() < TOLERANCE


def test_a_window_larger_than_the_chunk_and_smaller_than_it():
    for window in (1, 3, 200):
        config = variant(sliding_window=window)
        model, tokens = random_model(config, 3), random_tokens(config, 150)
        with torch.no_grad():
            expected = model(tokens)
        assert (run_cuts(model, tokens, [1, 50, 51, 120]) - expected).abs().max() < TOLERANCE
