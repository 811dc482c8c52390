"""How well a dictionary describes rows: variance explained, features per row, features that never fire.

Sums are kept in float64 over any number of batches. Explained variance is 1 - |x - x^|^2 / |x - mean|^2, both summed
over all rows with the mean over all rows; a dictionary that says nothing but the mean scores 0. A feature is dead when
it fires on none of the rows that were seen, so the share falls the more rows there are: `rows` is said beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from birkhoff.errors import SaeError
from birkhoff.sae.dictionary import Sae


@dataclass(frozen=True)
class Quality:
    rows: int
    explained_variance: float
    l0: float
    dead_share: float
    cosine: float  # between a row and its reconstruction, on average

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Measure:
    """Add batches, then ask: `quality()`, `density`, `largest`."""

    def __init__(self, sae: Sae):
        self._sae = sae
        self.rows = 0
        self._total = torch.zeros(sae.d_model, dtype=torch.float64)
        self._squares = self._left = self._active = self._cosines = 0.0
        self._fired = torch.zeros(sae.d_sae, dtype=torch.long)
        self.largest = torch.zeros(sae.d_sae)

    def add(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [n, d]; their features [n, F]."""
        features = self._sae.encode(rows)
        left = rows.float() - self._sae.decode(features)
        exact = rows.double()
        self._total += exact.sum(0)
        self._squares += exact.pow(2).sum().item()
        self._left += left.double().pow(2).sum().item()
        live = features != 0
        self._active += live.sum().item()
        self._fired += live.sum(0)
        self._cosines += torch.cosine_similarity(rows.float(), rows.float() - left, dim=1).sum().item()
        self.largest = torch.maximum(self.largest, features.amax(0))
        self.rows += len(rows)
        return features

    @property
    def density(self) -> torch.Tensor:
        """The share of rows on which each feature fires, [F]."""
        return self._fired / max(self.rows, 1)

    def quality(self) -> Quality:
        if not self.rows:
            raise SaeError("no rows were measured. Add at least one batch.")
        variance = self._squares - self._total.pow(2).sum().item() / self.rows
        return Quality(
            self.rows,
            1 - self._left / variance if variance > 0 else float(self._left == 0),
            self._active / self.rows,
            (self._fired == 0).float().mean().item(),
            self._cosines / self.rows,
        )


def quality(sae: Sae, batches: Iterable[torch.Tensor]) -> Quality:
    measure = Measure(sae)
    for rows in batches:
        measure.add(rows)
    return measure.quality()
