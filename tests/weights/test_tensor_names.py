"""Name tables invert for every model tensor and for arbitrary text."""

from hypothesis import given
from hypothesis import strategies as st

from birkhoff.convert.presets import preset
from birkhoff.weights.layout import expected_tensors
from birkhoff.weights.tensor_names import from_transformers, to_transformers

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


def test_every_name_of_a_model_translates_there_and_back():
    ours = list(expected_tensors(preset("tiny")))
    theirs = [to_transformers(name) for name in ours]
    assert len(set(theirs)) == len(ours)
    assert [from_transformers(name) for name in theirs] == ours


@given(one=names, other=names)
def test_no_two_foreign_names_become_one_of_ours(one, other):
    for name in (one, other):
        ours = from_transformers(name)
        assert ours is None or to_transformers(ours) == name
    if one != other and from_transformers(one) is not None:
        assert from_transformers(one) != from_transformers(other)


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
        assert to_transformers(ours) == theirs and from_transformers(theirs) == ours
    for unknown in (
        "embed.weight",
        "model.embed.weight",
        "model.hc_head_fn",
        "layers.0.attn.attn_sink",
        "model.layers.7.attn.kv_norm.weight",
        "lm_head.weight",
    ):
        assert from_transformers(unknown) is None
