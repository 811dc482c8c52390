"""Build nano's steering vectors: a site from the search, a contrast there, and a measured effect.

    python -m training.vectors DATA SEARCHES OUT [NAME ...]        SEARCHES: output of training.search

Site and strength are chosen from trials on a few requests; the effect is then measured on other requests, five seeds
each, against a random vector of the same norm and the opposite sign. The judge is a word probe trained on paragraphs
that are not part of the contrast; a word list is a second judge. The output is a vector file and a JSON line per
concept.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import birkhoff
from birkhoff.analysis.steering_effect import best_trial, measure_effect, score_answers
from birkhoff.analysis.vector_search import Trial, scaled_vector
from birkhoff.steering.word_probe import WordProbe
from training.concepts import CONCEPTS, paragraphs, sets
from training.search import LENGTH, read_searches, rows_of, trials_of

LOSS_BOUND = 1.0  # maximum extra nats per token of steered text
SEARCH_BOUND = 0.7  # bound in the search, which sees few answers: LOSS_BOUND must hold on others too
SEEDS, BATCH = 5, 50

REQUESTS = [
    "Tell me a short story.",
    "Write a story about a boy named Tom.",
    "Tell me a story about a little house.",
    "Write a story about a birthday.",
    "Tell me a story about a train.",
    "Write a story about an old man.",
    "Tell me a story about a hat.",
    "Write a story about the rain.",
    "Tell me a story about a girl named Mia.",
    "Write a story about a lost key.",
    "Tell me a story about a market.",
    "Write a story about a mountain.",
    "Tell me a story about a boat.",
    "Write a story about a new school.",
    "Tell me a story about a tree.",
    "Write a story called The Empty Box.",
    "Tell me a story about a baker.",
    "Write a story about a bridge.",
    "Tell me a story about a letter.",
    "Write a story about a summer day.",
]


def chosen_trial(trials: list[Trial]) -> Trial:
    """Return the trial with the largest effect within the bound, else the best ratio."""
    return best_trial(trials, SEARCH_BOUND) or max(trials, key=lambda trial: trial.moved - trial.loss_gained)


def make(
    engine: birkhoff.Engine, name: str, texts: list[tuple[str, str]], search: dict[str, Any], out: Path
) -> dict[str, Any]:
    """Write the vector of a concept and return its measured effect."""
    concept, trials = CONCEPTS[name], trials_of(search)
    up, down, probe_up, probe_down = sets(concept, texts)
    probe = WordProbe.trained(probe_up, probe_down)
    chosen = chosen_trial(trials)
    rows = rows_of(engine, up, down, chosen.hook)
    vector = scaled_vector(engine, rows, chosen.layer, chosen.streams, chosen.strength, note=concept.meaning)
    plain = score_answers(engine, REQUESTS, SEEDS, probe.score, max_tokens=LENGTH)
    conditions, steered = measure_effect(
        engine, vector, REQUESTS, probe.score, SEEDS, plain=plain, max_tokens=LENGTH
    )
    effect: dict[str, Any] = {
        "requests": len(REQUESTS),
        "seeds": SEEDS,
        "tokens": LENGTH,
        "trials": len(trials),
        "judge": f"words of {len(probe_up)} and {len(probe_down)} other paragraphs",
        **{condition.name: condition.to_json() for condition in conditions},
    }
    if concept.words is not None:
        pairs = [
            (concept.words.score(a.text), concept.words.score(b.text))
            for a, b in zip(steered, plain, strict=True)
        ]
        shares = [sum(test) / len(pairs) for test in ([a > b for a, b in pairs], [a < b for a, b in pairs])]
        effect["word list"] = dict(zip(("moved", "fell"), shares, strict=True))
    out.mkdir(parents=True, exist_ok=True)
    replace(vector, scale=1.0, effect=effect).save(out / f"{name}.safetensors")
    samples = [answer.text for answer in steered[:4]]
    return {"name": name, "chosen": chosen.to_json(), "effect": effect, "samples": samples}


def main() -> None:
    data, searches, out, *names = sys.argv[1:]
    texts = list(paragraphs(Path(data)))
    search = read_searches(Path(searches))
    folder = Path(out)
    with birkhoff.load("nano", max_requests=BATCH) as engine:
        for name in names or search:
            result = make(engine, name, texts, search[name], folder)
            with (folder / "vectors.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(result) + "\n")
            print(name, json.dumps(result["chosen"]), json.dumps(result["effect"]), flush=True)


if __name__ == "__main__":
    main()
