"""Traffic for tests of placement: experts asked for with given shares, and how much of it a set of hot ones catches."""

from __future__ import annotations

import torch


def zipf(layers: int, experts: int, exponent: float, seed: int) -> torch.Tensor:
    """[layers, experts] shares that fall as rank ** -exponent, experts in another order in every layer."""
    g = torch.Generator().manual_seed(seed)
    falling = torch.arange(1, experts + 1, dtype=torch.float64) ** -exponent
    order = torch.stack([torch.randperm(experts, generator=g) for _ in range(layers)])
    return (falling / falling.sum()).expand(layers, -1).gather(1, order)


class Traffic:
    """Steps of one token that uses `places` different experts in every layer."""

    def __init__(self, shares: torch.Tensor, places: int, seed: int):
        self.shares, self.places, self.generator = shares, places, torch.Generator().manual_seed(seed)

    def steps(self, count: int) -> torch.Tensor:
        """[count, layers, experts] bool: the experts read in each step."""
        drawn = torch.multinomial(
            self.shares.repeat(count, 1), self.places, replacement=False, generator=self.generator
        ).view(count, *self.shares.shape[:1], self.places)
        return torch.zeros(count, *self.shares.shape, dtype=torch.bool).scatter_(2, drawn, True)

    def reads(self, count: int) -> torch.Tensor:
        return self.steps(count).sum(0)


def hit_rate(trace: torch.Tensor, resident: torch.Tensor) -> float:
    """The share of reads that find their expert on the device."""
    return float((trace & resident).sum() / trace.sum())
