"""Descriptions of features: where each fires most strongly, how often, and a suggested label.

`FeatureBook` processes texts one by one and keeps, for every feature, the positions where it was strongest, at most
one per text; memory does not grow with the number of texts. `suggested_label` labels a feature by the tokens it
peaks on, as a starting point for a label written after reading the contexts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from birkhoff.sae.dictionary import Sae

MAX_ROWS_AT_ONCE = 512


@dataclass(frozen=True)
class Peak:
    """The maximum of a feature in one text."""

    text: int
    position: int
    value: float


class FeatureBook:
    def __init__(self, sae: Sae, contexts: int = 8):
        sae.check_whole("a summary of features")
        self._sae = sae
        self.contexts = contexts
        self.rows = 0
        self.texts = 0
        self._values = torch.zeros(sae.d_sae, contexts)
        self._texts = torch.full((sae.d_sae, contexts), -1)
        self._positions = torch.zeros(sae.d_sae, contexts, dtype=torch.long)
        self._fired = torch.zeros(sae.d_sae, dtype=torch.long)

    def add(self, rows: torch.Tensor, first: int = 0, rows_per_token: int = 1) -> None:
        """Add the rows [n, d] of the next text in token order; `first` is the position of the first row."""
        best = torch.zeros(self._sae.d_sae)
        where = torch.zeros(self._sae.d_sae, dtype=torch.long)
        for start in range(0, len(rows), MAX_ROWS_AT_ONCE):
            features = self._sae.encode(rows[start : start + MAX_ROWS_AT_ONCE])
            self._fired += (features > 0).sum(0)
            value, index = features.max(0)
            better = value > best
            best = torch.where(better, value, best)
            where = torch.where(better, start + index, where)
        self.rows += len(rows)
        values = torch.cat([self._values, best.unsqueeze(1)], 1)
        kept, order = values.topk(self.contexts, dim=1)
        texts = torch.cat([self._texts, torch.full((len(best), 1), self.texts)], 1)
        positions = torch.cat([self._positions, (first + where // rows_per_token).unsqueeze(1)], 1)
        self._values = kept
        self._texts = texts.gather(1, order)
        self._positions = positions.gather(1, order)
        self.texts += 1

    @property
    def density(self) -> torch.Tensor:
        """The share of rows on which each feature fires."""
        return self._fired / max(self.rows, 1)

    @property
    def largest(self) -> torch.Tensor:
        return self._values[:, 0]

    def peaks(self, feature: int) -> list[Peak]:
        """The peaks of a feature, strongest first; fewer than `contexts` if it fired in fewer texts."""
        peaks = zip(
            self._texts[feature].tolist(), self._positions[feature].tolist(), self._values[feature].tolist()
        )
        return [Peak(text, position, value) for text, position, value in peaks if value > 0]


def suggested_label(at: Sequence[str], after: Sequence[str]) -> str:
    """A label from the tokens that a feature peaks on and those that follow: one token if it is nearly always the
    same."""
    for tokens, form in ((at, '"{}"'), (after, 'before "{}"')):
        words = Counter(token.strip().lower() for token in tokens)
        word, count = words.most_common(1)[0] if words else ("", 0)
        if word and count >= 0.7 * len(tokens):
            return form.format(word)
    several = [word for word, _ in Counter(token.strip().lower() for token in at).most_common(4) if word]
    return " / ".join(several) or "spaces and breaks"


@dataclass(frozen=True)
class FeatureEntry:
    """The description of one feature."""

    feature: int
    label: str
    density: float
    largest: float
    contexts: list[dict[str, Any]]
    promotes: list[str]
    suppresses: list[str]

    def to_json(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "density": round(self.density, 6),
            "largest": round(self.largest, 3),
            "promotes": self.promotes,
            "suppresses": self.suppresses,
            "contexts": self.contexts,
        }
