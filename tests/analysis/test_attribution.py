"""Attribution against edits through the public API, and against identities that its scores satisfy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

import birkhoff
from birkhoff import Add, Call, Clamp, ExpertSet, Gate, LogitDiff, LogProb, Patch, Project, SaeSet
from birkhoff.analysis.attribution import spearman
from birkhoff.errors import BirkhoffError, OptionError, PromptError, SiteError, UnsupportedModel
from birkhoff.steering.position_rows import PositionRows
from tests.hf.models import make
from tests.sae.reference import random_sae

IDS = [1, *range(20, 33)]
OTHER = [1, *range(20, 26), 90, *range(27, 33)]
METRIC = (40, 41)


def metric(logits):
    return float(logits[-1, 40] - logits[-1, 41])


def test_exact_scores_are_those_of_patches(engine):
    """Every kind of site, with zeros and with another text, by the edits that users write."""
    for hook in ("post_attn", "mlp_out", "mhc_streams_pre_mlp", "mhc_streams_final"):
        for baseline in (None, OTHER):
            scores = engine.attribute(IDS, METRIC, hook, layers=[2], baseline=baseline, method="exact")
            assert scores.value == pytest.approx(metric(engine.logits(IDS)), abs=1e-4)
            theirs = engine.trace(OTHER, hooks=[hook])
            for node in list(scores)[:: max(1, len(scores) // 7)]:
                rows: object = 0
                if baseline is not None:
                    row = theirs[hook, node.layer][node.position].flatten()
                    rows = PositionRows({node.position: row})
                streams = [dict(node.index)["stream"]] if "streams" in hook else None
                edit = Patch(rows, hook, [node.layer], where=[node.position], streams=streams)
                expected = scores.value - metric(engine.logits(IDS, [edit]))
                assert node.score == pytest.approx(expected, abs=2e-4), (hook, node)


def test_a_gradient_score_is_difference_times_gradient(engine):
    scores = engine.attribute(IDS, METRIC, ["mlp_out", "mhc_streams_pre_attn"], baseline=OTHER)
    with engine.grad() as g:
        logits = engine.logits(IDS)
        g.backward(logits[-1, 40] - logits[-1, 41])
    theirs = engine.trace(OTHER)
    for key in (("mlp_out", 3), ("mhc_streams_pre_attn", 1)):
        expected = ((g.acts[key] - theirs[key]) * g[key]).sum(-1)
        assert scores[key].shape == expected.shape
        assert (scores[key] - expected).abs().max() < 1e-4
    assert scores.baseline_value == pytest.approx(metric(theirs.logits), abs=1e-4)


def test_edits_that_a_generation_used_before_can_be_differentiated(engine):
    """What a decode step computes of an edit is kept, and is not bound to inference mode."""
    d = engine.config.hidden_size
    engine.attach("kept", random_sae("jumprelu", 48, d, seed=4, hook="mlp_out", layer=2, view="single"))
    vector = torch.linspace(-1, 1, d)
    try:
        for edit in (
            SaeSet("kept", {5: 3.0}),
            Add(vector, "mlp_out", [1], norm_match=True),
            Add(vector.bfloat16(), "mlp_out", [1]),
            Project(vector, "mlp_out", [1]),
            Clamp(vector, "mlp_out", [1], max=0.1),
            Add(vector, "mlp_out", [1], when=Gate(vector, "mlp_out", 1, above=-100.0)),
            Patch("identity", "mhc_attn_res_mix", [1]),
            ExpertSet([3], force=[1]),
        ):
            fresh = engine.attribute(IDS, METRIC, steer=[edit]) if not isinstance(edit, SaeSet) else None
            with engine.steering(edit):
                engine.generate(IDS, max_tokens=2, temperature=0, ignore_eos=True)
                scores = engine.attribute(IDS, METRIC)
            if fresh is not None:
                assert scores.value == pytest.approx(fresh.value, abs=1e-4)
            assert all(np.isfinite(node.score) for node in scores), edit
    finally:
        engine.detach("kept")


@pytest.mark.parametrize(
    ("over", "error"), [("mhc_streams_pre_mlp", 0.1), ("mlp_out", 0.02), ("final_hidden", 0.005)]
)
def test_integrated_scores_of_a_site_sum_to_the_effect_of_patching_it(engine, over, error):
    """Up to the jumps where the choice of experts or entries changes on the way."""
    last = engine.config.num_hidden_layers - 1
    layer = last if over == "final_hidden" else 3
    scores = engine.attribute(
        IDS, METRIC, over, layers=[layer], baseline=OTHER, method="integrated", steps=64
    )
    rows = engine.trace(OTHER, hooks=[over])[over, layer]
    patched = engine.logits(IDS, [Call(lambda x: rows, over, [layer])])
    assert float(scores.scores.sum()) == pytest.approx(scores.value - metric(patched), abs=error)


def test_the_exact_score_of_a_head_is_the_effect_of_switching_it_off(engine):
    scores = engine.attribute(IDS, METRIC, "heads", layers=[4], baseline="zero", method="exact")
    for head in (0, engine.config.num_attention_heads - 1):

        def without(rows, head=head):
            changed = rows.clone().view(len(IDS), engine.config.num_attention_heads, -1)
            changed[-1, head] = 0
            return changed.view_as(rows)

        effect = scores.value - metric(engine.logits(IDS, [Call(without, "attn_head_out", [4])]))
        assert float(scores["attn_head_out", 4][-1, head]) == pytest.approx(effect, abs=1e-4)


def test_the_inputs_path_uses_gradients_between_the_two_texts(engine):
    """With one step it is the gradient at the middle of the two embeddings."""
    scores = engine.attribute(IDS, METRIC, "mlp_out", baseline=OTHER, method="inputs", steps=1)
    streams = [
        engine.trace(ids, hooks=["mhc_streams_pre_attn"])["mhc_streams_pre_attn", 0] for ids in (IDS, OTHER)
    ]
    middle = Call(lambda rows: (streams[0] + streams[1]) / 2, "mhc_streams_pre_attn", [0])
    with engine.grad("mlp_out") as g:
        logits = engine.logits(IDS, [middle])
        g.backward(logits[-1, 40] - logits[-1, 41])
    outputs = [engine.trace(ids, hooks=["mlp_out"])["mlp_out", 4] for ids in (IDS, OTHER)]
    expected = ((outputs[0] - outputs[1]) * g["mlp_out", 4]).sum(-1)
    assert (scores["mlp_out", 4] - expected).abs().max() < 1e-4


def test_batches_and_recomputed_layers_give_the_same_scores(engine):
    for method in ("integrated", "exact"):
        common = {"over": "sublayers", "layers": [1, 4], "method": method, "steps": 5, "baseline": "mean"}
        whole = engine.attribute(IDS, METRIC, **common)
        for options in ({"max_batch_tokens": 1}, {"max_batch_tokens": 40}, {"recompute": True}):
            other = engine.attribute(IDS, METRIC, **common, **options)
            assert (whole.scores - other.scores).abs().max() < 1e-4, options


def test_a_batch_holds_as_many_tokens_as_it_may(engine, monkeypatch):
    sizes = []
    forward = type(engine.model).forward
    monkeypatch.setattr(
        type(engine.model),
        "forward",
        lambda self, ids, *rest: sizes.append(ids.numel()) or forward(self, ids, *rest),
    )
    engine.attribute(IDS, METRIC, "sublayers", method="exact", max_batch_tokens=60)
    assert max(sizes) <= 60 and sizes.count(max(sizes)) > 3


def test_experts(engine):
    """A score is weight times gradient of the weight; exactly, the output without the expert's part."""
    scores = engine.attribute(IDS, METRIC, "experts", layers=[2, 4])
    with engine.grad("moe_topk") as g:
        logits = engine.logits(IDS)
        g.backward(logits[-1, 40] - logits[-1, 41])
    for layer in (2, 4):
        ids, weights = (part.squeeze(-1) for part in g.acts["moe_topk", layer].split(1, -1))
        dense = torch.zeros(len(IDS), engine.config.n_routed_experts)
        dense.scatter_(1, ids.long(), weights * g["moe_topk", layer][..., 1])
        width = scores["mlp_out", layer].shape[1]
        assert (scores["mlp_out", layer] - dense[:, :width]).abs().max() < 1e-4
        assert not dense[:, width:].any()
    exact = engine.attribute(IDS, METRIC, "experts", layers=[2], method="exact")
    integrated = engine.attribute(IDS, METRIC, "experts", layers=[2], method="integrated", steps=64)
    assert len(exact) == len(IDS) * engine.config.num_experts_per_tok
    assert exact.agreement(integrated).spearman > 0.5
    node = max(exact, key=lambda node: abs(node.score))
    chosen, weights = (part.squeeze(-1) for part in g.acts["moe_topk", 2].split(1, -1))
    block = engine.v4_model.blocks()[2]
    with torch.no_grad():
        x = block.ffn_norm(engine.trace(IDS, hooks=["mlp_in"])["mlp_in", 2])
        only = torch.where(chosen == dict(node.index)["expert"], weights, 0)
        part = block.ffn.experts(x, chosen.long(), only)
    removal = Call(lambda rows: rows - part[node.position], "mlp_out", [2], where=[node.position])
    assert node.score == pytest.approx(exact.value - metric(engine.logits(IDS, [removal])), abs=2e-4)
    compared = engine.attribute(IDS, METRIC, "experts", layers=[2], baseline=OTHER)
    before = [node for node in compared if node.position < 7]
    assert all(abs(node.score) < 1e-5 for node in before)  # the texts are equal there


@pytest.mark.parametrize(
    ("hook", "view"),
    [
        ("mlp_out", "single"),
        ("mhc_streams_pre_attn", "per_stream"),
        ("mhc_streams_pre_attn", "flat"),
        ("mhc_streams_pre_attn", "mean"),
        ("mhc_streams_pre_attn", "read"),
    ],
)
def test_features(engine, hook, view):
    """Exactly a feature's score is the effect of setting it to 0; by gradients, all of them sum to the gradient times
    the change when every feature is 0."""
    width = engine.schema[hook].width if view == "flat" else engine.config.hidden_size
    spread = {"spread": "read"} if view == "read" else {}
    with engine.attach("mine", random_sae("relu", 40, width, hook=hook, layer=2, view=view, **spread)):
        exact = engine.attribute(IDS, METRIC, "features:mine", method="exact")
        nodes = [node for node in exact.top(60) if view != "per_stream" or dict(node.index)["stream"] == 1]
        for node in nodes[:3]:
            named = dict(node.index)
            streams = [named["stream"]] if "stream" in named else None
            edit = SaeSet("mine", {named["feature"]: 0.0}, where=[node.position], streams=streams)
            assert node.score == pytest.approx(exact.value - metric(engine.logits(IDS, [edit])), abs=3e-4)
        scores = engine.attribute(IDS, METRIC, "features:mine")
        integrated = engine.attribute(IDS, METRIC, "features:mine", method="integrated", steps=2)
        assert [n.index for n in scores] == [n.index for n in exact] == [n.index for n in integrated]
        with engine.grad(hook) as g:
            zeroed = SaeSet("mine", dict.fromkeys(range(40), 0.0))
            engine.logits(IDS, [zeroed])
            logits = engine.logits(IDS)
            g.backward(logits[-1, 40] - logits[-1, 41])
        total = ((g.acts[hook, 2] - g.passes[0].acts[hook, 2]) * g[hook, 2]).sum()
        assert float(scores.scores.sum()) == pytest.approx(float(total), abs=1e-3)
        assert exact[hook, 2].shape[0] == len(IDS)


def test_the_exact_score_of_a_mixer_entry_is_the_effect_of_replacing_it(engine):
    hook, place = "mhc_attn_res_mix", (9, 2, 1)  # a position after the changed token, from and to
    theirs = engine.trace(OTHER, hooks=[hook])[hook, 3]
    scores = engine.attribute(IDS, METRIC, hook, layers=[3], baseline=OTHER, method="exact")

    def replaced(rows):
        changed = rows.clone()
        changed.view(len(IDS), 4, 4)[place] = theirs.view(len(IDS), 4, 4)[place]
        return changed

    effect = scores.value - metric(engine.logits(IDS, [Call(replaced, hook, [3])]))
    assert float(scores[hook, 3].view(len(IDS), 4, 4)[place]) == pytest.approx(effect, abs=1e-4)
    assert scores.scores.abs().max() > 1e-4


def test_what_is_only_read_has_gradients_only(engine):
    hooks = ["mhc_attn_pre_mix", "moe_router_logits"]
    scores = engine.attribute(IDS, METRIC, hooks, layers=[3])
    assert scores["mhc_attn_pre_mix", 3].shape == (len(IDS), 4) and scores["mhc_attn_pre_mix", 3].any()
    for hook in hooks[1:]:
        with pytest.raises(OptionError, match="gradients only"):
            engine.attribute(IDS, METRIC, hook, method="exact")


def test_metrics(engine):
    logits = engine.logits(IDS)
    cases = [
        ((40, 41), logits[-1, 40] - logits[-1, 41]),
        (LogitDiff(40, 41, position=5), logits[5, 40] - logits[5, 41]),
        (40, logits[-1, 40]),
        (LogProb(40, -2), logits[-2].log_softmax(-1)[40]),
        (lambda rows: rows[3:].logsumexp(-1).mean(), logits[3:].logsumexp(-1).mean()),
        ({"token": 40, "other": 41, "position": 5}, logits[5, 40] - logits[5, 41]),
        ({"token": 40, "logprob": True}, logits[-1].log_softmax(-1)[40]),
        ({"token": 40}, logits[-1, 40]),
        ("a", logits[-1, engine.tokenizer.encode("a")[0]]),
    ]
    for given_metric, expected in cases:
        assert engine.attribute(IDS, given_metric, "final_hidden").value == pytest.approx(
            float(expected), abs=1e-4
        )


def test_a_metric_of_a_position_gives_later_tokens_no_score(engine):
    scores = engine.attribute(IDS, LogitDiff(40, 41, position=5), "streams")
    assert all(node.score == 0 for node in scores if node.position > 5)
    assert any(node.score != 0 for node in scores)


def test_edits_apply_to_every_pass(engine):
    steer = [Patch(0, "mlp_out", [1])]
    scores = engine.attribute(IDS, METRIC, "post_attn", layers=[2], method="exact", steer=steer)
    assert scores.value == pytest.approx(metric(engine.logits(IDS, steer)), abs=1e-4)
    node = scores.top(1)[0]
    edit = Patch(0, "post_attn", [2], where=[node.position])
    assert node.score == pytest.approx(scores.value - metric(engine.logits(IDS, [*steer, edit])), abs=2e-4)


def test_dense_scores_have_all_experts_streams_and_features(engine):
    """The shape depends on the model, not on which experts a text chose or which features were active."""
    short = engine.attribute([1, 2], METRIC, "experts")
    count = engine.config.n_routed_experts
    for layer in range(engine.config.num_hidden_layers):
        assert short["mlp_out", layer].shape == (2, count)
        assert int((short["mlp_out", layer] != 0).sum(1).max()) <= engine.config.num_experts_per_tok
    assert engine.attribute([1, 2], METRIC, "streams")["mhc_streams_pre_attn", 2].shape == (2, 4)
    quiet = random_sae("jumprelu", 8, 64, seed=4, hook="mlp_out", layer=2, view="single")
    quiet.activation.threshold.fill_(1e9)  # no feature is ever active
    with engine.attach("quiet", quiet, kind="full"):
        scores = engine.attribute([1, 2], METRIC, "features:quiet")
    assert len(scores) == 0 and scores["mlp_out", 2].shape == (2, 8) and not scores["mlp_out", 2].any()


def test_results(engine):
    scores = engine.attribute("abcd", ("a", "b"), "streams", layers=[2, 3])
    assert len(scores) == len(list(scores)) == len(scores.scores) and scores.tokens[-1] == "d"
    top = scores.top(5)
    assert [abs(node.score) for node in top] == sorted((abs(n.score) for n in scores), reverse=True)[:5]
    assert all(node.score > 0 for node in scores.top(3, "positive"))
    assert all(node.score < 0 for node in scores.top(3, "negative"))
    by_stream = scores.sum(("layer", "stream"))
    assert sum(by_stream.values()) == pytest.approx(float(scores.scores.sum()), abs=1e-4)
    dense = scores["mhc_streams_pre_attn", 3]
    assert float(dense[:, 1].sum()) == pytest.approx(
        scores.sum(("hook", "layer", "stream"))["mhc_streams_pre_attn", 3, 1], abs=1e-5
    )
    document = scores.to_json(3)
    assert len(document["nodes"]) == 3 and document["num_nodes"] == len(scores)
    assert set(document["nodes"][0]) == {"hook", "layer", "position", "stream", "score"}
    assert "mhc_streams" in str(top[0])
    same = scores.agreement(scores, 7)
    assert (same.spearman, same.overlap, same.k) == (pytest.approx(1.0), 7, 7)
    count = engine.config.num_hidden_layers
    assert scores["mhc_streams_pre_attn", 3 - count].equal(dense)
    assert scores["blocks.3.hook_in"].equal(dense) and scores["mhc_streams_post_mlp", 2].equal(dense)
    for key in (("mlp_out", 0), ("mhc_streams_pre_attn", 99), "mhc_streams_pre_attn", 7):
        with pytest.raises(SiteError, match="was not attributed"):
            scores[key]
    with pytest.raises(PromptError, match="takes one prompt"):
        engine.circuit(["ab", "cd"], "a")
    for by in ((), ("hidden",)):
        with pytest.raises(OptionError, match="expected some of"):
            scores.sum(by)
    with pytest.raises(OptionError, match="expected both, positive"):
        scores.top(3, "up")
    with pytest.raises(OptionError, match="different nodes"):
        scores.agreement(engine.attribute("abcd", ("a", "b"), "sublayers"))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"metric": None}, OptionError, "a pair of tokens"),
        ({"metric": (1, 2, 3)}, OptionError, "a pair of tokens"),
        ({"metric": ("ab", "b")}, OptionError, "is 2 tokens"),
        ({"metric": (1, 10**6)}, OptionError, "an id 0"),
        ({"metric": LogProb(3, 99)}, OptionError, "position is 99"),
        ({"metric": lambda logits: logits}, OptionError, "expected a tensor of one number"),
        ({"metric": lambda logits: 3.0}, OptionError, "expected a tensor of one number"),
        ({"metric": {"token": 1, "tok": 2}}, OptionError, "no field 'tok'"),
        ({"metric": {"token": 1, "other": 2, "logprob": True}}, OptionError, "Leave one of them out"),
        ({"over": "mlp_oat"}, SiteError, "Groups: sublayers"),
        ({"over": []}, OptionError, "over is empty"),
        ({"over": [3]}, OptionError, "over holds 3"),
        ({"over": "features:none"}, BirkhoffError, "none"),
        ({"layers": [99]}, BirkhoffError, "does not exist"),
        ({"method": "gradients"}, OptionError, "Did you mean 'gradient'"),
        ({"steps": 0}, OptionError, "steps is 0"),
        ({"max_batch_tokens": 0}, OptionError, "max_batch_tokens"),
        ({"baseline": [1, 2, 3]}, PromptError, "3 tokens and the text 14"),
        ({"baseline": "mean", "over": "experts"}, OptionError, "is for sites"),
        ({"prompt": ""}, PromptError, "empty"),
    ],
)
def test_what_is_refused(engine, arguments, error, message):
    fields = {"prompt": IDS, "metric": METRIC, **arguments}
    with pytest.raises(error, match=message):
        engine.attribute(**fields)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_models_of_transformers(kind, tmp_path):
    make(kind, tmp_path / "model")
    ids, other = list(range(5, 15)), [*range(5, 9), 60, *range(10, 15)]
    with birkhoff.load(tmp_path / "model", device="cpu") as engine:
        scores = engine.attribute(ids, METRIC, "mlp_out", baseline=other, method="exact", max_batch_tokens=30)
        theirs = engine.trace(other, hooks=["mlp_out"])
        for node in scores.top(3):
            row = theirs["mlp_out", node.layer][node.position]
            edit = Patch(PositionRows({node.position: row}), "mlp_out", [node.layer])
            assert node.score == pytest.approx(scores.value - metric(engine.logits(ids, [edit])), abs=2e-4)
        integrated = engine.attribute(ids, METRIC, "pre_attn", baseline=other, method="integrated", steps=64)
        total = engine.logits(other)
        by_layer = integrated.sum("layer")
        assert by_layer[0,] == pytest.approx(integrated.value - metric(total), abs=0.02)  # the whole input
        with pytest.raises(UnsupportedModel):
            engine.attribute(ids, METRIC, "experts")


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=2, max_size=30))
def test_rank_correlation_is_that_of_scipy(pairs):
    a, b = (torch.tensor(column, dtype=torch.float32) for column in zip(*pairs))
    mine = spearman(a, b)
    if len(set(a.tolist())) == 1 or len(set(b.tolist())) == 1:
        assert np.isnan(mine)
    else:
        assert mine == pytest.approx(float(scipy.stats.spearmanr(a.numpy(), b.numpy()).statistic), abs=1e-9)
        assert spearman(a, b.exp()) == pytest.approx(mine, abs=1e-9)
