"""Labels by rules: planted features get the rule they were made from, scores are correlations on other texts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from birkhoff.sae.feature_rules import KINDS, LabelRule, RuleSums, Vocabulary, plain_word

TEXTS = [
    [
        "Once",
        " upon",
        " a",
        " time",
        ",",
        " the",
        " fox",
        " saw",
        " the",
        " sea",
        ".",
        "\n",
        "It",
        " was",
        " cold",
        ".",
    ],
    [
        "The",
        " dog",
        " said",
        ",",
        ' "',
        "Hello",
        " fox",
        '."',
        " The",
        " sea",
        " was",
        " far",
        " away",
        ".",
        "\n",
    ],
    [
        "A",
        " cat",
        " was",
        " in",
        " the",
        " house",
        ".",
        " The",
        " fox",
        " ran",
        " to",
        " the",
        " sea",
        " again",
        ".",
    ],
]


def sums_of(
    texts: list[list[str]], features: list[list[list[float]]], topics=None, skip: int = 0
) -> RuleSums:
    """Sums over texts; `features[text][position]` are the activations."""
    width = len(features[0][0])
    sums = RuleSums(Vocabulary(TEXTS, width, topics), width)
    for words, rows in zip(texts, features):
        sums.add(sums.vocabulary.clues(words), skip, torch.tensor(rows)[skip:])
    return sums


def active_where(test) -> list[list[list[float]]]:
    return [[[2.0 * float(bool(test(words, at)))] for at in range(len(words))] for words in TEXTS]


@pytest.mark.parametrize(
    "rule, test",
    [
        (LabelRule("at", ("the",)), lambda words, at: plain_word(words[at]) == "the"),
        (LabelRule("before", ("fox",)), lambda words, at: at + 1 < len(words) and words[at + 1] == " fox"),
        (LabelRule("after", ("was",)), lambda words, at: at > 0 and words[at - 1] == " was"),
        (LabelRule("kind", ("early",)), lambda words, at: at < 12),
    ],
)
def test_a_planted_feature_gets_its_rule(rule, test):
    found, value = sums_of(TEXTS, active_where(test)).best_rule(0)
    assert found == rule and value == pytest.approx(1.0)


def test_several_words_are_joined_and_named():
    planted = active_where(lambda words, at: plain_word(words[at]) in ("fox", "sea"))
    rule, value = sums_of(TEXTS, planted).best_rule(0)
    assert rule.family == "at" and set(rule.words) == {"fox", "sea"} and value == pytest.approx(1.0)
    assert rule.text in ('"fox" / "sea"', '"sea" / "fox"') and rule.to_json() == {"at": list(rule.words)}


def test_topics_reach_some_tokens_back():
    topics = {"the sea": ["sea", "dog", "ocean"]}
    planted = active_where(lambda words, at: {" sea", " dog"} & set(words[max(0, at - 23) : at + 1]))
    rule, value = sums_of(TEXTS, planted, topics).best_rule(0)
    assert rule == LabelRule("topic", ("the sea",)) and rule.text == "about the sea"
    assert value == pytest.approx(1.0)


def test_a_constant_feature_has_no_rule_and_no_score():
    for level in (0.0, 3.0):
        sums = sums_of(TEXTS, [[[level] for _ in words] for words in TEXTS])
        assert sums.best_rule(0) is None and sums.score(0, LabelRule("at", ("the",))) is None


@given(
    st.lists(st.lists(st.floats(0, 8, width=32), min_size=15, max_size=15), min_size=3, max_size=3),
    st.integers(0, 3),
)
def test_scores_are_correlations(levels, skip):
    """NumPy computes the same from the whole columns."""
    texts = [words[:15] for words in TEXTS]
    rows = [[[value] for value in levels[n]] for n in range(3)]
    sums = sums_of(texts, rows, skip=skip)
    activation = np.concatenate([np.array(levels[n][skip:], dtype=np.float64) for n in range(3)])
    predicted = np.concatenate(
        [[plain_word(word) in ("the", "fox") for word in words[skip:]] for words in texts]
    ).astype(float)
    score = sums.score(0, LabelRule("at", ("the", "fox")))
    if activation.std() < 1e-3:
        return  # constant up to rounding
    assert score == pytest.approx(np.corrcoef(activation, predicted)[0, 1], abs=2e-3)


@given(st.integers(1, 16), st.integers(0, 3), st.integers(0, 99))
def test_a_text_in_parts_gives_the_sums_of_the_whole(size, skip, seed):
    rows = torch.rand(16, 3, generator=torch.Generator().manual_seed(seed))
    vocabulary = Vocabulary(TEXTS, 3, {"the sea": ["sea", "dog"]})
    whole, parts = RuleSums(vocabulary, 3), RuleSums(vocabulary, 3)
    clues = vocabulary.clues(TEXTS[0])
    whole.add(clues, skip, rows[skip:])
    for first in range(skip, 16, size):
        parts.add(clues, first, rows[first : first + size])
    assert whole.rows == parts.rows == 16 - skip
    for rule in [("at", "the"), ("near", "fox"), ("topic", "the sea"), ("kind", "early"), ("kind", "piece")]:
        if rule[0] == "near" and rule[1] not in vocabulary.near_index:
            continue
        expected = whole.score(1, LabelRule(rule[0], rule[1:]))
        found = parts.score(1, LabelRule(rule[0], rule[1:]))
        assert (expected is None and found is None) or found == pytest.approx(expected, abs=1e-4)


def test_every_kind_of_place_has_words_for_it():
    assert all(LabelRule("kind", (name,)).text for name in KINDS)
    assert [plain_word(token) for token in (" The", "\n\n", "  ")] == ["the", "line break", "space"]


def test_the_vocabulary_is_limited_by_memory():
    words = [[f"w{n}" for n in range(300)] * 3]
    assert len(Vocabulary(words, 1000).words) == 300
    assert len(Vocabulary(words, 1 << 20).words) == 16
