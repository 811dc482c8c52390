"""Features about what a story is about: found by paragraphs that hold a theme's words, proved by raising them.

Of every theme some features tell paragraphs with its words from paragraphs without them best (d' of the mean
activation of a paragraph). Each is raised while the model answers a trial request, and the one after which most
answers hold more of the theme's words is kept. The proof is another request and other seeds: answers with more of the
words than the unsteered answer of the same seed, beside live features drawn at random and raised by the same amount
(decoder rows have norm one, so the rows of the model are moved equally far).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

import birkhoff
from birkhoff import SaeSet
from birkhoff.api.sae_rows import view_rows
from birkhoff.sae.dictionary import Sae
from birkhoff.steering.probe import WordProbe, words_of
from training.concepts import as_answer

THEMES = {
    "the sea": "sea ocean water waters waves wave fish swim swam shore boat ship beach island river lake sail",
    "haunted and eerie": "dark darkness ghost ghosts haunted eerie cursed shadow shadows afraid strange twisted terror "
    "cold scream whispers",
    "planets and stars": "planet planets galaxy universe star stars earth space moon cosmos galaxies",
    "the forest": "forest woods tree trees leaves branches dense wood jungle path",
    "kings and castles": "king queen palace castle royal prince princess kingdom crown lady throne",
    "cooking and kitchens": "kitchen cook cooking cake bread smell eat ate food cream delicious bake baked baker taste "
    "tasted cookies",
    "school": "school class teacher students lesson learn classroom book books",
    "winter": "snow cold ice winter snowman frost frozen coat mittens warm",
    "dogs and cats": "dog dogs puppy cat cats kitten tail bark barked paws fur",
    "music": "song songs music sing sang singing dance danced guitar piano melody drum",
    "mother and father": "mom mommy mother dad daddy father parents",
    "cars and trains": "car cars train trains truck road drive drove wheels engine bus",
}
PARAGRAPHS, DENSE = 40, 0.06  # of each kind; share of a paragraph's words
CANDIDATES, STRENGTHS = 3, (1.5, 2.0)  # strengths in largest activations
TRIAL, PROOF = ("Write a short story.", 100), ("Tell me a story.", 3)  # request and first seed
SEEDS, LENGTH, RANDOM = 10, 50, 3
LIVE = (0.002, 0.2)  # densities of the features drawn at random


def find_themes(
    engine: birkhoff.Engine, sae: Sae, texts: Sequence[tuple[str, str]], density: Mapping[int, float]
) -> list[dict[str, Any]]:
    """For each theme the feature and strength that led most trial answers there."""
    found: list[dict[str, Any]] = []
    with engine.attach("dictionary", sae):
        plain = _answers(engine, TRIAL, None)
        for theme, words in THEMES.items():
            probe, tried = WordProbe.of_words(words.split()), []
            free = density.keys() - {trial["feature"] for trial in found}
            for feature, d_prime in _tells_apart(engine, sae, texts, set(words.split()), free):
                for strength in STRENGTHS:
                    amount = strength * float(sae.x_max[feature])
                    moved = _moved(probe, _answers(engine, TRIAL, {feature: amount}), plain)
                    tried.append({"theme": theme, "feature": feature, "strength": strength, "moved": moved,
                                  "d_prime": round(d_prime, 2)})  # fmt: skip
            found.append(max(tried, key=lambda trial: (trial["moved"], -trial["strength"])))
    return found


def measure_clamps(
    engine: birkhoff.Engine, sae: Sae, themes: Sequence[Mapping[str, Any]], density: Mapping[int, float]
) -> list[dict[str, Any]]:
    """What raising each theme's feature does on another request, beside random live features; best first."""
    generator = torch.Generator().manual_seed(0)
    live = [feature for feature, share in sorted(density.items()) if LIVE[0] < share < LIVE[1]]
    found = []
    with engine.attach("dictionary", sae):
        plain = _answers(engine, PROOF, None)
        for trial in themes:
            feature, probe = trial["feature"], WordProbe.of_words(THEMES[trial["theme"]].split())
            amount = trial["strength"] * float(sae.x_max[feature])
            raised = _answers(engine, PROOF, {feature: amount})
            others = [live[place] for place in torch.randint(len(live), (RANDOM,), generator=generator).tolist()]
            by_chance = sum(_moved(probe, _answers(engine, PROOF, {other: amount}), plain) for other in others)
            found.append({
                "theme": trial["theme"], "feature": feature, "strength": trial["strength"], "seeds": SEEDS,
                "moved": _moved(probe, raised, plain), "random": others, "random_moved": by_chance,
                "random_seeds": SEEDS * RANDOM, "density": density[feature], "d_prime": trial["d_prime"],
                "answer": raised[0],
            })  # fmt: skip
    return sorted(found, key=lambda clamp: (-clamp["moved"], clamp["random_moved"]))


def _tells_apart(
    engine: birkhoff.Engine, sae: Sae, texts: Sequence[tuple[str, str]], words: set[str], free: Set[int]
) -> list[tuple[int, float]]:
    """The features among `free` that tell paragraphs dense in these words from paragraphs without them, best first."""
    shares = ((text, sum(word in words for word in words_of(text)) / len(words_of(text))) for _, text in texts)
    wanted: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for text, share in shares:
        kind = share >= DENSE
        if (kind or share == 0) and len(wanted[kind]) < PARAGRAPHS:
            wanted[kind].append(_mean_activation(engine, sae, text))
        if all(len(rows) == PARAGRAPHS for rows in wanted.values()):
            break
    up, down = torch.stack(wanted[True]), torch.stack(wanted[False])
    spread = ((up.var(0) + down.var(0)) / 2).sqrt().clamp(min=1e-6)
    d_prime = (up.mean(0) - down.mean(0)) / spread
    known = torch.tensor([feature in free for feature in range(sae.d_sae)])
    best = d_prime.masked_fill(~known, float("-inf")).topk(CANDIDATES)
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def _mean_activation(engine: birkhoff.Engine, sae: Sae, text: str) -> torch.Tensor:
    assert sae.hook is not None and sae.layer is not None, "a trained dictionary has its place"
    ids = engine.encode_chat(as_answer(text))
    start = len(engine.encode_chat(as_answer(text)[:1]))
    rows = engine.trace(ids, [sae.hook])[sae.hook, sae.layer][start:-1]
    return sae.encode(view_rows(rows, sae.view)).mean(0)


def _answers(engine: birkhoff.Engine, asked: tuple[str, int], raised: Mapping[int, float] | None) -> list[str]:
    request, seed = asked
    prompt = engine.encode_chat([{"role": "user", "content": request}])
    steer = None if raised is None else [SaeSet("dictionary", dict(raised), kind="additive")]
    outputs = engine.generate(prompt, n=SEEDS, seed=seed, max_tokens=LENGTH, temperature=0.8, top_k=40, steer=steer)
    return [output.text for output in outputs]


def _moved(probe: WordProbe, raised: Sequence[str], plain: Sequence[str]) -> int:
    return sum(probe.score(a) > probe.score(b) for a, b in zip(raised, plain, strict=True))
