"""Which experts separate two sets of texts, and steering by them: `ExpertSet` from a contrast, and a search.

For every text and layer, the share of its tokens that got each expert (`moe_topk`). `ExpertContrast.separation` is the
d' and AUC of that share between the two sets, per expert; both are descriptive: no text is left out. `edits` favours
the experts of the positive set at some layers, by adding to their scores or by forcing them, and disfavours those of
the negative set, by subtracting or banning. `search_experts` tries numbers of experts and strengths as `vector_search`
tries sites: the same prompts with the same seeds, scored against unsteered answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from birkhoff.analysis.contrast import check_texts, text_rows
from birkhoff.analysis.steering_effect import Condition, ScoredAnswer, ScoreFunction, run_trials
from birkhoff.errors import OptionError, SteeringError, quoted
from birkhoff.hooks.layers import parse_layers
from birkhoff.steering.expert_edits import ExpertSet
from birkhoff.steering.extract import auc, d_prime

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine

Way = Literal["add", "choice"]
WAYS: tuple[Way, ...] = ("add", "choice")


@dataclass(frozen=True)
class ExpertSeparation:
    """One expert of one layer: the share of tokens that get it in each set of texts, and how well it separates them."""

    layer: int
    expert: int
    positive: float
    negative: float
    d_prime: float
    auc: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, eq=False)
class ExpertContrast:
    """`positive[layer]` and `negative[layer]`: the share of a text's tokens that got each expert, [texts, experts]."""

    positive: Mapping[int, torch.Tensor]
    negative: Mapping[int, torch.Tensor]
    topk: int

    @property
    def layers(self) -> list[int]:
        return sorted(self.positive)

    def separation(self) -> list[ExpertSeparation]:
        """Every expert of every layer, the largest absolute d' first."""
        entries = [
            ExpertSeparation(
                layer,
                expert,
                float(self.positive[layer][:, expert].mean()),
                float(self.negative[layer][:, expert].mean()),
                d_prime(self.positive[layer][:, expert], self.negative[layer][:, expert]),
                auc(self.positive[layer][:, expert], self.negative[layer][:, expert]),
            )
            for layer in self.layers
            for expert in range(self.positive[layer].shape[1])
        ]
        return sorted(entries, key=lambda entry: -abs(entry.d_prime))

    def edits(self, count: int, way: Way, strength: float = 1.0, phase: str = "both") -> list[ExpertSet]:
        """Edits that favour the `count` experts with the largest d' of all layers and disfavour the `count` with the
        smallest: `strength` is added to and subtracted from scores, or they are forced and banned (at most as many of a
        layer as a token gets)."""
        ordered = sorted(self.separation(), key=lambda entry: -entry.d_prime)
        up = [entry for entry in ordered[:count] if entry.d_prime > 0]
        down = [entry for entry in ordered[::-1][:count] if entry.d_prime < 0]
        edits = []
        for layer in sorted({entry.layer for entry in (*up, *down)}):
            favoured = [entry.expert for entry in up if entry.layer == layer]
            others = [entry.expert for entry in down if entry.layer == layer]
            if way == "add":
                added = dict.fromkeys(favoured, strength) | dict.fromkeys(others, -strength)
                edits.append(ExpertSet([layer], add=added, phase=phase))
            else:
                free = self.positive[layer].shape[1] - self.topk
                edits.append(ExpertSet([layer], force=favoured[: self.topk], ban=others[:free], phase=phase))
        return edits


def contrast_experts(
    engine: Engine, positive: Sequence[Any], negative: Sequence[Any], layers: Any = "all"
) -> ExpertContrast:
    """Run both sets of texts and count the experts of their tokens."""
    check_texts(positive, negative)
    if "moe_topk" not in engine.schema or "experts" not in engine.schema["moe_topk"].edits:
        raise SteeringError("this model has no router that can be edited: experts need DeepSeek-V4.")
    chosen = parse_layers(layers).expand(engine.config.num_hidden_layers)
    experts = engine.schema["moe_router_logits"].width
    topk = engine.schema["moe_topk"].logical_shape[0]

    def shares(rows: torch.Tensor) -> torch.Tensor:
        return torch.bincount(rows[..., 0].long().flatten(), minlength=experts) / len(rows)

    sites = {layer: ("moe_topk", layer) for layer in chosen}
    ours, theirs = (text_rows(engine, texts, sites, shares) for texts in (positive, negative))
    return ExpertContrast(ours, theirs, topk)


@dataclass(frozen=True)
class ExpertTrial:
    """Result of steering with some experts of each side, in one way and strength."""

    count: int
    way: Way
    strength: float
    score: float
    moved: float
    fell: float
    loss: float
    gained: float  # score minus the unsteered score
    loss_gained: float  # loss minus the unsteered loss

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def search_experts(
    engine: Engine,
    contrast: ExpertContrast,
    requests: Sequence[str],
    measure: ScoreFunction,
    seeds: int,
    counts: Sequence[int],
    strengths: Sequence[float],
    *,
    ways: Sequence[Way] = WAYS,
    plain: Sequence[ScoredAnswer] | None = None,
    progress: Callable[[ExpertTrial], None] | None = None,
    **sampling: Any,
) -> list[ExpertTrial]:
    """Answer the requests with the edits of every number of experts, way and strength (forcing has none)."""
    if not requests or seeds < 1 or not counts or min(counts) < 1:
        raise OptionError("a search needs requests, seeds and numbers of experts: at least one of each.")
    unknown = [way for way in ways if way not in WAYS]
    if unknown:
        raise OptionError(f"ways has {quoted(unknown[0])}, expected {', '.join(WAYS)}.")

    tried = (
        (contrast.edits(count, way, strength), partial(_trial, (count, way, strength)))
        for count in counts
        for way in ways
        for strength in (strengths if way == "add" else (1.0,))
    )
    return run_trials(engine, tried, requests, measure, seeds, plain, progress, **sampling)


def _trial(choice: tuple[int, Way, float], steered: Condition, baseline: Condition) -> ExpertTrial:
    effect = (steered.score, steered.moved, steered.fell, steered.loss)
    return ExpertTrial(*choice, *effect, steered.score - baseline.score, steered.loss - baseline.loss)
