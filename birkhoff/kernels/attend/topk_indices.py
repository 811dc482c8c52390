"""Which compressed entries each query of a chunk sees, as numbers: what kernels want instead of a mask of all entries.

A query sees `counts` entries: the first ones, or those that `numbers` lists in ascending order. At a context of 128K
tokens a mask of 4,096 queries would be 128 MiB a layer, and a kernel would walk all of it to find 512 entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class TopkIndices:
    """`counts` [B, T] int32; `numbers` [B, T, K] int32, of which the first `counts` count, or None."""

    counts: torch.Tensor
    numbers: torch.Tensor | None = None

    def mask(self, entries: int) -> torch.Tensor:
        """[B, T, entries] bool."""
        counts = self.counts.unsqueeze(-1)
        if self.numbers is None:
            return torch.arange(entries, device=counts.device) < counts
        listed = torch.arange(self.numbers.shape[-1], device=counts.device) < counts
        places = torch.where(listed, self.numbers, entries).long()  # what does not count falls off the end
        seen = torch.zeros(*self.counts.shape, entries + 1, dtype=torch.bool, device=counts.device)
        return seen.scatter_(-1, places, True)[..., :entries]
