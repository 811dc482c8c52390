"""Descriptions of features: where each fires most strongly, examples of its other activations, how often it fires, and
a label that says how it was made.

`FeatureBook` processes texts one by one and keeps, for every feature, the positions where it was strongest and some
drawn at random from all positions where it was active, at most one of each per text; memory does not grow with the
number of texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from birkhoff import notebook
from birkhoff.sae.dictionary import Sae

PART = 1 << 24  # activations that exist at a time


@dataclass(frozen=True)
class Peak:
    """An activation of a feature in one text: the largest one, or one drawn at random."""

    text: int
    position: int
    value: float


class FeatureBook:
    def __init__(
        self,
        sae: Sae,
        contexts: int = 8,
        examples: int = 3,
        device: torch.device | str = "cpu",
        part: int = PART,
    ):
        sae.check_whole("a summary of features")
        self._sae = sae
        self.contexts = contexts
        self.rows = 0
        self.texts = 0
        self._part = part
        self._generator = torch.Generator(device).manual_seed(0)
        self._strongest = _Kept(sae.d_sae, contexts, device)
        self._drawn = _Kept(sae.d_sae, examples, device)
        self._fired = torch.zeros(sae.d_sae, dtype=torch.long, device=device)

    def add(
        self,
        rows: torch.Tensor,
        first: int = 0,
        rows_per_token: int = 1,
        each: Callable[[int, torch.Tensor], None] | None = None,
    ) -> None:
        """Add the rows [n, d] of the next text in token order; `first` is the position of the first row.

        A long text is encoded in parts. `each` gets the position of the first token of every part and its activations
        [tokens, features]; of several rows of a token the largest."""
        strongest, drawn = _Best(), _Best()
        tokens = max(1, self._part // (self._sae.d_sae * rows_per_token))
        for part in rows.split(tokens * rows_per_token) if len(rows) else ():
            features = self._sae.encode(part)
            active = features > 0
            self._fired += active.sum(0)
            if rows_per_token > 1:
                features = features.view(-1, rows_per_token, self._sae.d_sae).amax(1)
                active = features > 0
            lot = torch.rand(features.shape, generator=self._generator, device=rows.device).mul_(active)
            strongest.add(features, features, first)
            drawn.add(lot, features, first)
            if each is not None:
                each(first, features)
            first += len(features)
        if len(rows):
            self._strongest.offer(strongest, self.texts)
            self._drawn.offer(drawn, self.texts)
        self.rows += len(rows)
        self.texts += 1

    @property
    def density(self) -> torch.Tensor:
        """The share of rows on which each feature fires."""
        return self._fired / max(self.rows, 1)

    @property
    def largest(self) -> torch.Tensor:
        return self._strongest.values[:, 0]

    def peaks(self, feature: int) -> list[Peak]:
        """The peaks of a feature, strongest first; fewer than `contexts` if it fired in fewer texts."""
        return self._strongest.of(feature)

    def drawn(self, feature: int) -> list[Peak]:
        """Activations drawn at random, one text each, strongest first."""
        return sorted(self._drawn.of(feature), key=lambda peak: -peak.value)


class _Best:
    """For every feature the position with the largest rank in one text, with its value there."""

    rank: torch.Tensor
    value: torch.Tensor
    position: torch.Tensor

    def add(self, ranks: torch.Tensor, values: torch.Tensor, first: int) -> None:
        """Ranks and values [tokens, features] of the tokens from `first` on."""
        rank, index = ranks.max(0)
        value, position = values.gather(0, index[None])[0], first + index
        if hasattr(self, "rank"):
            later = rank > self.rank
            value = torch.where(later, value, self.value)
            position = torch.where(later, position, self.position)
            rank = torch.maximum(rank, self.rank)
        self.rank, self.value, self.position = rank, value, position


class _Kept:
    """For every feature the `size` texts with the largest rank, each with a position and a value."""

    def __init__(self, features: int, size: int, device: torch.device | str = "cpu"):
        self._ranks = torch.zeros(features, size, device=device)
        self.values = torch.zeros(features, size, device=device)
        self._texts = torch.full((features, size), -1, device=device)
        self._positions = torch.zeros(features, size, dtype=torch.long, device=device)

    def offer(self, best: _Best, text: int) -> None:
        """One candidate per feature; a rank of 0 is none."""
        ranks = torch.cat([self._ranks, best.rank[:, None]], 1)
        self._ranks, order = ranks.topk(self._ranks.shape[1], dim=1)
        self.values = torch.cat([self.values, best.value[:, None]], 1).gather(1, order)
        texts = torch.full((len(ranks), 1), text, device=ranks.device)
        self._texts = torch.cat([self._texts, texts], 1).gather(1, order)
        self._positions = torch.cat([self._positions, best.position[:, None]], 1).gather(1, order)

    def of(self, feature: int) -> list[Peak]:
        columns = (self._texts, self._positions, self.values)
        kept = zip(*(column[feature].tolist() for column in columns))
        return [Peak(text, position, value) for text, position, value in kept if text >= 0 and value > 0]


@dataclass(frozen=True)
class FeatureEntry:
    """The description of one feature.

    `made` says how the label was made: "rule" (the best simple rule, see `feature_rules`), "peaks" (no rule predicts
    it; the tokens it is strongest on), "given" (it came with the dictionary) or "clamp" (named after what raising it
    does, measured). `score` is the correlation of `rule` with the activation on `scored_rows` rows of texts that had
    no part in its choice."""

    feature: int
    label: str
    density: float
    largest: float
    contexts: list[dict[str, Any]]
    promotes: list[str]
    suppresses: list[str]
    examples: list[dict[str, Any]] = field(default_factory=list)
    made: str = "given"
    rule: dict[str, list[str]] | None = None
    score: float | None = None
    scored_rows: int = 0
    cofires: list[dict[str, Any]] = field(default_factory=list)  # features that fire on the same tokens

    def __repr__(self) -> str:
        score = "" if self.score is None else f", score {self.score:.2f}"
        return (
            f"FeatureEntry({self.feature}: {self.label}; on {self.density:.2%} of tokens, largest {self.largest:.3g}"
            f"{score}, {len(self.contexts)} contexts)"
        )

    def _repr_html_(self) -> str:
        """A card: what the feature is, what it promotes, and its strongest contexts."""
        facts = {
            "density": f"{self.density:.3%}",
            "largest": f"{self.largest:.3g}",
            "label made by": self.made,
            "score": None if self.score is None else f"{self.score:.2f} on {self.scored_rows} rows",
            "promotes": ", ".join(map(repr, self.promotes[:10])) or None,
            "suppresses": ", ".join(map(repr, self.suppresses[:10])) or None,
        }
        card = notebook.facts(f"Feature {self.feature}: {self.label}", facts)
        rows = [
            (f"{context['activation']:.3g}" if "activation" in context else "", context.get("text", ""))
            for context in self.contexts[:10]
        ]
        return card + (notebook.table(("activation", "context"), rows) if rows else "")

    def to_json(self) -> dict[str, Any]:
        partners = {"cofires": self.cofires} if self.cofires else {}
        return {
            "label": self.label,
            "made": self.made,
            "rule": self.rule,
            "score": None if self.score is None else round(self.score, 3),
            "scored_rows": self.scored_rows,
            "density": round(self.density, 6),
            "largest": round(self.largest, 3),
            "promotes": self.promotes,
            "suppresses": self.suppresses,
            "contexts": self.contexts,
            "examples": self.examples,
            **partners,
        }

    @staticmethod
    def from_json(feature: int, entry: Mapping[str, Any]) -> FeatureEntry:
        """The entry of a file; files of earlier versions have no `made`, `rule`, `score` and `examples`."""

        def listed(name: str, kind: type) -> list[Any]:
            value = entry.get(name)
            return [one for one in value if isinstance(one, kind)] if isinstance(value, list) else []

        def number(name: str) -> float:
            value = entry.get(name)
            return float(value) if isinstance(value, (int, float)) else 0.0

        score, rule = entry.get("score"), entry.get("rule")
        return FeatureEntry(
            feature,
            str(entry.get("label", "")),
            number("density"),
            number("largest"),
            listed("contexts", dict),
            listed("promotes", str),
            listed("suppresses", str),
            listed("examples", dict),
            str(entry.get("made", "given")),
            rule if isinstance(rule, dict) else None,
            float(score) if isinstance(score, (int, float)) else None,
            int(number("scored_rows")),
            listed("cofires", dict),
        )
