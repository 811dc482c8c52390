"""Attention readouts: the recomputed weights times the keys give the sublayer's output."""

import pytest
import torch

from birkhoff.analysis.attention import attention_weights, layer_masses, layer_readout
from birkhoff.hooks.tap import EagerTap
from tests.models import TINY, random_model


@pytest.fixture(scope="module")
def text():
    """A model, 300 tokens, and the input and output of every attention sublayer."""
    model = random_model()
    ids = torch.randint(0, TINY.vocab_size, (300,), generator=torch.Generator().manual_seed(3))
    kept = {}
    with torch.no_grad():
        model(ids, EagerTap(seen=lambda site, layer, x: kept.__setitem__((site.name, layer), x)))
    return model, ids, kept


@pytest.mark.parametrize("layer", range(TINY.num_hidden_layers))
@pytest.mark.parametrize("position", [0, 3, 131, 299])
def test_weights_times_keys_is_the_output_of_the_sublayer(text, layer, position):
    model, ids, kept = text
    block = model.layers[layer]
    with torch.no_grad():
        weights = attention_weights(block, kept["pre_attn", layer], ids, model.rope, position)
        mixed = (weights.share[:, :-1] @ weights.keys).unsqueeze(0)
        phases = model.rope.step(torch.tensor([position]))
        turn = phases.compressed if block.attn.ratio else phases.sliding
        out = block.attn._project_out(block.attn.kernels.rotate(mixed, turn, inverse=True))[0]
    wrote = kept["post_attn", layer][position]
    assert (out - wrote).abs().max() < 1e-5 * max(1.0, float(wrote.abs().max()))


def test_readouts_sum_to_one_and_cover_visible_tokens(text):
    model, ids, kept = text
    for layer, ratio in enumerate(TINY.compress_ratios[: TINY.num_hidden_layers]):
        with torch.no_grad():
            readout = layer_readout(model.layers[layer], kept["pre_attn", layer], ids, model.rope, 299)
        assert readout.ratio == ratio
        assert float(readout.window.sum() + readout.entries.sum()) + readout.sink == pytest.approx(
            1, abs=1e-5
        )
        assert readout.first == 299 - TINY.sliding_window + 1
        assert len(readout.window) == TINY.sliding_window
        assert len(readout.entries) == (300 // ratio if ratio else 0)
        if ratio == 4:
            assert int(readout.chosen.sum()) == TINY.index_topk
        assert float(readout.entries[~readout.chosen].sum()) == 0


@pytest.mark.parametrize("layer", range(TINY.num_hidden_layers))
def test_masses_of_all_tokens_are_those_of_each(text, layer):
    model, ids, kept = text
    with torch.no_grad():
        every = layer_masses(model.layers[layer], kept["pre_attn", layer], ids, model.rope)
        for position in (0, 5, 127, 128, 255, 299):
            one = layer_readout(model.layers[layer], kept["pre_attn", layer], ids, model.rope, position)
            expected = torch.tensor([float(one.window.sum()), float(one.entries.sum()), one.sink])
            assert (every[position] - expected).abs().max() < 1e-5
