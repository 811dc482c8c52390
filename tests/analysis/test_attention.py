"""Attention readouts: weights over window, entries and sink of one token, and masses of all tokens."""

import pytest
import torch

import birkhoff
from birkhoff import AttentionEdit
from birkhoff.analysis.attention import attention_masses
from birkhoff.convert.synth import synth
from birkhoff.hooks.sites import ATTN_WEIGHTS
from birkhoff.hooks.tap import NoTap, ReadingTap

IDS = [0, *(5 + index * 37 % 500 for index in range(299))]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    synth(path, like="tiny")
    with birkhoff.load(path, kernels="reference") as engine:
        yield engine


@pytest.mark.parametrize("position", [0, 3, 131, 299])
def test_weights_times_keys_is_the_output_of_the_heads(engine, position):
    """In sliding layers the keys are those of single tokens, which the model computes from its input."""
    model, found = engine.model, {}
    trace = engine.trace(IDS, ["pre_attn", "attn_head_out"])

    def read(layer, rows):
        found[layer] = rows([position])[0]

    with torch.no_grad():
        model(torch.tensor(IDS), ReadingTap(NoTap(), ATTN_WEIGHTS, read))
        phases = model.rope.step(torch.arange(len(IDS))).sliding
        for layer in (0, 1):
            block = model.layers[layer]
            keys = block.attn.project(block.attn_norm(trace["pre_attn", layer]), phases)[1]
            rows = found[layer][:-1]
            mixed = rows[:, 2:].T @ keys[rows[:, 0].long()]
            turn = phases.view(lambda part: part[position])
            out = block.attn.kernels.rotate(mixed, turn, inverse=True)
            assert (out - trace["attn_head_out", layer][position]).abs().max() < 1e-5


def test_readouts_sum_to_one_and_cover_visible_tokens(engine):
    config = engine.config
    for readout, ratio in zip(engine.attention(IDS), config.compress_ratios, strict=True):
        assert readout.ratio == ratio
        assert float(readout.window.sum() + readout.entries.sum()) + readout.sink == pytest.approx(
            1, abs=1e-5
        )
        assert readout.first == 299 - config.sliding_window + 1
        assert len(readout.window) == config.sliding_window
        assert len(readout.entries) == (300 // ratio if ratio else 0)
        if ratio == 4:
            assert int(readout.chosen.sum()) == config.index_topk
        assert float(readout.entries[~readout.chosen].sum()) == 0


def test_masses_of_all_tokens_are_those_of_each(engine):
    every = attention_masses(engine, IDS)
    for position in (0, 5, 127, 128, 255, 299):
        for layer, one in enumerate(engine.attention(IDS, position)):
            expected = torch.tensor([float(one.window.sum()), float(one.entries.sum()), one.sink])
            assert (every[layer, position] - expected).abs().max() < 1e-5


def test_several_texts_in_one_pass_with_edits_of_their_own_are_as_each_alone(engine):
    texts = [IDS[:140], IDS[3:9], IDS[5:145], IDS[7:60]]
    steer = [None, [AttentionEdit("all", sink=0.0)], [AttentionEdit("all", mask=[136, 137])], None]
    together = engine.attention(texts, steer=steer)
    logits = engine.logits(texts, steer=steer)
    for text, edits, readouts, own in zip(texts, steer, together, logits):
        assert (engine.logits(text, steer=edits) - own).abs().max() < 1e-4
        for alone, readout in zip(engine.attention(text, steer=edits), readouts, strict=True):
            assert torch.equal(alone.chosen, readout.chosen) and abs(alone.sink - readout.sink) < 1e-5
            assert (alone.entries - readout.entries).abs().sum() < 1e-4
            assert (alone.window - readout.window).abs().max() < 1e-5
    assert all(readout.sink == 0 for readout in together[1])
    assert all(readout.sink > 0 for readout in together[0])
    assert all(float(readout.window[-4]) == 0 for readout in together[2])  # position 136 of 140


def test_patterns_have_every_head_and_token(engine):
    """Weights of a pattern are those of the readouts of single tokens before their mean over heads."""
    config = engine.config
    patterns = engine.attention_patterns(IDS)
    assert list(patterns) == list(range(config.num_hidden_layers))
    readouts = {position: engine.attention(IDS, position) for position in (0, 3, 131, 299)}
    for layer, pattern in patterns.items():
        ratio, heads = config.compress_ratios[layer], config.num_attention_heads
        assert pattern.window.shape == (heads, 300, 300) and pattern.sink.shape == (heads, 300)
        assert pattern.entries.shape == (heads, 300, 300 // ratio if ratio else 0) and pattern.ratio == ratio
        total = pattern.window.sum(-1) + pattern.entries.sum(-1) + pattern.sink
        assert (total - 1).abs().max() < 1e-5
        assert (pattern.by_token().sum(-1) + pattern.sink - 1).abs().max() < 1e-5
        assert not pattern.window.triu(1).any() and pattern.by_token()[:, :, 299].any()
        for position, read in readouts.items():
            own, end = read[layer], read[layer].first + len(read[layer].window)
            mean = pattern.window[:, position].mean(0)
            assert torch.allclose(mean[own.first : end], own.window, atol=1e-6)
            assert float(mean.sum()) == pytest.approx(float(own.window.sum()), abs=1e-5)
            seen = pattern.entries[:, position, : len(own.entries)].mean(0)
            assert torch.allclose(seen, own.entries, atol=1e-6)
            assert not pattern.entries[:, position, len(own.entries) :].any()
            assert float(pattern.sink[:, position].mean()) == pytest.approx(own.sink, abs=1e-6)


def test_patterns_of_several_texts_some_layers_and_edits(engine):
    steer = [AttentionEdit([1], mask=[2], heads=[0])]
    first, second = engine.attention_patterns([IDS[:9], IDS[:5]], layers=[1, -1], steer=steer)
    assert list(first) == list(second) == [1, engine.config.num_hidden_layers - 1]
    assert first[1].window.shape[1:] == (9, 9) and second[1].window.shape[1:] == (5, 5)
    assert not first[1].window[0, :, 2].any() and first[1].window[1, 2:, 2].all()
    assert "9 tokens" in repr(first[1])
