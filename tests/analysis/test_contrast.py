"""Contrast vectors: rows equal those of the forward pass, the vector steers, invalid sets are refused."""

from __future__ import annotations

import pytest
import torch

from birkhoff import Add, Project
from birkhoff.analysis.contrast import contrast, contrast_rows, vector_of
from birkhoff.errors import OptionError, SteeringError

UP = ["zzz zzzz zz", "zzzz z zzz zz", "zz zz zz", "zzzzzz"]
DOWN = ["aaa aaaa aa", "aaaa a aaa aa", "aa aa aa", "aaaaaa"]
HOOK = "mhc_streams_pre_attn"


@pytest.mark.parametrize("tokens", ["mean", "last"])
@pytest.mark.parametrize("hook", ["mlp_out", HOOK, "mhc_streams_post_mlp", "mhc_streams_final"])
def test_rows_are_those_of_a_plain_forward_pass(engine, hook, tokens):
    layers = [1, 3]
    rows = contrast_rows(engine, UP, DOWN, hook, layers, tokens)
    last = engine.config.num_hidden_layers - 1
    assert rows.layers == ([last] if hook == "mhc_streams_final" else layers)
    for texts, kept in ((UP, rows.positive), (DOWN, rows.negative)):
        for index, text in enumerate(texts):
            trace = engine.trace(engine.prompt_ids(text))
            for layer in rows.layers:
                at = (HOOK, layer + 1) if hook == "mhc_streams_post_mlp" else (hook, layer)
                # without the begin-of-text token
                row = trace[at][1:].mean(0) if tokens == "mean" else trace[at][-1]
                assert torch.allclose(kept[layer][index], row, atol=1e-4, rtol=1e-4)


def test_only_the_answer_of_a_conversation_is_used(engine):
    question = {"role": "user", "content": "say it"}
    chats = [[question, {"role": "assistant", "content": text}] for text in UP]
    rows = contrast_rows(engine, chats, DOWN, "mlp_out", [2])
    ids, first = engine.encode_chat(chats[0]), len(engine.encode_chat([question]))
    trace = engine.trace(ids, ["mlp_out"])
    assert torch.allclose(rows.positive[2][0], trace["mlp_out", 2][first:].mean(0), atol=1e-4)


def test_the_vector_has_metadata_and_steers_to_the_positive_set(idle, tmp_path):
    vector = contrast(idle, UP, DOWN, HOOK, [2, 4])
    assert (
        vector.layers == (2, 4)
        and vector.op == "add"
        and vector.n_pairs == 4
        and vector.method == "mean_diff"
    )
    assert (vector.model, vector.model_revision) == idle.identity() and vector.width == idle.schema[
        HOOK
    ].width
    idle.modules["z"] = vector.save(tmp_path / "z.safetensors")
    try:
        ids = idle.prompt_ids(DOWN[0])
        plain, steered = idle.trace(ids), idle.trace(ids, steer=[Add("z", scale=3.0, layers=[4])])
        axis = vector.at(4).tensor()
        moved = (steered[HOOK, 5] - plain[HOOK, 5]).flatten(1) @ axis  # what the next layer sees
        assert (moved > 0).all() and torch.equal(steered[HOOK, 4], plain[HOOK, 4])
        without = idle.logits(ids, steer=[Project("z")])
        assert not torch.equal(without, plain.logits)
    finally:
        del idle.modules["z"]


def test_a_vector_of_one_stream_is_zero_in_the_others(engine):
    rows = contrast_rows(engine, UP, DOWN, HOOK, [3])
    whole, one = (vector_of(engine, rows, [3], streams=s).at(3).tensor().view(4, -1) for s in (None, [1]))
    assert torch.equal(one[1], whole[1]) and not one[[0, 2, 3]].any() and whole.abs().amin(1).gt(0).all()
    table = rows.separation()
    assert [entry.stream for entry in table] == [None, 0, 1, 2, 3] and max(entry.auc for entry in table) > 0.9


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"positive": "text"}, OptionError, "list of at least two"),
        ({"negative": ["one"]}, OptionError, "list of at least two"),
        ({"hook": "mhc_ffn_res_mix"}, SteeringError, "capture-only"),
        ({"hook": "mlp"}, Exception, "not a hook"),
        ({"how": "svm"}, OptionError, "mean_diff, pca"),
        ({"tokens": "first"}, OptionError, "mean, last"),
        ({"streams": [1]}, SteeringError, "one stream"),
    ],
)
def test_invalid_contrasts_are_refused(idle, change, error, words):
    given = {"positive": UP, "negative": DOWN, "hook": "mlp_out", "layers": [1], **change}
    with pytest.raises(error, match=words):
        contrast(idle, **given)


def test_another_models_vector_is_refused_and_nothing_is_registered(idle, tmp_path):
    from dataclasses import replace

    vector = contrast(idle, UP, DOWN, "mlp_out", [1])
    bad = {
        "was made for the model 'other'": replace(vector, model="other", model_revision="0"),
        "this model has layers": replace(vector, rows={40: vector.at(1)}),
        "the vector has 3 numbers": replace(vector, rows={1: [1.0, 2.0, 3.0]}),
        "takes clamp, patch, scale, not add": replace(vector, hook="mhc_attn_pre_mix"),
    }
    for words, wrong in bad.items():
        with pytest.raises(Exception, match=words):
            idle.modules["wrong"] = wrong
        assert "wrong" not in idle.modules
    idle.modules["moved"] = replace(vector, model="somewhere/" + idle.name.split("/")[-1], model_revision="0")
    del idle.modules["moved"]
