"""Make nano's steering vectors: contrast sets from story text, a search for place and strength, and a measured effect.

    python -m training.vectors DATA OUT [--short] [NAME ...]        DATA holds the *-train.jsonl.xz files

Every vector is a contrast of paragraphs (`CONCEPTS`) read as answers to a plain request. Place and strength are found
on a few requests; the effect is then measured on others that the search never saw, five seeds each, beside a random
vector of the same norm and the opposite sign. What judges is a probe over words trained on paragraphs that took no
part in the contrast; a plain list of words is a second judge. Out come a vector file and a JSON line per concept.
"""

from __future__ import annotations

import itertools
import json
import lzma
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import birkhoff
from birkhoff.api.contrast import ContrastRows, contrast_rows
from birkhoff.api.effect import Answer, answers, effect
from birkhoff.api.search import Trial, best_trial, scaled_vector, search
from birkhoff.steering.probe import WordProbe, words_of

LOSS_BOUND = 1.0  # nats per token that a steered text may cost more than an unsteered one
PAIRS, PROBE_TEXTS = 60, 800
HOOK = "mhc_streams_pre_attn"
LAYERS, STRENGTHS = [2, 4, 6], [0.3, 0.6]
SEEDS, BATCH = 5, 50
ASKED = "Tell me a story."
LENGTH = 40  # tokens of an answer that is judged

SEARCH_REQUESTS = [
    "Tell me a story about a girl named Lily.", "Write a short story about a garden.",
    "Write a story called The Red Door.", "Write a story about a long walk.",
]  # fmt: skip
REQUESTS = [
    "Tell me a short story.", "Write a story about a boy named Tom.", "Tell me a story about a little house.",
    "Write a story about a birthday.", "Tell me a story about a train.", "Write a story about an old man.",
    "Tell me a story about a hat.", "Write a story about the rain.", "Tell me a story about a girl named Mia.",
    "Write a story about a lost key.", "Tell me a story about a market.", "Write a story about a mountain.",
    "Tell me a story about a boat.", "Write a story about a new school.", "Tell me a story about a tree.",
    "Write a story called The Empty Box.", "Tell me a story about a baker.", "Write a story about a bridge.",
    "Tell me a story about a letter.", "Write a story about a summer day.",
]  # fmt: skip

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
    "man woman boy girl mother father mom dad brother sister grandmother grandfather teacher friend children he she"
)
SEA = (
    "sea ocean boat ship sail waves wave beach sand shore island fish water captain harbor shell shells tide swim swam"
)
SELF = "i me my i'm i'd i've myself we our us"


@dataclass(frozen=True)
class Concept:
    """Two tests of a paragraph (with its source); a list of words, where there is one, is a second, coarser judge."""

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


def _told(test: Callable[[str], bool]) -> Callable[[str, str], bool]:
    """A test of paragraphs of stories alone."""
    return lambda source, text: source in STORIES and test(text)


def _from(*sources: str) -> Callable[[str, str], bool]:
    return lambda source, text: source in sources


CONCEPTS: dict[str, Concept] = {
    "spooky": Concept("a campfire tale rather than a children's story", _from("campfire"), _from("child")),
    "poem": Concept("verse rather than prose", _from("poem"), _from(*STORIES)),
    "dialogue": Concept(
        "people talking rather than narration", _told(lambda t: _quotes(t) > 0.08), _told(lambda t: _quotes(t) == 0),
        WordProbe.of_words(['"']),
    ),
    "happy": Concept(
        "joy rather than sorrow",
        _told(lambda t: happy(t) > 0.05 and sad(t) == 0), _told(lambda t: sad(t) > 0.035 and happy(t) == 0),
        WordProbe.of_words(HAPPY.split(), SAD.split()),
    ),
    "animals": Concept(
        "animals rather than people",
        _told(lambda t: animals(t) > 0.08), _told(lambda t: animals(t) == 0 and people(t) > 0.04),
        WordProbe.of_words(ANIMALS.split()),
    ),
    "first-person": Concept(
        "told by somebody in the story",
        lambda s, t: first(t) > 0.08 and _quotes(t) == 0, _told(lambda t: first(t) == 0 and _quotes(t) == 0),
        WordProbe.of_words(SELF.split()),
    ),
    "facts": Concept("an explanation rather than a story", _from("wiki", "explain"), _from(*STORIES)),
    "sea": Concept(
        "by the sea", _told(lambda t: sea(t) > 0.06), _told(lambda t: sea(t) == 0), WordProbe.of_words(SEA.split())
    ),
    "shouting": Concept(
        "exclamations rather than calm sentences",
        lambda s, t: s in (*STORIES, "explain") and t.count("!") >= 4,
        _told(lambda t: "!" not in t and _quotes(t) == 0),
        WordProbe.of_words(["!"]),
    ),
}  # fmt: skip


def paragraphs(data: Path) -> Iterator[tuple[str, str]]:
    """(source, paragraph of 25 to 110 words), in an order of its own."""
    found = []
    for name in ("stories-train", "tinystories-train"):
        with lzma.open(data / f"{name}.jsonl.xz", "rt", encoding="utf-8") as lines:
            for line in lines:
                record = json.loads(line)
                text = record["text"]
                if record["source"] in ("poem", "tiny"):
                    pieces = [text[:600], text[600:1200]]
                else:
                    pieces = re.split(r"\n\s*\n", text)
                found += [(record["source"], piece.strip()) for piece in pieces if 25 <= len(piece.split()) <= 110]
    random.Random(5).shuffle(found)
    yield from found


def sets(concept: Concept, texts: list[tuple[str, str]]) -> tuple[list[str], list[str], list[str], list[str]]:
    """Paragraphs for the contrast and others for the probe."""
    most = PAIRS + PROBE_TEXTS
    up, down = (
        list(itertools.islice((text for source, text in texts if test(source, text)), most))
        for test in (concept.positive, concept.negative)
    )
    return up[:PAIRS], down[:PAIRS], up[PAIRS:], down[PAIRS:]


def as_answer(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": ASKED}, {"role": "assistant", "content": text}]


def make(engine: birkhoff.Engine, name: str, texts: list[tuple[str, str]], out: Path, short: bool) -> dict[str, object]:
    concept = CONCEPTS[name]
    up, down, probe_up, probe_down = sets(concept, texts)
    probe = WordProbe.trained(probe_up, probe_down)
    rows = contrast_rows(engine, [as_answer(t) for t in up], [as_answer(t) for t in down], HOOK, LAYERS)
    trials = _searched(engine, rows, probe, short)
    chosen = best_trial(trials, LOSS_BOUND) or max(trials, key=lambda trial: trial.moved - trial.loss_gained)
    vector = scaled_vector(engine, rows, chosen.layer, chosen.streams, chosen.strength, note=concept.meaning)
    plain = answers(engine, REQUESTS, SEEDS, probe.score, max_tokens=LENGTH)
    conditions, given = effect(engine, vector, REQUESTS, probe.score, SEEDS, plain=plain, max_tokens=LENGTH)
    numbers = {condition.name: condition.to_json() for condition in conditions}
    table = [entry.to_json() for entry in rows.separation()]
    told = {
        "requests": len(REQUESTS),
        "seeds": SEEDS,
        "tokens": LENGTH,
        "judge": f"words of {len(probe_up)} and {len(probe_down)} other paragraphs",
        **numbers,
    }
    if concept.words is not None:
        pairs = [(concept.words.score(a.text), concept.words.score(b.text)) for a, b in zip(given, plain)]
        up_share, down_share = (
            sum(test) / len(pairs) for test in ([a > b for a, b in pairs], [a < b for a, b in pairs])
        )
        told["word list"] = {"moved": up_share, "fell": down_share}
    vector = replace(vector, scale=1.0, effect=told)
    out.mkdir(parents=True, exist_ok=True)
    vector.save(out / f"{name}.safetensors")
    return {
        "name": name, "meaning": concept.meaning, "pairs": min(len(up), len(down)), "chosen": chosen.to_json(),
        "effect": told, "separation": table, "trials": [trial.to_json() for trial in trials],
        "samples": [answer.text for answer in given[:4]],
    }  # fmt: skip


def _searched(engine: birkhoff.Engine, rows: ContrastRows, probe: WordProbe, short: bool) -> list[Trial]:
    """All streams at every layer first; then stream by stream at the best layer. In short: the two later layers only,
    where vectors that were searched in full ended up."""
    seeds = 2
    plain: list[Answer] = answers(engine, SEARCH_REQUESTS, seeds, probe.score, max_tokens=LENGTH)
    common: dict[str, Any] = {"plain": plain, "seeds": seeds, "requests": SEARCH_REQUESTS, "measure": probe.score}
    common |= {"max_tokens": LENGTH, "strengths": STRENGTHS}
    trials = search(engine, {HOOK: rows}, each_stream=False, layers=LAYERS[1:] if short else LAYERS, **common)
    leading = best_trial(trials, LOSS_BOUND)
    if leading is not None and not short:
        more = search(engine, {HOOK: rows}, layers=[leading.layer], **common)
        trials += [trial for trial in more if trial.streams is not None]
    return trials


def main() -> None:
    short = "--short" in sys.argv
    data, out, *names = (word for word in sys.argv[1:] if word != "--short")
    texts = list(paragraphs(Path(data)))
    with birkhoff.load("nano", max_requests=BATCH) as engine:
        for name in names or CONCEPTS:
            result = make(engine, name, texts, Path(out), short)
            with (Path(out) / "vectors.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(result) + "\n")
            found = result["effect"]
            print(name, json.dumps(result["chosen"]), json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
