"""Steering concepts of nano: pairs of paragraph classes, selected from story text by simple tests.

A concept classifies a paragraph (with its source) as one class or the other. Paragraphs come in a fixed order; the
first of each class give the direction, later ones train the probe that judges, so no paragraph is used for both. A
`WordProbe` list, where a concept has one, is a second, coarser judge.
"""

from __future__ import annotations

import itertools
import json
import lzma
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from birkhoff.steering.word_probe import WordProbe, words_of

PAIRS, PROBE_TEXTS = 60, 800
ASKED = "Tell me a story."

HAPPY = (
    "happy happily smile smiled smiling laugh laughed laughing fun joy joyful hug hugged love loved glad excited "
    "cheered proud"
)
SAD = "sad sadly cry cried crying tears lonely sorry hurt alone lost afraid upset unhappy missed gone heavy broken died"
ANIMALS = (
    "cat cats dog dogs bear bears rabbit bunny fox bird birds mouse mice frog lion tiger elephant monkey squirrel owl "
    "duck fish horse pony puppy kitten wolf deer turtle bee butterfly cow pig hen sheep animal animals paws tail fur "
    "whiskers"
)
PEOPLE = (
    "man woman boy girl mother father mom dad brother sister grandmother grandfather teacher friend children "
    "he she"
)
SEA = (
    "sea ocean boat ship sail waves wave beach sand shore island fish water captain harbor shell shells tide "
    "swim swam"
)
SELF = "i me my i'm i'd i've myself we our us"


@dataclass(frozen=True)
class Concept:
    """Two tests of a paragraph (with its source), and an optional word list as a second, coarser judge."""

    meaning: str
    positive: Callable[[str, str], bool]
    negative: Callable[[str, str], bool]
    words: WordProbe | None = None


def _share(words: str) -> Callable[[str], float]:
    chosen = set(words.split())
    return lambda text: sum(word in chosen for word in words_of(text)) / max(len(words_of(text)), 1)


def _quotes(text: str) -> float:
    return text.count('"') / max(len(text.split()), 1)


happy, sad, animals, people, sea, first = map(_share, (HAPPY, SAD, ANIMALS, PEOPLE, SEA, SELF))
STORIES = ("story", "child", "bedtime", "slice", "tiny")


def _story_test(test: Callable[[str], bool]) -> Callable[[str, str], bool]:
    """Restrict a test to paragraphs of stories."""
    return lambda source, text: source in STORIES and test(text)


def _from(*sources: str) -> Callable[[str, str], bool]:
    return lambda source, text: source in sources


CONCEPTS: dict[str, Concept] = {
    "spooky": Concept("a campfire tale rather than a children's story", _from("campfire"), _from("child")),
    "poem": Concept("verse rather than prose", _from("poem"), _from(*STORIES)),
    "dialogue": Concept(
        "people talking rather than narration",
        _story_test(lambda t: _quotes(t) > 0.08),
        _story_test(lambda t: _quotes(t) == 0),
        WordProbe.of_words(['"']),
    ),
    "happy": Concept(
        "joy rather than sorrow",
        _story_test(lambda t: happy(t) > 0.05 and sad(t) == 0),
        _story_test(lambda t: sad(t) > 0.035 and happy(t) == 0),
        WordProbe.of_words(HAPPY.split(), SAD.split()),
    ),
    "animals": Concept(
        "animals rather than people",
        _story_test(lambda t: animals(t) > 0.08),
        _story_test(lambda t: animals(t) == 0 and people(t) > 0.04),
        WordProbe.of_words(ANIMALS.split()),
    ),
    "first-person": Concept(
        "told by a character in the story",
        lambda s, t: first(t) > 0.08 and _quotes(t) == 0,
        _story_test(lambda t: first(t) == 0 and _quotes(t) == 0),
        WordProbe.of_words(SELF.split()),
    ),
    "facts": Concept("an explanation rather than a story", _from("wiki", "explain"), _from(*STORIES)),
    "sea": Concept(
        "by the sea",
        _story_test(lambda t: sea(t) > 0.06),
        _story_test(lambda t: sea(t) == 0),
        WordProbe.of_words(SEA.split()),
    ),
    "shouting": Concept(
        "exclamations rather than calm sentences",
        lambda s, t: s in (*STORIES, "explain") and t.count("!") >= 4,
        _story_test(lambda t: "!" not in t and _quotes(t) == 0),
        WordProbe.of_words(["!"]),
    ),
}


def paragraphs(data: Path) -> Iterator[tuple[str, str]]:
    """Yield (source, paragraph of 25 to 110 words) in a fixed shuffled order."""
    selected = []
    for name in ("stories-train", "tinystories-train"):
        with lzma.open(data / f"{name}.jsonl.xz", "rt", encoding="utf-8") as lines:
            for line in lines:
                record = json.loads(line)
                text = record["text"]
                if record["source"] in ("poem", "tiny"):
                    pieces = [text[:600], text[600:1200]]
                else:
                    pieces = re.split(r"\n\s*\n", text)
                selected += [
                    (record["source"], piece.strip()) for piece in pieces if 25 <= len(piece.split()) <= 110
                ]
    random.Random(5).shuffle(selected)
    yield from selected


def sets(concept: Concept, texts: list[tuple[str, str]]) -> tuple[list[str], list[str], list[str], list[str]]:
    """Return paragraphs for the contrast, and disjoint ones for the probe."""
    most = PAIRS + PROBE_TEXTS
    up, down = (
        list(itertools.islice((text for source, text in texts if test(source, text)), most))
        for test in (concept.positive, concept.negative)
    )
    return up[:PAIRS], down[:PAIRS], up[PAIRS:], down[PAIRS:]


def as_answer(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": ASKED}, {"role": "assistant", "content": text}]
