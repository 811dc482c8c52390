"""A program of a user, as mypy reads it (`make check`) and as it runs (`test_public_types.py`)."""

from __future__ import annotations

from typing import assert_type

import torch

import birkhoff

TEXT, OTHER = "Tom had a red ball. Tom lost his", "Tom had a red hat. Tom lost his"
TOKENS = (" ball", " hat")


def analyse_one(engine: birkhoff.Engine) -> list[object]:
    """One text: a result each."""
    output = assert_type(engine.generate(TEXT, max_tokens=2), birkhoff.Output)
    logits = assert_type(engine.logits(TEXT), torch.Tensor)
    trace = assert_type(engine.trace(TEXT, "mlp_out"), birkhoff.Trace)
    lens = assert_type(engine.lens(TEXT), birkhoff.Lens)
    readout = assert_type(engine.attention(TEXT), list[birkhoff.AttentionReadout])[0]
    pattern = assert_type(engine.attention_patterns(TEXT, 2), dict[int, birkhoff.AttentionPattern])[2]
    sweep = assert_type(
        engine.patch_sweep(TEXT, OTHER, TOKENS, "mlp_out", layers=2, positions=5), birkhoff.PatchSweep
    )
    by_run = assert_type(
        engine.patch_sweep(trace, OTHER, TOKENS, "mlp_out", layers=2, positions=5), birkhoff.PatchSweep
    )
    scores = assert_type(engine.attribute(TEXT, TOKENS, layers=2), birkhoff.Attribution)
    terms = assert_type(engine.logit_attribution(TEXT, TOKENS), birkhoff.LogitAttribution)
    patched = assert_type(engine.patch(OTHER, TEXT, "mlp_out", 2), birkhoff.Trace)
    chat = assert_type(engine.chat([{"role": "user", "content": "Hi"}], max_tokens=1), birkhoff.Output)
    return [output, logits, trace, lens, readout, pattern, sweep, by_run, scores, terms, patched, chat]


ONE = [
    birkhoff.Output,
    torch.Tensor,
    birkhoff.Trace,
    birkhoff.Lens,
    birkhoff.AttentionReadout,
    birkhoff.AttentionPattern,
    birkhoff.PatchSweep,
    birkhoff.PatchSweep,
    birkhoff.Attribution,
    birkhoff.LogitAttribution,
    birkhoff.Trace,
    birkhoff.Output,
]


def analyse_two(engine: birkhoff.Engine) -> list[object]:
    """Two texts: lists and batches."""
    texts = [TEXT, TEXT]
    outputs = assert_type(engine.generate(texts, max_tokens=2), list[birkhoff.Output])
    logits = assert_type(engine.logits(texts), list[torch.Tensor])
    traces = assert_type(engine.trace(texts, "mlp_out"), birkhoff.TraceBatch)
    lenses = assert_type(engine.lens(texts), list[birkhoff.Lens])
    readouts = assert_type(engine.attention(texts), list[list[birkhoff.AttentionReadout]])[0]
    patterns = assert_type(engine.attention_patterns(texts, 2), list[dict[int, birkhoff.AttentionPattern]])
    sweeps = assert_type(
        engine.patch_sweep(texts, [OTHER, OTHER], TOKENS, "mlp_out", layers=2, positions=None),
        birkhoff.PatchSweepBatch,
    )
    scores = assert_type(engine.attribute(texts, TOKENS, layers=2), birkhoff.AttributionBatch)
    answers = engine.generate(TEXT, n=2, max_tokens=1)
    assert not isinstance(answers, birkhoff.Output)
    assert_type(answers, list[birkhoff.Output])
    first = [outputs[0], logits[0], lenses[0], readouts[0], patterns[0][2], answers[0]]
    return [*first, traces, sweeps, scores]


TWO = [
    birkhoff.Output,
    torch.Tensor,
    birkhoff.Lens,
    birkhoff.AttentionReadout,
    birkhoff.AttentionPattern,
    birkhoff.Output,
    birkhoff.TraceBatch,
    birkhoff.PatchSweepBatch,
    birkhoff.AttributionBatch,
]
