"""Synthetic expert traffic for placement tests: experts drawn with given shares, and the hit rate of a resident set."""

from __future__ import annotations

import torch


def zipf(layers: int, experts: int, exponent: float, seed: int) -> torch.Tensor:
    """[layers, experts] shares that fall as rank ** -exponent, with a random order of experts in every layer."""
    g = torch.Generator().manual_seed(seed)
    falling = torch.arange(1, experts + 1, dtype=torch.float64) ** -exponent
    order = torch.stack([torch.randperm(experts, generator=g) for _ in range(layers)])
    return (falling / falling.sum()).expand(layers, -1).gather(1, order)


class Traffic:
    """Steps of one token that uses `top_k` different experts in every layer."""

    def __init__(self, shares: torch.Tensor, top_k: int, seed: int):
        self.shares, self.top_k, self.generator = shares, top_k, torch.Generator().manual_seed(seed)

    def steps(self, count: int) -> torch.Tensor:
        """[count, layers, experts] bool: the experts read in each step."""
        drawn = torch.multinomial(
            self.shares.repeat(count, 1), self.top_k, replacement=False, generator=self.generator
        ).view(count, *self.shares.shape[:1], self.top_k)
        return torch.zeros(count, *self.shares.shape, dtype=torch.bool).scatter_(2, drawn, True)

    def reads(self, count: int) -> torch.Tensor:
        return self.steps(count).sum(0)


def hit_rate(trace: torch.Tensor, resident: torch.Tensor) -> float:
    """The share of reads whose expert is resident on the device."""
    return float((trace & resident).sum() / trace.sum())
