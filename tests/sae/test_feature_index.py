"""Descriptions of features: files, damaged files, and search by word."""

from __future__ import annotations

import json
import lzma

import pytest
from hypothesis import given
from hypothesis import strategies as st

from birkhoff.errors import OptionError, SaeFileError
from birkhoff.sae.feature_index import COMPRESSED, FILE, FeatureIndex
from birkhoff.sae.features import FeatureEntry


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
