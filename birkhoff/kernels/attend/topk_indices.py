"""The compressed entries that each query of a chunk attends to, as indices instead of a mask over all entries.

A query sees `counts` entries: the first ones, or those listed by `indices` in ascending order. At a context of 128K
tokens a mask of 4,096 queries would take 128 MiB per layer, and a kernel would scan all of it to find 512 entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class TopkIndices:
    """`counts` [B, T] int32; `indices` [B, T, K] int32, of which the first `counts` are valid, or None; `most`: an
    upper bound of the counts, where the host knows one."""

    counts: torch.Tensor
    indices: torch.Tensor | None = None
    most: int | None = None

    def mask(self, entries: int) -> torch.Tensor:
        """The selection as a mask [B, T, entries]."""
        counts = self.counts.unsqueeze(-1)
        if self.indices is None:
            return torch.arange(entries, device=counts.device) < counts
        counted = torch.arange(self.indices.shape[-1], device=counts.device) < counts
        targets = torch.where(counted, self.indices, entries).long()  # invalid indices go to an extra column
        selected = torch.zeros(*self.counts.shape, entries + 1, dtype=torch.bool, device=counts.device)
        return selected.scatter_(-1, targets, True)[..., :entries]
