"""Find SAE features for story themes: candidates by a theme's words, verified by raising them.

Candidates of a theme are the features with most of its words in their strongest contexts and promoted tokens. Each is
raised while the model answers a trial request; of those whose text does not cost the unsteered model far more, the one
after which most answers contain more of the words is kept. It is verified with another request and other seeds:
answers with more of the words than the unsteered answer of the same seed, compared with random live features raised by
the same amount (decoder rows have norm one, so the model's rows move equally far).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch

import birkhoff
from birkhoff import SaeSet
from birkhoff.analysis.steering_effect import ScoredAnswer, score_answers
from birkhoff.sae.dictionary import Sae
from birkhoff.steering.word_probe import WordProbe, words_of

THEMES = {
    "the sea": "sea ocean water waters waves wave fish swim swam shore boat ship beach island river lake sail",
    "planets and stars": "planet planets galaxy universe star stars earth space moon cosmos galaxies",
    "mother and father": "mom mommy mother dad daddy father parents",
    "the forest": "forest woods tree trees leaves branches dense wood jungle path",
    "food and drink": "food eat ate eating drink drank cook cooking bake baked kitchen cake bread cream milk sugar "
    "soup fruit juice pie cookies chocolate delicious yummy tasty taste tasted sweet hungry breakfast lunch dinner",
    "rain and storms": "rain rainy storm clouds cloud wind thunder wet umbrella puddle",
    "smiles": "smile smiled smiling laugh laughed laughing grin grinned giggled",
    "tears": "sad sadly cry cried crying tears",
    "night": "night moon dark sleep asleep bed bedtime dream dreams",
    "speech": "said asked replied shouted told answered says",
    "playing": "play played playing game games toy toys ball",
}
CANDIDATES, STRENGTHS = (
    4,
    (1.5, 2.0, 0.6),
)  # strengths in multiples of the largest activation; the first of equals is kept
# request and first seed
TRIAL = ("Write a short story.", 100)
PROOF = ("Tell me a story about a day.", 5000)
SEEDS = 10
LENGTH = 50
RANDOM = 3
LOSS_BOUND = 2.0  # nats per token; text above this is degenerate
PROVED = 8  # of ten answers, for a feature to be named after its theme
LIVE = (0.002, 0.2)  # densities of the features drawn at random

Entries = Mapping[str, Mapping[str, Any]]


def find_themes(engine: birkhoff.Engine, sae: Sae, entries: Entries) -> list[dict[str, Any]]:
    """Return for each theme the feature and strength that moved most trial answers; no feature is used twice."""
    results: list[dict[str, Any]] = []
    with engine.attach("dictionary", sae):
        plain = _answers(engine, TRIAL, None)
        for theme, words in THEMES.items():
            probe, tried = WordProbe.of_words(words.split()), []
            taken = {trial["feature"] for trial in results}
            for feature in candidates(entries, set(words.split()), taken):
                for strength in STRENGTHS:
                    raised = _answers(engine, TRIAL, {feature: strength * float(sae.x_max[feature])})
                    moved, loss = _moved(probe, raised, plain), _loss(raised)
                    tried.append(
                        {
                            "theme": theme,
                            "feature": feature,
                            "strength": strength,
                            "moved": moved,
                            "loss": loss,
                        }
                    )
            results.append(chosen([t for t in tried if t["loss"] <= _loss(plain) + LOSS_BOUND] or tried))
    return results


def chosen(tried: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the candidate that moved most answers; the first of equals, as candidates are sorted by word count."""
    return max(tried, key=lambda trial: trial["moved"])


def candidates(entries: Entries, words: set[str], taken: set[int]) -> list[int]:
    """Return the unused features most related to these words."""

    def tells(feature: str) -> tuple[int, int, int]:
        entry = entries[feature]
        shown = sum(any(word in words for word in words_of(context["text"])) for context in entry["contexts"])
        spoken = sum(token.strip().lower() in words for token in entry["promotes"])
        return shown + spoken, spoken, -int(feature)

    free = [feature for feature in entries if int(feature) not in taken]
    return [int(feature) for feature in sorted(free, key=tells, reverse=True)[:CANDIDATES]]


def measure_clamps(
    engine: birkhoff.Engine, sae: Sae, themes: Sequence[Mapping[str, Any]], entries: Entries
) -> list[dict[str, Any]]:
    """Measure raising each theme's feature on another request, against random live features; best first."""
    generator = torch.Generator().manual_seed(0)
    live = sorted(int(feature) for feature, entry in entries.items() if LIVE[0] < entry["density"] < LIVE[1])
    results = []
    with engine.attach("dictionary", sae):
        plain = _answers(engine, PROOF, None)
        for trial in themes:
            feature = trial["feature"]
            probe = WordProbe.of_words(THEMES[trial["theme"]].split())
            amount = trial["strength"] * float(sae.x_max[feature])
            raised = _answers(engine, PROOF, {feature: amount})
            others = [
                live[index] for index in torch.randint(len(live), (RANDOM,), generator=generator).tolist()
            ]
            chance = [_answers(engine, PROOF, {other: amount}) for other in others]
            results.append(
                {
                    "theme": trial["theme"],
                    "feature": feature,
                    "strength": trial["strength"],
                    "seeds": SEEDS,
                    "moved": _moved(probe, raised, plain),
                    "random": others,
                    "random_seeds": SEEDS * RANDOM,
                    "random_moved": sum(_moved(probe, answered, plain) for answered in chance),
                    "loss_gained": _loss(raised) - _loss(plain),
                    "density": entries[str(feature)]["density"],
                    "random_loss_gained": fmean(map(_loss, chance)) - _loss(plain),
                    "words": THEMES[trial["theme"]],
                    "answer": raised[0].text,
                }
            )
    return sorted(results, key=lambda clamp: (-clamp["moved"], clamp["random_moved"]))


def _answers(
    engine: birkhoff.Engine, asked: tuple[str, int], raised: Mapping[int, float] | None
) -> list[ScoredAnswer]:
    """Return unscored answers: every theme scores the same plain answers with its own words."""
    request, seed = asked
    steer = None if raised is None else [SaeSet("dictionary", dict(raised), kind="additive")]
    return score_answers(engine, [request], SEEDS, lambda text: 0.0, steer, seed, max_tokens=LENGTH)


def _moved(probe: WordProbe, raised: Sequence[ScoredAnswer], plain: Sequence[ScoredAnswer]) -> int:
    return sum(probe.score(a.text) > probe.score(b.text) for a, b in zip(raised, plain, strict=True))


def _loss(results: Sequence[ScoredAnswer]) -> float:
    return fmean(answer.loss for answer in results)
