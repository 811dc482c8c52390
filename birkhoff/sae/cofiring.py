"""Which features fire together, counted over any number of tokens in bounded memory.

Up to `max_bytes` for all pairs, counts are exact. Beyond that every feature keeps a random projection of its tokens
(`WIDTH` numbers; tokens have random signs), whose products estimate the counts of all pairs: the error of a correlation
of features with densities p and q has a standard deviation of about 1 / sqrt(WIDTH (1 - p) (1 - q)), so estimated
partners with less than five times that are left out.
"""

from __future__ import annotations

import torch

MAX_BYTES = 1 << 30
WIDTH = 1024
BLOCK = 1024  # features whose pairs are ranked at a time
PART = 1 << 22  # activations that are counted at a time
NOISE = 5.0  # standard deviations that an estimated correlation must exceed


class CoFiring:
    def __init__(self, features: int, device: torch.device | str = "cpu", max_bytes: int = MAX_BYTES):
        self.exact = 4 * features * features <= max_bytes
        self.rows = 0
        self.fired = torch.zeros(features, dtype=torch.long, device=device)
        self._generator = torch.Generator(device).manual_seed(0)
        width, dtype = (features, torch.int32) if self.exact else (WIDTH, torch.float32)
        self._sums = torch.zeros(features, width, dtype=dtype, device=device)
        self._waiting: list[torch.Tensor] = []

    def add(self, activations: torch.Tensor) -> None:
        """Add the activations [tokens, features] of some tokens."""
        self._waiting.append(activations > 0)
        if sum(part.numel() for part in self._waiting) >= PART:
            self._count()

    def _count(self) -> None:
        """Count what was added since the last time: few large products instead of one per text."""
        if not self._waiting:
            return
        active, self._waiting = torch.cat(self._waiting).float(), []
        self.rows += len(active)
        fired = active.sum(0)
        self.fired += fired.long()
        used = fired.nonzero().squeeze(1)  # of a few hundred tokens only some features fire
        part = active[:, used]
        if self.exact:
            together = (part.T @ part).int()
            self._sums[used[:, None], used[None]] += together
        else:
            size = (len(part), self._sums.shape[1])
            signs = torch.randint(0, 2, size, generator=self._generator, device=part.device).float() * 2 - 1
            self._sums[used] += part.T @ signs

    def partners(self, most: int) -> list[list[tuple[int, int, float]]]:
        """For every feature the `most` features with the largest positive correlation of firing: number, tokens on
        which both fire, and correlation; largest first."""
        self._count()
        found: list[list[tuple[int, int, float]]] = []
        count = self.fired.double()
        spread = (count * (self.rows - count)).sqrt()
        most = min(most, len(count) - 1)
        for first in range(0, len(count), BLOCK):
            block = slice(first, first + BLOCK)
            together = self._together(block)
            over = self.rows * together - count[block, None] * count
            correlation = (over / (spread[block, None] * spread)).nan_to_num(0.0, 0.0, 0.0)
            if not self.exact:
                silent = (self.rows - count).clamp_min(1.0)
                noise = self.rows / (silent[block, None] * silent).sqrt() / self._sums.shape[1] ** 0.5
                correlation = torch.where(correlation > NOISE * noise, correlation, 0.0)
            own = torch.arange(len(together), device=count.device)
            correlation[own, own + first] = 0.0
            best, index = correlation.topk(most, dim=1)
            tokens = together.gather(1, index).round().long()
            found += [
                [pair for pair in zip(others, both, values) if pair[2] > 0 and pair[1] > 0]
                for others, both, values in zip(index.tolist(), tokens.tolist(), best.tolist())
            ]
        return found

    def _together(self, block: slice) -> torch.Tensor:
        """Tokens [features of the block, features] on which both fire, float64; estimated if not exact."""
        if self.exact:
            return self._sums[block].double()
        product = self._sums[block] @ self._sums.T / self._sums.shape[1]
        limit = torch.minimum(self.fired[block, None], self.fired).float()
        return torch.minimum(product.clamp_min(0.0), limit).double()
