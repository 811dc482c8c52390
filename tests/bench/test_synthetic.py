"""Random models created in memory: value ranges, weight formats, and experts shared between layers."""

from __future__ import annotations

import torch

from birkhoff.bench.synthetic import filled_state, random_on_device
from birkhoff.convert.presets import preset
from birkhoff.hooks.tap import NoTap
from birkhoff.model.batch import Batch, SequenceChunk

CPU = torch.device("cpu")


@torch.inference_mode()
def test_a_random_model_runs_with_reasonable_values():
    config = preset("tiny", None, False)
    model = random_on_device(config, CPU)
    state = filled_state(config, 2, 256, CPU)
    chunks = [SequenceChunk(0, 256, torch.tensor([5])), SequenceChunk(1, 256, torch.tensor([6]))]
    hidden, streams = model.run(Batch.of(chunks), state, NoTap())
    assert hidden.isfinite().all() and 0.5 < hidden.float().std() < 2 and streams.isfinite().all()
    assert not torch.equal(hidden[0], hidden[1])
    logits = model.logits(hidden).float()
    assert 0.5 < logits.std() < 4


def test_layers_beyond_the_distinct_ones_share_experts_and_nothing_else():
    model = random_on_device(preset("tiny", None, False), CPU, distinct=4)
    experts = [block.ffn.experts.gate_up.data_ptr() for block in model.layers]
    assert len(set(experts)) == 4 and experts[4:] == experts[:2]
    assert len({block.attn.wq_b.codes.data_ptr() for block in model.layers}) == 6
    packed = model.layers[0].ffn.experts
    assert packed.gate_up.dtype is torch.int8 and packed.gate_up_scale.dtype is torch.uint8


def test_the_same_seed_makes_the_same_model():
    config = preset("tiny", 1, False)
    first, second, other = (random_on_device(config, CPU, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.head.weight, second.head.weight) and not torch.equal(
        first.head.weight, other.head.weight
    )
