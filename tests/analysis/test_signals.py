"""Signals equal values computed from a trace, arrive in order, and do not change the output."""

import pytest
import torch

import birkhoff
from birkhoff.errors import OptionError, SiteError

PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def output(engine):
    return engine.generate(PROMPT, max_tokens=6, temperature=0, signals="all")


@pytest.fixture(scope="module")
def traced(engine, output):
    return engine.trace([*PROMPT, *output.token_ids])


def near(result, tensor):
    return torch.tensor(result).sub(tensor.float()).abs().max() <= 1e-4 * max(1.0, float(tensor.abs().max()))


def test_one_frame_for_every_computed_token_in_order(output):
    assert [frame["position"] for frame in output.signals] == list(range(len(PROMPT) + 5))
    assert [frame["token_id"] for frame in output.signals] == [*PROMPT, *output.token_ids[:-1]]


def test_frames_are_the_sites_of_a_trace(engine, output, traced):
    layers = engine.config.num_hidden_layers
    for position in (0, 17, len(PROMPT) - 1, len(PROMPT) + 3):
        frame = output.signals[position]
        for layer in range(layers):
            for part, at in (("attn", 2 * layer), ("ffn", 2 * layer + 1)):
                for kind in ("res", "pre", "post"):
                    assert near(frame[f"{kind}_mix"][at], traced[f"mhc_{part}_{kind}_mix", layer][position])
            assert near(frame["experts"][layer], traced["moe_topk", layer][position])
            norms = traced["mhc_streams_pre_attn", layer][position].norm(dim=-1)
            assert near(frame["stream_norm"][2 * layer], norms)
        assert near(frame["stream_norm"][-1], traced["mhc_streams_final", layers - 1][position].norm(dim=-1))
        assert near(frame["head_mix"], traced["mhc_head_mix", layers - 1][position])


def test_signals_do_not_change_tokens_or_other_signals(engine, output):
    plain = engine.generate(PROMPT, max_tokens=6, temperature=0)
    assert plain.token_ids == output.token_ids
    assert plain.signals is None
    some = engine.generate(PROMPT, max_tokens=6, temperature=0, signals=["pre_mix"])
    assert [set(frame) for frame in some.signals] == [{"position", "token_id", "pre_mix"}] * len(
        output.signals
    )
    assert near(some.signals[-1]["pre_mix"], torch.tensor(output.signals[-1]["pre_mix"]))


def test_cosine_to_a_named_vector(engine, traced):
    d = engine.config.hidden_size
    engine.modules["north"] = torch.randn(d, generator=torch.Generator().manual_seed(0))
    try:
        frames = engine.generate(PROMPT, max_tokens=1, temperature=0, signals=["cosine:north"]).signals
        direction = engine.modules["north"].tensor().reshape(-1)
        for layer in (0, 3):
            rows = traced["mhc_streams_pre_mlp", layer][9]
            assert near(
                frames[9]["cosine:north"][2 * layer + 1],
                torch.cosine_similarity(rows, direction[None], dim=-1),
            )
        with pytest.raises(OptionError, match="no vector named 'south'"):
            engine.generate(PROMPT, max_tokens=1, signals=["cosine:south"])
    finally:
        del engine.modules["north"]


@pytest.mark.parametrize(
    "bad", ["res_mix", 3, ["res_mix", "residual"], [None]], ids=["text", "number", "unknown", "none"]
)
def test_unknown_signals_are_refused(engine, bad):
    with pytest.raises(OptionError, match="signals"):
        engine.generate(PROMPT, max_tokens=1, signals=bad)


def test_a_baseline_is_the_unsteered_answer_from_the_same_seed(engine):
    push = birkhoff.Add(torch.ones(engine.config.hidden_size) * 3, hook="mlp_out", layers=[2])
    both = engine.generate(PROMPT, max_tokens=8, temperature=1.0, seed=4, steer=[push], baseline=True)
    alone = engine.generate(PROMPT, max_tokens=8, temperature=1.0, seed=4)
    assert both.baseline.token_ids == alone.token_ids
    assert both.interp["rows_steered"] > 0
    assert not both.baseline.interp.get("rows_steered")
    unsteered = engine.generate(PROMPT, max_tokens=8, temperature=1.0, baseline=True)
    assert unsteered.token_ids == unsteered.baseline.token_ids  # both use the same drawn seed


def test_attention_of_a_token_sums_to_one(engine):
    result = engine.attention(PROMPT, position=-1)
    assert len(result) == engine.config.num_hidden_layers
    for readout in result:
        assert float(readout.window.sum() + readout.entries.sum()) + readout.sink == pytest.approx(
            1, abs=1e-4
        )
    with pytest.raises(SiteError, match="40 tokens"):
        engine.attention(PROMPT, position=40)


def test_surprise_at_the_last_depth_is_the_models_loss(engine, traced, output):
    ids = [*PROMPT, *output.token_ids]
    lens = engine.lens(ids)
    logprobs = traced.logits.log_softmax(-1)
    expected = -logprobs[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(-1)).squeeze(-1)
    result = lens.surprise(-1, "head")
    assert torch.equal(result[:-1], expected)
    assert torch.isnan(result[-1])
    assert not torch.equal(lens.surprise(0, 1)[:-1], expected)


def test_blocks_are_those_attention_reads(engine):
    """Blocks selected token by token after a prefill equal those of a full pass over the same text."""
    ids = [(7 * i * i + 3 * i) % 500 for i in range(70)]  # 17 blocks, of which 12 are selected
    output = engine.generate(
        ids, max_tokens=30, temperature=0, ignore_eos=True, signals=["blocks", "head_mix"]
    )
    assert output.token_ids == engine.generate(ids, max_tokens=30, temperature=0, ignore_eos=True).token_ids
    text, topk = [*ids, *output.token_ids], engine.config.index_topk
    assert [set(frame) for frame in output.signals] == [{"position", "token_id", "blocks", "head_mix"}] * (
        len(text) - 1
    )
    left_out = 0
    for position in (0, 2, 3, 4, 11, 47, 48, 51, 66, 69, 70, 71, 74, 90, 98):
        result = output.signals[position]["blocks"]
        for layer, (spans, readout) in enumerate(zip(result, engine.attention(text, position))):
            if engine.config.compress_ratios[layer] != 4:
                assert spans is None
                continue
            chosen = [block for start, stop in spans for block in range(start, stop)]
            assert chosen == readout.chosen.nonzero().flatten().tolist()
            assert len(chosen) == min((position + 1) // 4, topk)
            left_out += len(readout.chosen) - len(chosen)
    assert left_out > 0


def test_blocks_follow_an_edit_of_what_the_sublayer_reads(engine):
    ids = [(5 * i * i + i) % 500 for i in range(90)]
    push = birkhoff.Add(
        torch.randn(engine.config.hidden_size, generator=torch.Generator().manual_seed(2)) * 4,
        "pre_attn",
        [4],
    )
    frames = engine.generate(ids, max_tokens=1, temperature=0, steer=[push], signals=["blocks"]).signals
    plain = engine.generate(ids, max_tokens=1, temperature=0, signals=["blocks"]).signals
    assert [frame["blocks"][2] for frame in frames] == [frame["blocks"][2] for frame in plain]
    assert [frame["blocks"][4] for frame in frames] != [frame["blocks"][4] for frame in plain]
