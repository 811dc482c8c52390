"""Name tables invert for every model tensor and for arbitrary text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from birkhoff.convert.presets import preset
from birkhoff.weights.layout import expected_tensors
from birkhoff.weights.tensor_names import DIALECTS, TRANSFORMERS, to_ours, to_theirs

WORDS = (
    "model",
    "layers",
    "3",
    "attn",
    "norm",
    "kv_norm",
    "weight",
    "hc_head_fn",
    "hc_head",
    "hc_fn",
    "embed",
    "embed_tokens",
    "head",
    "mtp",
    "0",
    "scale",
    "ffn",
    "",
)
names = st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map(".".join) | st.text(max_size=20)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_name_of_a_model_translates_there_and_back(dialect):
    ours = list(expected_tensors(preset("tiny")))
    theirs = [to_theirs(name, DIALECTS[dialect]) for name in ours]
    assert len(set(theirs)) == len(ours)
    assert [to_ours(name, DIALECTS[dialect]) for name in theirs] == ours


@pytest.mark.parametrize("dialect", DIALECTS)
@given(one=names, other=names)
def test_no_two_foreign_names_become_one_of_ours(dialect, one, other):
    table = DIALECTS[dialect]
    for name in (one, other):
        ours = to_ours(name, table)
        assert ours is None or to_theirs(ours, table) == name
    if one != other and to_ours(one, table) is not None:
        assert to_ours(one, table) != to_ours(other, table)


def test_the_words_of_transformers():
    pairs = {
        "embed.weight": "model.embed_tokens.weight",
        "head.weight": "head.weight",
        "hc_head_fn": "model.hc_head.hc_fn",
        "norm.weight": "model.norm.weight",
        "layers.7.attn.kv_norm.weight": "model.layers.7.attn.norm.weight",
        "layers.7.attn.compressor.norm.weight": "model.layers.7.attn.compressor.norm.weight",
        "layers.0.ffn.experts.3.w2.weight": "model.layers.0.ffn.experts.3.w2.weight",
    }
    for ours, theirs in pairs.items():
        assert to_theirs(ours, TRANSFORMERS) == theirs and to_ours(theirs, TRANSFORMERS) == ours
    for stranger in (
        "embed.weight",
        "model.embed.weight",
        "model.hc_head_fn",
        "layers.0.attn.attn_sink",
        "model.layers.7.attn.kv_norm.weight",
        "lm_head.weight",
    ):
        assert to_ours(stranger, TRANSFORMERS) is None
