"""What a steering vector does to text, measured: against no vector, a random one of its size, and its opposite.

The same requests run with the same seeds in every condition, so answers compare one by one. A measure says how much
a text is of the wanted kind; `moved` is the share of answers above their unsteered twin. `loss` is what
the unsteered model thinks of the text, in nats per token: steering that breaks the language shows there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from birkhoff.steering.vector_edits import Add
from birkhoff.steering.vector_file import SteeringVector

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine

Measure = Callable[[str], float]
SAMPLING = {"max_tokens": 60, "temperature": 0.8, "top_k": 40}


@dataclass(frozen=True)
class ScoredAnswer:
    prompt: int
    choice: int
    text: str
    score: float
    loss: float


@dataclass(frozen=True)
class Condition:
    """One way to steer, over all requests and seeds."""

    name: str
    score: float
    moved: float  # share of answers that score above their unsteered twin
    fell: float  # share below it; the rest scores the same
    loss: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def answers(
    engine: Engine,
    requests: Sequence[str],
    seeds: int,
    measure: Measure,
    steer: Any = None,
    seed: int = 0,
    losses: int | None = None,
    **sampling: Any,
) -> list[ScoredAnswer]:
    """Every request answered `seeds` times, all in one batch; the same `seed` draws the same for the same request.

    The loss is found for the first `losses` answers only, when that is given; it is NaN for the others."""
    prompts = [engine.encode_chat([{"role": "user", "content": request}]) for request in requests]
    outputs = engine.generate(prompts, steer=steer, seed=seed, n=seeds, **{**SAMPLING, **sampling})
    found: list[ScoredAnswer] = []
    for number, choices in enumerate(outputs):
        for choice, output in enumerate(choices if seeds > 1 else [choices]):
            wanted = losses is None or len(found) < losses
            loss = text_loss(engine, output.prompt_token_ids, output.token_ids) if wanted else math.nan
            found.append(ScoredAnswer(number, choice, output.text, measure(output.text), loss))
    return found


def text_loss(engine: Engine, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> float:
    """Nats per token of an answer under the unsteered model."""
    if not answer_ids:
        return 0.0
    ids = [*prompt_ids, *answer_ids]
    chances = engine.logits(ids)[len(prompt_ids) - 1 : -1].log_softmax(-1)
    return -chances.gather(1, torch.tensor(list(answer_ids)).unsqueeze(1)).mean().item()


def compared(name: str, steered: Sequence[ScoredAnswer], plain: Sequence[ScoredAnswer]) -> Condition:
    pairs = list(zip(steered, plain, strict=True))
    moved = fmean(a.score > b.score for a, b in pairs)
    fell = fmean(a.score < b.score for a, b in pairs)
    losses = [a.loss for a in steered if not math.isnan(a.loss)]
    return Condition(name, fmean(a.score for a in steered), moved, fell, fmean(losses))


def random_like(vector: SteeringVector, seed: int = 0) -> SteeringVector:
    """A vector in a random direction with the same norm at the same places, block by block where blocks are silent."""
    generator = torch.Generator().manual_seed(seed)
    rows = {}
    for layer, row in vector.rows.items():
        old = row.tensor()
        drawn = torch.randn(old.shape, generator=generator) * (old != 0)
        rows[layer] = drawn / drawn.norm() * old.norm()
    return replace(vector, rows=rows, method="random", normalised=False)


def effect(
    engine: Engine,
    vector: SteeringVector,
    requests: Sequence[str],
    measure: Measure,
    seeds: int,
    scale: float = 1.0,
    plain: Sequence[ScoredAnswer] | None = None,
    **sampling: Any,
) -> tuple[list[Condition], list[ScoredAnswer]]:
    """Baseline, steered, random and opposite, in this order; and the steered answers themselves."""
    plain = plain or answers(engine, requests, seeds, measure, **sampling)
    conditions = [compared("baseline", plain, plain)]
    kept: list[ScoredAnswer] = []
    for name, used, sign in (
        ("steered", vector, 1),
        ("random", random_like(vector), 1),
        ("opposite", vector, -1),
    ):
        steer = [Add(used, scale=sign * scale)]
        losses = None if name == "steered" else len(requests)  # a fifth is enough to see what the others cost
        given = answers(engine, requests, seeds, measure, steer, losses=losses, **sampling)
        conditions.append(compared(name, given, plain))
        kept = given if name == "steered" else kept
    return conditions, kept
