"""Search for the place and the strength at which a contrast steers best: site x layer x stream x strength.

At every candidate the direction from the contrast is scaled to a share of the mean row norm there, so that strengths
compare across places. Each trial answers the same requests with the same seeds and is judged by a measure and by the
loss of its text under the unsteered model. The best trial moves the measure most among those that stay within
`loss_bound` of the unsteered loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from birkhoff.analysis.contrast import ContrastRows, vector_of
from birkhoff.analysis.effect import Measure, ScoredAnswer, answers, compared
from birkhoff.errors import OptionError
from birkhoff.steering.vector import Vector
from birkhoff.steering.vector_edits import Add
from birkhoff.steering.vector_file import SteeringVector

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine

Streams = tuple[int, ...] | None


@dataclass(frozen=True)
class Trial:
    hook: str
    layer: int
    streams: Streams
    strength: float
    score: float
    moved: float
    loss: float
    gained: float  # score above the unsteered one
    loss_gained: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"streams": None if self.streams is None else list(self.streams)}


def scaled_vector(
    engine: Engine,
    rows: ContrastRows,
    layer: int,
    streams: Streams,
    strength: float,
    how: str = "mean_diff",
    note: str = "",
) -> SteeringVector:
    """The contrast at one place, as long as `strength` times the mean row there."""
    vector = vector_of(engine, rows, [layer], how, streams, note)
    both = [*rows.positive[layer], *rows.negative[layer]]
    size = fmean(float(row.norm()) for row in both)
    row = vector.at(layer).tensor()
    return replace(vector, rows={layer: Vector(row / row.norm() * size * strength)}, normalised=False)


def candidates(rows: ContrastRows, layers: Sequence[int], each_stream: bool) -> Iterator[tuple[int, Streams]]:
    for layer in layers:
        yield layer, None
        if each_stream and rows.positive[layer].ndim == 3:
            yield from ((layer, (stream,)) for stream in range(rows.positive[layer].shape[1]))


def search(
    engine: Engine,
    contrasts: Mapping[str, ContrastRows],
    requests: Sequence[str],
    measure: Measure,
    seeds: int,
    strengths: Sequence[float],
    *,
    layers: Sequence[int] | None = None,
    each_stream: bool = True,
    how: str = "mean_diff",
    plain: Sequence[ScoredAnswer] | None = None,
    tell: Callable[[Trial], None] | None = None,
    **sampling: Any,
) -> list[Trial]:
    """Every candidate of every hook at every strength."""
    if not contrasts or not requests or seeds < 1 or not strengths:
        raise OptionError("a search needs hooks, requests, seeds and strengths: at least one of each.")
    plain = plain or answers(engine, requests, seeds, measure, **sampling)
    base = compared("baseline", plain, plain)
    trials: list[Trial] = []
    for hook, rows in contrasts.items():
        chosen = rows.layers if layers is None else [layer for layer in layers if layer in rows.layers]
        for layer, streams in candidates(rows, chosen, each_stream):
            for strength in strengths:
                vector = scaled_vector(engine, rows, layer, streams, strength, how)
                given = answers(engine, requests, seeds, measure, [Add(vector)], **sampling)
                found = compared("steered", given, plain)
                trial = Trial(
                    hook,
                    layer,
                    streams,
                    strength,
                    found.score,
                    found.moved,
                    found.loss,
                    found.score - base.score,
                    found.loss - base.loss,
                )
                trials.append(trial)
                if tell is not None:
                    tell(trial)
    return trials


def best_trial(trials: Sequence[Trial], loss_bound: float) -> Trial | None:
    """The strongest effect among those whose text stays close to the model's own; None when none does."""
    kept = [trial for trial in trials if trial.loss_gained <= loss_bound]
    return max(kept, key=lambda trial: (trial.moved, trial.gained), default=None)
