"""Quality of a dictionary on rows: explained variance, features per row, dead features.

Sums are accumulated in float64 over any number of batches. Explained variance is 1 - |x - x^|^2 / |x - mean|^2, both
summed over all rows with the mean over all rows; always predicting the mean scores 0. A feature is dead if it fires on
none of the rows, so the share of dead features falls with the number of rows, which is reported with it.
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
    """Accumulates batches (`add`) on the device they are on; results are `quality()`, `density` and `largest`."""

    def __init__(self, sae: Sae):
        self._sae = sae
        self.rows = 0
        self._total = torch.zeros(sae.d_model, dtype=torch.float64)
        self._squares = self._residual = self._active = self._cosines = 0.0
        self._fired = torch.zeros(sae.d_sae, dtype=torch.long)
        self.largest = torch.zeros(sae.d_sae)

    def add(self, rows: torch.Tensor) -> torch.Tensor:
        """Add rows [n, d]; returns their features [n, F]."""
        if self._total.device != rows.device:
            self._total, self._fired, self.largest = (
                tensor.to(rows.device) for tensor in (self._total, self._fired, self.largest)
            )
            self._sae = self._sae.to(rows.device)
        features = self._sae.encode(rows)
        residual = rows.float() - self._sae.decode(features, rows)
        exact = rows.double()
        self._total += exact.sum(0)
        self._squares += exact.pow(2).sum().item()
        self._residual += residual.double().pow(2).sum().item()
        active = features != 0
        self._active += active.sum().item()
        self._fired += active.sum(0)
        self._cosines += torch.cosine_similarity(rows.float(), rows.float() - residual, dim=1).sum().item()
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
            1 - self._residual / variance if variance > 0 else float(self._residual == 0),
            self._active / self.rows,
            (self._fired == 0).float().mean().item(),
            self._cosines / self.rows,
        )


def quality(sae: Sae, batches: Iterable[torch.Tensor]) -> Quality:
    measure = Measure(sae)
    for rows in batches:
        measure.add(rows)
    return measure.quality()
