"""Measures the effect of a steering vector on generated text, against no vector, a random one and its opposite.

The same prompts run with the same seeds in every condition, so that answers compare one by one. A measure maps a text
to a score; `moved` is the share of answers that score above their unsteered twin. `loss` is the loss of the text under
the unsteered model in nats per token; it rises when steering damages the language.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from birkhoff.steering.vector_edits import Add
from birkhoff.steering.vector_file import SteeringVector

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine
    from birkhoff.output import Output

ScoreFunction = Callable[[str], float]
SAMPLING = {"max_tokens": 60, "temperature": 0.8, "top_k": 40}


@dataclass(frozen=True)
class ScoredAnswer:
    """Answer number `choice` to prompt number `prompt`, its score and its loss in nats per token."""

    prompt: int
    choice: int
    text: str
    score: float
    loss: float


@dataclass(frozen=True)
class Condition:
    """Mean results of one way to steer, over all prompts and seeds."""

    name: str
    score: float
    moved: float  # share of answers that score above their unsteered twin
    fell: float  # share below it; the rest scores the same
    loss: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def score_answers(
    engine: Engine,
    requests: Sequence[str],
    seeds: int,
    measure: ScoreFunction,
    steer: Any = None,
    seed: int = 0,
    losses: int | None = None,
    **sampling: Any,
) -> list[ScoredAnswer]:
    """Answer every request `seeds` times in one batch and score the answers; the same `seed` gives the same draws.

    With `losses`, only the first `losses` answers get a loss; it is NaN for the others.
    """
    prompts = [engine.encode_chat([{"role": "user", "content": request}]) for request in requests]
    outputs: Sequence[Output | list[Output]] = engine.generate(
        prompts, steer=steer, seed=seed, n=seeds, **{**SAMPLING, **sampling}
    )
    scored: list[ScoredAnswer] = []
    for index, choices in enumerate(outputs):
        for choice, output in enumerate(choices if isinstance(choices, list) else [choices]):
            with_loss = losses is None or len(scored) < losses
            loss = text_loss(engine, output.prompt_token_ids, output.token_ids) if with_loss else math.nan
            scored.append(ScoredAnswer(index, choice, output.text, measure(output.text), loss))
    return scored


def text_loss(engine: Engine, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> float:
    """Loss of an answer under the unsteered model, in nats per token."""
    if not answer_ids:
        return 0.0
    ids = [*prompt_ids, *answer_ids]
    logprobs = engine.logits(ids)[len(prompt_ids) - 1 : -1].log_softmax(-1)
    return -float(logprobs.gather(1, torch.tensor(list(answer_ids)).unsqueeze(1)).mean())


def compare_answers(name: str, steered: Sequence[ScoredAnswer], plain: Sequence[ScoredAnswer]) -> Condition:
    """Aggregate steered answers against their unsteered twins."""
    pairs = list(zip(steered, plain, strict=True))
    moved = fmean(a.score > b.score for a, b in pairs)
    fell = fmean(a.score < b.score for a, b in pairs)
    losses = [a.loss for a in steered if not math.isnan(a.loss)]
    return Condition(name, fmean(a.score for a in steered), moved, fell, fmean(losses))


class _HasEffect(Protocol):
    @property
    def moved(self) -> float: ...

    @property
    def gained(self) -> float: ...

    @property
    def loss_gained(self) -> float: ...


T = TypeVar("T", bound=_HasEffect)


def run_trials(
    engine: Engine,
    candidates: Iterable[tuple[Any, Callable[[Condition, Condition], T]]],
    requests: Sequence[str],
    measure: ScoreFunction,
    seeds: int,
    plain: Sequence[ScoredAnswer] | None,
    progress: Callable[[T], None] | None,
    **sampling: Any,
) -> list[T]:
    """Answer the requests with the edits of every candidate, the same prompts with the same seeds. A candidate also
    makes its trial of its condition and that of unsteered answers, which are `plain` or computed."""
    plain = plain or score_answers(engine, requests, seeds, measure, **sampling)
    baseline = compare_answers("baseline", plain, plain)
    trials: list[T] = []
    for edits, make in candidates:
        answers = score_answers(engine, requests, seeds, measure, edits, **sampling)
        trials.append(make(compare_answers("steered", answers, plain), baseline))
        if progress is not None:
            progress(trials[-1])
    return trials


def best_trial(trials: Sequence[T], loss_bound: float) -> T | None:
    """The trial with the largest effect whose loss increase is at most `loss_bound`.

    None if there is none, or if none of them raised the score: the best of vectors that do nothing is not a result."""
    allowed = [trial for trial in trials if trial.loss_gained <= loss_bound and trial.gained > 0]
    return max(allowed, key=lambda trial: (trial.moved, trial.gained), default=None)


def random_like(vector: SteeringVector) -> SteeringVector:
    """Return a random vector with the same layers, norms and zero entries."""
    generator = torch.Generator().manual_seed(0)
    rows = {}
    for layer, row in vector.rows.items():
        original = row.tensor()
        noise = torch.randn(original.shape, generator=generator) * (original != 0)
        rows[layer] = noise / noise.norm() * original.norm()
    return replace(vector, rows=rows, method="random", normalised=False)


def measure_effect(
    engine: Engine,
    vector: SteeringVector,
    requests: Sequence[str],
    measure: ScoreFunction,
    seeds: int,
    plain: Sequence[ScoredAnswer] | None = None,
    **sampling: Any,
) -> tuple[list[Condition], list[ScoredAnswer]]:
    """Return the conditions baseline, steered, random and opposite, and the steered answers."""
    plain = plain or score_answers(engine, requests, seeds, measure, **sampling)
    conditions = [compare_answers("baseline", plain, plain)]
    steered: list[ScoredAnswer] = []
    for name, used, sign in (
        ("steered", vector, 1),
        ("random", random_like(vector), 1),
        ("opposite", vector, -1),
    ):
        steer = [Add(used, scale=sign)]
        losses = None if name == "steered" else len(requests)  # a sample is enough for the control conditions
        answers = score_answers(engine, requests, seeds, measure, steer, losses=losses, **sampling)
        conditions.append(compare_answers(name, answers, plain))
        if name == "steered":
            steered = answers
    return conditions, steered
