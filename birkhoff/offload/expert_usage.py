"""Which experts are worth device memory: reads per step, remembered with a half-life, and the exchanges they suggest.

An expert costs the bus one read in every step that asks for it while it is cold, and every expert has the same size, so
the best set of n hot ones is the n that are read most often, whatever their layers. Rates are estimates: two
experts are exchanged only when the difference is beyond chance and pays for the copies within a few hundred steps, so
that equal ones do not take turns.
"""

from __future__ import annotations

import torch

from birkhoff.offload.expert_counts import ExpertCounts
from birkhoff.offload.expert_store import Expert

HALF_LIFE = 20_000  # steps
DEVIATIONS = (
    6.0  # of the difference of two rates; among ten thousand equal experts the extremes are 5.6 apart
)
LEAST_GAIN = 0.004  # reads a step: the two copies of an exchange are paid back within 500 steps


class ExpertUsage:
    """`rates` [layers, experts]: the share of steps that read each expert. Begins from `counts`, or from nothing."""

    def __init__(
        self, layers: int, experts: int, counts: ExpertCounts | None = None, half_life: float = HALF_LIFE
    ):
        self._kept = 0.5 ** (1 / half_life)
        self._reads = torch.zeros(layers, experts, dtype=torch.float64)
        self._steps = 0.0
        if counts is not None and counts.steps:
            worth = min(1.0, half_life / counts.steps)  # what was counted before is worth a half-life at most
            self._reads = counts.reads.double() * worth
            self._steps = counts.steps * worth

    @property
    def rates(self) -> torch.Tensor:
        return self._reads / max(self._steps, 1.0)

    def note(self, reads: torch.Tensor, steps: int) -> None:
        """Reads of the last `steps` steps."""
        kept = self._kept**steps
        self._reads = self._reads * kept + reads.double()
        self._steps = self._steps * kept + steps

    def counts(self) -> ExpertCounts:
        steps = round(self._steps)
        return ExpertCounts(self._reads.round().long().clamp(max=steps), steps)

    def hottest(self, count: int) -> torch.Tensor:
        """[layers, experts] bool: the `count` with the highest rates; among equals all layers take turns."""
        layers, experts = self._reads.shape
        order = self._reads.T.flatten().sort(descending=True, stable=True).indices[:count]
        chosen = torch.zeros(layers * experts, dtype=torch.bool).index_fill_(0, order, True)
        return chosen.view(experts, layers).T.contiguous()

    def exchanges(self, resident: torch.Tensor, most: int) -> list[tuple[Expert, Expert]]:
        """Up to `most` pairs (arriving, leaving) that pay, the one that gains most first."""
        rates = self.rates
        hot, cold = resident.nonzero(), (~resident).nonzero()
        count = min(most, len(hot), len(cold))
        if not count or self._steps < 1:
            return []
        arriving = rates[~resident].topk(count)
        leaving = rates[resident].topk(count, largest=False)
        chance = DEVIATIONS * ((arriving.values + leaving.values) / self._steps).sqrt()
        pays = arriving.values - leaving.values > chance.clamp(min=LEAST_GAIN)
        pairs = zip(cold[arriving.indices].tolist(), hot[leaving.indices].tolist(), pays.tolist())
        return [((a[0], a[1]), (b[0], b[1])) for a, b, worth in pairs if worth]
