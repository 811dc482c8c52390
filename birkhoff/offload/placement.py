"""Moves hot experts to the device between steps.

Before a step, completed copies enter the table, and copies of the experts that hash-routed layers will use for the
chunk's token ids are begun. After a step, every few steps, the read counters are fetched from the device without
blocking, and up to `max_swaps` swaps are begun, which run beside the next steps. Results do not depend on any of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from birkhoff.offload.expert_store import ExpertStore
from birkhoff.offload.expert_usage import ExpertCounts, ExpertUsage
from birkhoff.offload.prefetch import HashRoutePrefetch

INTERVAL = 16  # steps between two readings of the counters
MAX_SWAPS = 2  # begun at a reading: 27 MB each way at V4-Flash's size, half a millisecond of the bus

PrefetchSteps = Literal["chunks", "always", "never"]


class Placement:
    """Keeps the most used experts of `store` on the device.

    `usage` is what is known before the first step. `hash_tables` maps each hash-routed layer to the experts of every
    token. `prefetch` selects the steps for which those are copied ahead: by default only chunks, since a single token
    is known too late to gain from it. `file` receives the counts when the placement is closed."""

    def __init__(
        self,
        store: ExpertStore,
        usage: ExpertUsage,
        hash_tables: dict[int, torch.Tensor],
        *,
        interval: int = INTERVAL,
        max_swaps: int = MAX_SWAPS,
        prefetch: PrefetchSteps = "chunks",
        file: Path | None = None,
    ):
        self.store = store
        self.usage = usage
        self.interval = interval
        self.max_swaps = max_swaps
        self.prefetch = prefetch
        self.file = file
        self.hash_prefetch = HashRoutePrefetch(store, hash_tables)
        self.steps = self.swapped = 0
        self.reads = {"hot": 0, "cold": 0}
        self._counted = store.read_counts.cpu().clone()
        self._counted_steps = 0
        self._fetching: tuple[torch.Tensor, Any, int] | None = None  # counts, event, steps
        store.copy_stream.wait_current_stream()  # loading comes before any copy

    def before_step(self, token_ids: Sequence[int], chunk: bool) -> None:
        """Prepare a step for these tokens; `chunk` if it holds several tokens of one sequence."""
        self.swapped += self.store.publish()
        if self.prefetch == "always" or (self.prefetch == "chunks" and chunk):
            self.hash_prefetch.begin(token_ids)

    def after_step(self) -> None:
        """Called when a step was launched."""
        self.hash_prefetch.release()
        self.steps += 1
        if self._fetching is None and self.steps % self.interval == 0:
            self._fetching = (*self.store.copy_stream.copy_to_host(self.store.read_counts), self.steps)
        if self._fetching is not None and self.store.copy_stream.is_complete(self._fetching[1]):
            counts, _, steps = self._fetching
            self._fetching = None
            self._update_usage(counts, steps)
            for arriving, leaving in self.usage.swaps(self.store.resident(), self.max_swaps):
                self.store.swap(arriving, leaving)

    def counts(self) -> ExpertCounts:
        """Expert usage so far, for a file."""
        return self.usage.counts()

    def close(self) -> None:
        """Complete all copies, count the last steps, and write the counts to the file, if there is one."""
        self.swapped += self.store.publish(wait=True)
        counts, event = self.store.copy_stream.copy_to_host(self.store.read_counts)
        self.store.copy_stream.synchronize(event)
        self._update_usage(counts, self.steps)
        self._fetching = None
        if self.file is not None:
            self.counts().save(self.file)

    def report(self) -> dict[str, Any]:
        """Statistics: experts and share of reads on the device, and swaps so far."""
        reads = sum(self.reads.values())
        resident = self.store.resident()
        return {
            "experts": resident.numel(),
            "experts_on_device": int(resident.sum()),
            "reads": reads,
            "share_of_reads_on_device": self.reads["hot"] / reads if reads else None,
            "exchanged": self.swapped,
            "spare": self.store.spare,
        }

    def _update_usage(self, counts: torch.Tensor, steps: int) -> None:
        recent, resident = counts - self._counted, self.store.resident()
        self.reads["hot"] += int(recent[resident].sum())
        self.reads["cold"] += int(recent[~resident].sum())
        self.usage.add(recent, steps - self._counted_steps)
        self._counted = counts.clone()
        self._counted_steps = steps
