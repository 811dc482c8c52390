"""Descriptions of features: files, damaged files, and search by word."""

from __future__ import annotations

import json
import lzma
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import birkhoff
from birkhoff import SaeSet
from birkhoff.embedded import shipped_dictionary
from birkhoff.errors import OptionError, SaeError, SaeFileError
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.feature_index import COMPRESSED, FILE, FeatureIndex
from birkhoff.sae.features import FeatureEntry
from tests.sae.reference import random_sae


def entry(
    feature: int, label: str, contexts: list[str], promotes: list[str] | None = None, **more
) -> FeatureEntry:
    told = [{"text": text, "value": 1.0} for text in contexts]
    return FeatureEntry(feature, label, 0.01, 2.0, told, promotes or [], [], **more)


SEA = entry(3, "about the sea", ["by the [sea] at", "a [boat] sank"], [" water"], made="rule", score=0.7)
WAVE = entry(5, '"wave"', ["a [wave] of the sea"], [" sea"], made="rule", score=0.6)
SAID = entry(9, '"said"', ["he [said] so", "she [said] seaside"], made="rule", score=0.9)
INDEX = FeatureIndex({one.feature: one for one in (SAID, SEA, WAVE)})


@pytest.mark.parametrize("compressed", [False, True])
def test_descriptions_come_back_from_their_file(tmp_path, compressed):
    path = INDEX.save(tmp_path, compressed)
    assert path.name == (COMPRESSED if compressed else FILE)
    assert dict(FeatureIndex.read(tmp_path)) == {3: SEA, 5: WAVE, 9: SAID}
    INDEX.save(tmp_path, not compressed)  # the other form does not stay behind
    assert len(list(tmp_path.iterdir())) == 1


def test_a_directory_without_descriptions_has_none_and_old_files_are_read(tmp_path):
    assert len(FeatureIndex.read(tmp_path)) == 0
    old = {
        "7": {"label": "x", "density": 0.1, "largest": 2, "contexts": [], "promotes": ["a"], "suppresses": []}
    }
    (tmp_path / FILE).write_text(json.dumps(old))
    assert FeatureIndex.read(tmp_path)[7] == FeatureEntry(7, "x", 0.1, 2.0, [], ["a"], [])


@pytest.mark.parametrize(
    "name, content",
    [
        (FILE, b"{"),
        (FILE, b"[1]"),
        (FILE, b'{"a": {}}'),
        (FILE, b'{"1": 2}'),
        (COMPRESSED, b"no xz"),
        (COMPRESSED, lzma.compress(b'{"1": {}}')[:-8]),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SaeFileError, match=name):
        FeatureIndex.read(tmp_path)


def test_words_in_labels_come_before_words_around():
    found = INDEX.search("sea")
    assert [match.entry.feature for match in found] == [3, 5, 9]
    assert found[0].where == ("label", "peaks", "contexts") and "promotes" in found[1].where
    assert found[2].where == ("contexts",)  # "seaside" begins with it
    assert [match.entry.feature for match in INDEX.search("SAID")] == [9]
    assert [match.entry.feature for match in INDEX.search("sea boat")] == [3]
    assert len(INDEX.search("sea", limit=1)) == 1 and INDEX.search("zebra") == []
    assert found[0].to_json()["label"] == "about the sea"


@pytest.mark.parametrize("words, limit", [("", 5), ("  ", 5), ("sea", 0)])
def test_an_empty_search_is_refused(words, limit):
    with pytest.raises(OptionError):
        INDEX.search(words, limit)


@given(st.text(max_size=30))
def test_any_words_can_be_searched(words):
    try:
        found = INDEX.search(words)
    except OptionError:
        return
    assert all(match.relevance > 0 and match.where for match in found)


def test_every_feature_of_nano_is_labelled_with_contexts_examples_and_a_score():
    sae = Sae.load(shipped_dictionary("nano"))
    described = sae.descriptions
    assert len(described) == sae.d_sae == len(sae.labels)
    for number, one in described.items():
        assert one.label == sae.labels[number] and one.made in ("rule", "peaks", "clamp")
        assert one.contexts and one.examples and all("[" in context["text"] for context in one.contexts)
        assert one.score is None or -1 <= one.score <= 1
    scored = sorted(one.score for one in described.values() if one.score is not None)
    assert len(scored) > 0.98 * len(described) and one.scored_rows > 5000
    assert scored[len(scored) // 2] > 0.3, "the median label predicts its feature on other texts"
    assert described.search("sea")[0].entry.label == "the sea"


def test_an_engine_tells_about_features():
    with birkhoff.load("nano", max_requests=1) as engine:
        engine.attach("mine", "nano")
        entry = engine.feature("mine", "the sea")
        assert entry.made == "clamp" and entry == engine.feature("mine", entry.feature)
        assert engine.search_features("mine", "the sea", limit=3)[0].entry == entry
        engine.attach(
            "bare", Sae.load(shipped_dictionary("nano")).at("mhc_streams_pre_attn", 5), replace=False
        )
        sae = Sae.load(shipped_dictionary("nano"))
        sae.directory = None
        engine.attach("nothing", sae, "full")
        with pytest.raises(SaeError, match="not described"):
            engine.feature("nothing", 3)
        text = "The little dog ran to the sea."
        for token in engine.features(text, "mine", k=64):
            assert all(feature.label for feature in token)
        strongest = engine.features(text, "mine", k=256, order="strength")
        specific = engine.features(text, "mine", k=3)
        described = sae_of(engine).descriptions
        for all_of_token, first in zip(strongest, specific):
            assert all_of_token == sorted(all_of_token, key=lambda hit: -hit.activation)
            by_weight = sorted(
                all_of_token, key=lambda hit: hit.activation * math.log(described[hit.feature].density)
            )
            assert first == by_weight[:3]
        assert engine.features(text, "nothing", k=3) == [row[:3] for row in strongest]
        with pytest.raises(OptionError, match="no descriptions"):
            engine.features(text, "nothing", order="specific")
        with pytest.raises(OptionError, match="order is 'loudest'"):
            engine.features(text, "mine", order="loudest")


def sae_of(engine) -> Sae:
    return next(iter(engine.saes.registry["mine"].saes.values()))


def test_labels_of_descriptions_name_features(tmp_path):
    """A dictionary that was described after training has no labels of its own: those of its descriptions count."""
    path = random_sae("jumprelu", 16, 384, seed=1, hook="mlp_out", layer=4, view="single").save(
        tmp_path / "d"
    )
    again = entry(11, '"wave"', ["a [wave] again"])
    FeatureIndex({**INDEX, 11: again}).save(path)
    sae = Sae.load(path)
    assert (
        not sae.labels
        and sae.feature("about the sea") == 3
        and sae.label(9) == '"said"'
        and sae.label(0) is None
    )
    with pytest.raises(SaeError, match=r"2 features are labelled '\"wave\"' \(\[5, 11\]\)"):
        sae.feature('"wave"')
    with pytest.raises(SaeError, match="Did you mean 'about the sea'"):
        sae.feature("about the se")
    with birkhoff.load("nano", max_requests=1) as engine:
        engine.attach("mine", sae)
        hits = {
            hit.feature: hit.label
            for token in engine.features("The fox ran to the sea.", "mine", k=16, order="strength")
            for hit in token
        }
        assert hits == {number: sae.label(number) for number in hits}
        assert any(hits.values())
        assert engine.feature("mine", "about the sea") == SEA
        by_label, by_number = (
            engine.logits("The fox ran", steer=[SaeSet("mine", {name: 4.0})]) for name in ("about the sea", 3)
        )
        assert by_label.equal(by_number)
