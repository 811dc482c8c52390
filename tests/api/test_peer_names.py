"""Names of other tools that an engine lacks are refused with what to call instead; contrast is a method."""

from __future__ import annotations

import copy

import pytest
import torch

import birkhoff
from birkhoff import Add, Sae
from birkhoff.api.peer_names import PEER_METHODS
from birkhoff.errors import SiteError


@pytest.fixture(scope="module")
def engine():
    with birkhoff.load("nano", max_context=256, cache_bytes=2**26) as engine:
        yield engine


def test_methods_of_other_tools_are_named(engine):
    for name, here in PEER_METHODS.items():
        assert not hasattr(engine, name)
        with pytest.raises(AttributeError) as refused:
            getattr(engine, name)
        assert here in str(refused.value)
    with pytest.raises(AttributeError, match=r"no attribute 'generat'\. Did you mean 'generate'\?"):
        engine.generat("Once")
    with pytest.raises(AttributeError, match=r"no attribute 'zzzz'\.$"):
        _ = engine.zzzz
    assert copy.copy(engine).name == "nano"


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        ("blocks.3.attn.hook_pattern", "engine.attention_patterns"),
        ("hook_embed", r"mhc_streams_pre_attn\[0\]"),
        ("blocks.3.hook_resid_pre", "the four residual streams"),
    ],
)
def test_hooks_of_other_tools_say_where_it_is(engine, hook, says):
    with pytest.raises(SiteError, match=says):
        engine.trace("Once", hook)


def test_contrast_is_the_difference_of_means(engine):
    positive, negative = (
        ["What a happy day.", "I love my friend."],
        ["What a dark night.", "I hate my enemy."],
    )
    hook = "mhc_streams_pre_attn"
    vector = engine.contrast(positive, negative, hook, 4, tokens="last")
    ends = [
        torch.stack([trace[hook, 4][-1] for trace in engine.trace(texts, {hook: 4})]).mean(0)
        for texts in (positive, negative)
    ]
    assert (vector.at(4).tensor() - (ends[0] - ends[1]).flatten()).abs().max() < 1e-4
    steered = engine.logits("Once upon a time", steer=[Add(vector)])
    assert not steered.equal(engine.logits("Once upon a time"))
    one = engine.contrast(positive, negative, hook, 4, streams=1).at(4).tensor().view(4, -1)
    assert one[1].any() and not one[[0, 2, 3]].any()


def test_a_dictionary_encodes_streams_as_a_trace_has_them(engine):
    sae, rows = Sae.load("nano"), engine.trace("Once upon a time")["mhc_streams_pre_attn", 5]
    assert sae.encode(rows).equal(sae.encode(rows.flatten(1)))
