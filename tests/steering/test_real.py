"""Steering of trained weights, for checks that a random model would pass too easily."""

from __future__ import annotations

import pytest
import torch

import birkhoff
from birkhoff import Add

TEXT = "Once upon a time there was a little"
GREEDY = {"max_tokens": 12, "temperature": 0}


def check(engine):
    m, d = engine.config.hc_mult, engine.config.hidden_size
    layer = engine.config.num_hidden_layers // 2
    rows = engine.trace(engine.prompt_ids(TEXT), hooks=["mhc_streams_pre_attn", "mhc_streams_pre_mlp"])
    generator = torch.Generator().manual_seed(0)
    plain = engine.generate(TEXT, **GREEDY)
    for hook, streams, width in (("mhc_streams_pre_attn", None, m * d), ("mhc_streams_pre_mlp", [1], d)):
        activations = rows[hook, layer].float()
        norm = (
            activations.flatten(1).norm(dim=-1).mean()
            if streams is None
            else activations[:, 1].norm(dim=-1).mean()
        )
        direction = torch.randn(width, generator=generator)
        edit = Add(direction / direction.norm() * float(norm) * 2, hook, [layer], streams=streams)
        steered = engine.generate(TEXT, steer=[edit], **GREEDY)
        assert steered.token_ids != plain.token_ids
        assert steered.interp["rows_steered"] == len(plain.prompt_token_ids) + len(steered.token_ids) - 1
        zero = engine.generate(
            TEXT, steer=[Add(torch.zeros(width), hook, [layer], streams=streams)], **GREEDY
        )
        assert zero.token_ids == plain.token_ids
    assert {slab.width for slab in engine._steering.tables.slabs.values()} == {m * d}


def test_t_ste_10_stream_vectors_change_the_output_of_a_trained_model():
    """All-stream vectors before attention and one-stream vectors before the experts, of twice the norm of the rows."""
    with birkhoff.load("nano", max_requests=1) as engine:
        check(engine)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_t_ste_10_on_a_device():
    with birkhoff.load("nano", device="cuda", max_requests=1) as engine:
        check(engine)
