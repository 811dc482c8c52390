"""Building nano's vectors and SAE: disjoint texts for probe and contrast, trial selection, the shipped directory."""

from __future__ import annotations

import json

import pytest
import torch

from birkhoff.analysis.vector_search import Trial
from birkhoff.sae.compact import rounded
from birkhoff.sae.dictionary import Sae
from tests.sae.reference import random_sae
from training import concepts, dictionary, labels, search, themes, vectors


def told(source: str, count: int, sentence: str) -> list[tuple[str, str]]:
    return [(source, f"{sentence} It was day {index}.") for index in range(count)]


def test_no_paragraph_makes_a_direction_and_judges_it():
    texts = told("campfire", 90, "The dark house creaked.") + told("child", 70, "The bunny hopped.")
    up, down, probe_up, probe_down = concepts.sets(concepts.CONCEPTS["spooky"], texts)
    assert len(up) == len(down) == concepts.PAIRS and len(probe_up) == 30 and len(probe_down) == 10
    assert not set(up) & set(probe_up) and not set(down) & set(probe_down)
    assert all("dark" in text for text in up + probe_up) and all(
        "bunny" in text for text in down + probe_down
    )


@pytest.mark.parametrize(
    ("name", "yes", "no"),
    [
        (
            "dialogue",
            '"Come here," said the fox. "Why?" "Look!" said he. "I see." "Good."',
            "The fox sat by the tree.",
        ),
        ("happy", "They laughed and hugged and smiled.", "He cried, sad and lonely, and was sorry."),
        (
            "animals",
            "The cat, the dog and the bear met a fox.",
            "The man and the woman met a boy and a girl.",
        ),
        ("sea", "The ship crossed the sea to an island.", "The train crossed the hills to a town."),
    ],
)
def test_a_concept_knows_its_two_kinds_in_stories_alone(name, yes, no):
    concept = concepts.CONCEPTS[name]
    assert concept.positive("child", yes) and not concept.positive("child", no)
    assert concept.negative("child", no) and not concept.negative("child", yes)
    assert not concept.positive("wiki", yes) and not concept.negative("wiki", no)


def trial(layer: int, streams: tuple[int, ...] | None, moved: float, loss: float) -> Trial:
    return Trial("mhc_streams_pre_attn", layer, streams, 0.25, 0.5, moved, 1.0 + loss, moved, loss)


def test_the_trial_that_moves_most_at_a_fair_price_is_chosen():
    trials = [
        trial(2, None, 0.5, 0.1),
        trial(4, (1,), 0.9, 0.6),
        trial(4, None, 1.0, vectors.SEARCH_BOUND + 0.1),
    ]
    assert vectors.chosen_trial(trials) is trials[1]
    dear = [trial(4, None, 1.0, 3.0), trial(6, None, 0.9, 1.2)]
    assert vectors.chosen_trial(dear) is dear[1]
    assert vectors.SEARCH_BOUND < vectors.LOSS_BOUND and not set(vectors.REQUESTS) & set(search.REQUESTS)


def test_searches_are_read_back_and_tabled(tmp_path):
    path = tmp_path / "search.jsonl"
    assert search.read_searches(path) == {}
    trials = [trial(4, None, 0.75, 0.25), trial(4, (2,), 0.5, -0.125)]
    result = {"name": "sea", "trials": [one.to_json() for one in trials], "separation": []}
    path.write_text(json.dumps(result) + "\n")
    back = search.read_searches(path)["sea"]
    assert search.trials_of(back) == trials
    row = next(
        line
        for line in search.tables(back).splitlines()
        if line.startswith("| `mhc_streams_pre_attn[4]` | 0.25")
    )
    assert row == "| `mhc_streams_pre_attn[4]` | 0.25 | 75% +0.25 | – | – | 50% -0.12 | – |"


def test_texts_are_the_same_every_time_and_no_record_is_trained_and_judged(data, tmp_path):
    folder, corpus, _ = data
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        dictionary.write_texts(folder, tmp_path / name)
    for file in ("train.jsonl", "held-out.jsonl"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    trained, judged = (
        [
            json.loads(line)["messages"][1]["content"]
            for line in (tmp_path / "one" / name).read_text().splitlines()
        ]
        for name in ("train.jsonl", "held-out.jsonl")
    )
    held_out = [record.text for records in corpus.held_out.values() for record in records]
    assert sorted(judged) == sorted(held_out) and len(trained) == 120


def entry(label: str, density: float = 0.01, contexts: int = 5) -> dict:
    return {
        "label": label,
        "made": "rule",
        "score": 0.5,
        "density": density,
        "largest": 2.0,
        "promotes": ["a"] * 8,
        "suppresses": ["b"] * 8,
        "contexts": [{"text": "a [b] c", "value": 1.0}] * contexts,
    }


def test_the_folder_has_one_name_for_each_feature_it_describes(tmp_path):
    sae = rounded(
        random_sae("jumprelu", hook="mhc_streams_pre_attn", layer=5, view="flat", x_max=torch.ones(24))
    )
    entries = {
        "3": entry('"dog"'),
        "4": entry('"dog"', 0.02) | {"score": 0.9},
        "5": entry("a / b"),
        "6": entry("everywhere", 0.5),
        "7": entry("seldom", contexts=2),
        "8": entry('before "x"', 0.001),
    }
    size = labels.ship(sae, entries, {6: "the sea"}, {"model_name": "nano"}, tmp_path / "sae")
    assert size == sum(path.stat().st_size for path in (tmp_path / "sae").iterdir())
    back = Sae.load(tmp_path / "sae")
    assert back.labels == {
        3: '"dog" (2)',
        4: '"dog" (1)',
        5: "a / b",
        6: "the sea",
        7: "seldom",
        8: 'before "x"',
    }
    assert {feature: entry.label for feature, entry in back.descriptions.items()} == back.labels
    assert back.descriptions[6].made == "clamp" and back.descriptions[7].made == "rule"
    assert torch.equal(back.encoder, sae.encoder) and torch.equal(back.decoder, sae.decoder)
    assert back.metadata["model_name"] == "nano"


def test_candidates_of_a_theme_show_and_speak_its_words():
    def about(contexts: list[str], promotes: list[str]) -> dict:
        return {"contexts": [{"text": text, "value": 1.0} for text in contexts], "promotes": promotes}

    entries = {
        "1": about(["a [dog] ran"], ["the"]),
        "2": about(["the [sea] rose", "a [ship]"], [" Ocean"]),
        "3": about(["by [the] sea"], ["a"]),
        "4": about(["x", "y"], [" sea", "ship"]),
    }
    words = {"sea", "ship", "ocean"}
    assert themes.candidates(entries, words, set()) == [2, 4, 3, 1]
    assert themes.candidates(entries, words, {2, 1}) == [4, 3]


def test_the_feature_that_led_most_answers_is_chosen_and_the_first_of_equals():
    tried = [{"feature": feature, "moved": moved} for feature, moved in ((3, 8), (1, 9), (2, 9))]
    assert themes.chosen(tried)["feature"] == 1


def test_a_stage_that_is_done_is_left_alone(tmp_path):
    path = tmp_path / "found.json"
    assert dictionary.kept(path, lambda: {"a": 1}) == {"a": 1}
    assert dictionary.kept(path, lambda: pytest.fail("made twice")) == {"a": 1}
