"""Attention of single tokens: any chunking and any batch give the rows of one whole pass, and edits the same logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.hooks.attention_change import AttentionChange, Blocks, ranges_of
from birkhoff.hooks.batch_tap import StepStaging, arm
from birkhoff.hooks.plan import Plan, Span
from birkhoff.hooks.tap import NoTap
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.state import Fresh, State
from tests.hooks.test_graph_tap import CaptureJob
from tests.hooks.test_vector_table import Everywhere
from tests.models import random_model, random_tokens, variant
from tests.sizes import scaled

CONFIG = variant(compress_ratios=(0, 4, 128), num_nextn_predict_layers=0)
LENGTH = 137
KEYS = [
    *(("attn_weights", layer) for layer in range(3)),
    ("index_scores", 1),
    ("index_blocks", 1),
    ("entry_tokens", 1),
    ("entry_tokens", 2),
]


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG, seed=8)


@pytest.fixture(scope="module")
def compiled():
    return random_model(CONFIG, seed=8, kernels="cpu")


def plan_of(changes) -> tuple[Plan, CaptureJob]:
    job = CaptureJob(KEYS, after=True)
    edits = (Everywhere({("attn_weights", layer): change for layer, change in changes.items()}),)
    return Plan(jobs=(job,), edits=edits if changes else ()), job


def run_whole(model, tokens, changes):
    """Logits and rows of one pass over the whole text."""
    plan, job = plan_of(changes)
    tap = arm(StepStaging(), [Span(plan, 0, 0, tokens.tolist(), LENGTH)], LENGTH)
    with torch.no_grad():
        hidden, _ = model.run(Batch.whole(tokens), Fresh(), tap)
    tap.deliver()
    return model.logits(hidden), {key: torch.cat(parts) for key, parts in job.got.items()}


def run_chunks(model, tokens, changes, stops, other):
    """The same in chunks that end at `stops`, beside another text without captures."""
    plan, job = plan_of(changes)
    state = State.contiguous(CONFIG, 2, 256)
    staging, start, logits = StepStaging(), 0, []
    with torch.no_grad():
        for stop in [*stops, LENGTH]:
            pieces = [
                SequenceChunk(1, start, other[start:stop].tolist()),
                SequenceChunk(0, start, tokens[start:stop].tolist()),
            ]
            batch = Batch.of(pieces)
            row = batch.offsets[batch.chunks.index(pieces[1])]
            span = Span(plan, row, start, tokens[start:stop].tolist(), LENGTH)
            tap = arm(staging, [span], batch.num_tokens)
            hidden, _ = model.run(batch, state, tap)
            tap.deliver()
            logits.append(model.logits(hidden)[row : row + stop - start])
            start = stop
    return torch.cat(logits), {key: torch.cat(parts) for key, parts in job.got.items()}


@st.composite
def changes(draw):
    """A change for each of some layers, of any kind."""
    positions = st.lists(st.integers(0, LENGTH - 1), unique=True, max_size=6).map(sorted)
    numbers = st.lists(st.integers(0, LENGTH // 4), unique=True, max_size=4).map(tuple)
    result = {}
    for layer in draw(st.lists(st.integers(0, 2), unique=True, max_size=3)):
        result[layer] = AttentionChange(
            heads=draw(st.sampled_from([None, (0,), (1, 3)])),
            mask=ranges_of(draw(positions)),
            mask_entries=draw(st.sampled_from(["any", "all", "none"])),
            force=Blocks(draw(numbers)) if layer == 1 else Blocks(),
            forbid=Blocks(draw(numbers)) if layer == 1 else Blocks(),
            sink=draw(st.sampled_from([None, 0.0, 0.5, 3.0])),
            ablate=Blocks(tokens=ranges_of(draw(positions))) if layer else Blocks(),
            ablation=draw(st.sampled_from(["remove", "zero"])),
        )
    return result


@settings(max_examples=scaled(60, 8))
@given(
    change=changes(),
    stops=st.lists(st.integers(1, LENGTH - 1), unique=True, max_size=5).map(sorted),
    decoded=st.integers(0, 6),
    fast=st.booleans(),
)
def test_any_chunking_beside_another_text_equals_one_whole_pass(
    model, compiled, change, stops, decoded, fast
):
    """The last tokens come one by one, as in decoding."""
    stops = sorted({stop for stop in stops if stop < LENGTH - decoded} | set(range(LENGTH - decoded, LENGTH)))
    tokens, other = random_tokens(CONFIG, LENGTH, 3), random_tokens(CONFIG, LENGTH, 4)
    logits, rows = run_whole(model, tokens, change)
    parts, part_rows = run_chunks(compiled if fast else model, tokens, change, stops, other)
    assert (logits - parts).abs().max() < 1e-4
    assert rows.keys() == part_rows.keys()
    for key, expected in rows.items():
        assert part_rows[key].shape == expected.shape, key
        assert (part_rows[key] - expected).abs().max() < 1e-4, key


def test_changes_without_effect_change_nothing_and_rows_without_changes_keep_their_bits(model):
    tokens = random_tokens(CONFIG, LENGTH, 5)
    plain, rows = run_whole(model, tokens, {})
    nothing, same = run_whole(model, tokens, dict.fromkeys(range(3), AttentionChange(sink=1.0)))
    assert (plain - nothing).abs().max() < 1e-4
    assert all((rows[key] - same[key]).abs().max() < 1e-5 for key in rows)
    edit = Everywhere({("attn_weights", 1): AttentionChange(sink=0.0)}, only=[70])
    tap = arm(StepStaging(), [Span(Plan(edits=(edit,)), 0, 0, tokens.tolist(), LENGTH)], LENGTH)
    with torch.no_grad():
        before = model.logits(model.run(Batch.whole(tokens[:70]), Fresh(), NoTap())[0])
        after = model.logits(model.run(Batch.whole(tokens), Fresh(), tap)[0])
    assert (after[:70] - before).abs().max() < 1e-4 and (after[70] - plain[70]).abs().max() > 1e-3
