"""Grid search for the site and strength at which a contrast vector steers best: hook x layer x stream x strength.

At every candidate the contrast direction is scaled to a multiple of the mean row norm there, so that strengths are
comparable across sites. Each trial answers the same prompts with the same seeds and is scored by a measure and by the
loss of its text under the unsteered model. The best trial moves the measure most among those whose loss increase is at
most `loss_bound`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from birkhoff.analysis.contrast import ContrastRows, vector_of
from birkhoff.analysis.steering_effect import Condition, ScoredAnswer, ScoreFunction, run_trials
from birkhoff.errors import OptionError
from birkhoff.steering.vector import Vector
from birkhoff.steering.vector_edits import Add
from birkhoff.steering.vector_file import SteeringVector

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine

Streams = tuple[int, ...] | None


@dataclass(frozen=True)
class Trial:
    """Result of steering at one site (`streams` None: all streams) with one strength."""

    hook: str
    layer: int
    streams: Streams
    strength: float
    score: float
    moved: float
    loss: float
    gained: float  # score minus the unsteered score
    loss_gained: float  # loss minus the unsteered loss

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
    """Return the contrast at one layer, scaled to `strength` times the mean row norm there."""
    vector = vector_of(engine, rows, [layer], how, streams, note)
    row_norm = fmean(float(row.norm()) for row in [*rows.positive[layer], *rows.negative[layer]])
    row = vector.at(layer).tensor()
    return replace(vector, rows={layer: Vector(row / row.norm() * row_norm * strength)}, normalised=False)


def candidates(rows: ContrastRows, layers: Sequence[int], each_stream: bool) -> Iterator[tuple[int, Streams]]:
    """Yield each layer with all streams, then with each stream separately if `each_stream`."""
    for layer in layers:
        yield layer, None
        if each_stream and rows.positive[layer].ndim == 3:
            yield from ((layer, (stream,)) for stream in range(rows.positive[layer].shape[1]))


def count_trials(
    contrasts: Mapping[str, ContrastRows], strengths: Sequence[float], each_stream: bool = True
) -> int:
    """Number of trials `search_vectors` runs over all layers of the contrasts."""
    sites = sum(len(list(candidates(rows, rows.layers, each_stream))) for rows in contrasts.values())
    return sites * len(strengths)


def search_vectors(
    engine: Engine,
    contrasts: Mapping[str, ContrastRows],
    requests: Sequence[str],
    measure: ScoreFunction,
    seeds: int,
    strengths: Sequence[float],
    *,
    layers: Sequence[int] | None = None,
    each_stream: bool = True,
    how: str = "mean_diff",
    plain: Sequence[ScoredAnswer] | None = None,
    progress: Callable[[Trial], None] | None = None,
    **sampling: Any,
) -> list[Trial]:
    """Run every candidate of every hook at every strength; `plain` are unsteered answers, computed if omitted."""
    if not contrasts or not requests or seeds < 1 or not strengths:
        raise OptionError("a search needs hooks, requests, seeds and strengths: at least one of each.")

    def tried() -> Iterator[tuple[list[Add], Callable[[Condition, Condition], Trial]]]:
        for hook, rows in contrasts.items():
            selected = rows.layers if layers is None else [layer for layer in layers if layer in rows.layers]
            for layer, streams in candidates(rows, selected, each_stream):
                for strength in strengths:
                    site = (hook, layer, streams, strength)
                    edits = [Add(scaled_vector(engine, rows, layer, streams, strength, how))]
                    yield edits, partial(_trial, site)

    return run_trials(engine, tried(), requests, measure, seeds, plain, progress, **sampling)


def _trial(site: tuple[str, int, Streams, float], steered: Condition, baseline: Condition) -> Trial:
    gained, loss_gained = steered.score - baseline.score, steered.loss - baseline.loss
    return Trial(*site, steered.score, steered.moved, steered.loss, gained, loss_gained)
