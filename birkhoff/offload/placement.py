"""Experts follow the traffic: around every step, what has arrived is shown, what is known is sent for, what pays moves.

Before a step the store shows kernels the copies that have arrived, and experts of hash-routed layers are sent for from
the token ids of a chunk. After it, every few steps, the device's counters are read without waiting for them, and at
most `most` exchanges begin, which run beside the coming steps. None of it changes what is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from birkhoff.offload.expert_counts import ExpertCounts
from birkhoff.offload.expert_store import ExpertStore
from birkhoff.offload.expert_usage import ExpertUsage
from birkhoff.offload.prefetch import HashRoutePrefetch

EVERY = 16  # steps between two looks at the counters
MOST = 2  # exchanges begun at a look: 27 MB each way at V4-Flash's size, half a millisecond of the bus

When = Literal["chunks", "always", "never"]


class Placement:
    """`heat` is what is known before the first step. `ahead` says for which steps experts of hash-routed layers are
    sent for: a single token is known too late to gain by it, so by default only for chunks. `file` is given the
    counts at the end."""

    def __init__(
        self,
        store: ExpertStore,
        heat: ExpertUsage,
        hash_tables: dict[int, torch.Tensor],
        *,
        every: int = EVERY,
        most: int = MOST,
        ahead: When = "chunks",
        file: Path | None = None,
    ):
        self.store = store
        self.heat = heat
        self.every = every
        self.most = most
        self.when = ahead
        self.file = file
        self.ahead = HashRoutePrefetch(store, hash_tables)
        self.steps = self.exchanged = 0
        self.reads = {"hot": 0, "cold": 0}
        self._seen = store.counts.cpu().clone()
        self._seen_steps = 0
        self._coming: tuple[torch.Tensor, Any, int] | None = None
        store.courier.fence()  # what was loaded is there before anything is copied

    def before(self, token_ids: Sequence[int], chunk: bool) -> None:
        """The coming step computes these tokens; with `chunk`, several of one sequence."""
        self.exchanged += self.store.settle()
        if self.when == "always" or (self.when == "chunks" and chunk):
            self.ahead.send(token_ids)

    def after(self) -> None:
        """A step was given to the device."""
        self.ahead.let_go()
        self.steps += 1
        if self._coming is None and self.steps % self.every == 0:
            self._coming = (*self.store.courier.fetch(self.store.counts), self.steps)
        if self._coming is not None and self.store.courier.arrived(self._coming[1]):
            counts, _, steps = self._coming
            self._coming = None
            self._learn(counts, steps)

    def counts(self) -> ExpertCounts:
        """What is known of the experts' use, for a file."""
        return self.heat.counts()

    def close(self) -> None:
        """Let what moves arrive, learn of the last steps, and leave all of it in the file, where there is one."""
        self.exchanged += self.store.settle(wait=True)
        counts, ticket = self.store.courier.fetch(self.store.counts)
        self.store.courier.wait(ticket)
        self._note(counts, self.steps)
        self._coming = None
        if self.file is not None:
            self.counts().save(self.file)

    def report(self) -> dict[str, Any]:
        """Numbers for people: shares of experts and of reads that were on the device, and exchanges so far."""
        reads = sum(self.reads.values())
        resident = self.store.resident()
        return {
            "experts": resident.numel(),
            "experts_on_device": int(resident.sum()),
            "reads": reads,
            "share_of_reads_on_device": self.reads["hot"] / reads if reads else None,
            "exchanged": self.exchanged,
            "spare": self.store.spare,
        }

    def _learn(self, counts: torch.Tensor, steps: int) -> None:
        self._note(counts, steps)
        for arriving, leaving in self.heat.exchanges(self.store.resident(), self.most):
            self.store.swap(arriving, leaving)

    def _note(self, counts: torch.Tensor, steps: int) -> None:
        fresh, resident = counts - self._seen, self.store.resident()
        self.reads["hot"] += int(fresh[resident].sum())
        self.reads["cold"] += int(fresh[~resident].sum())
        self.heat.note(fresh, steps - self._seen_steps)
        self._seen = counts.clone()
        self._seen_steps = steps
