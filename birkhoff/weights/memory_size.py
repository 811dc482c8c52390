"""Estimate how a model fits a device of a given size: weights, cache, and experts in the remaining memory.

All weights but the routed experts are used for every token and stay on the device; whole experts can be offloaded.
Sizes come from headers, so this also answers for files that this machine cannot load. The working space is an
allowance, not a measurement. `engine/memory_plan.py` plans the memory of a model that is about to be loaded.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

WORKING_SHARE = 0.06  # activations, library buffers, fragmentation


@dataclass(frozen=True)
class MemoryEstimate:
    """`experts_resident` of `experts` fit next to the rest; `fits` is whether the rest fits."""

    device_bytes: int
    form: str
    always_bytes: int
    cache_bytes: int
    working_bytes: int
    expert_bytes: int
    experts: int
    experts_resident: int
    fits: bool

    @property
    def left_bytes(self) -> int:
        used = self.always_bytes + self.cache_bytes + self.working_bytes
        return self.device_bytes - used - self.experts_resident * self.one_expert

    @property
    def one_expert(self) -> int:
        return self.expert_bytes // self.experts if self.experts else 0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "left_bytes": self.left_bytes}


def estimate_memory(
    device_bytes: int, form: str, always_bytes: int, expert_bytes: int, experts: int, cache_bytes: int
) -> MemoryEstimate:
    """Assign device memory to the always-needed weights, the cache, the working space, then as many experts as fit."""
    working = int(WORKING_SHARE * device_bytes)
    free = device_bytes - always_bytes - cache_bytes - working
    one_expert = expert_bytes // experts if experts else 0
    resident = min(experts, free // one_expert) if one_expert and free > 0 else 0
    return MemoryEstimate(
        device_bytes, form, always_bytes, cache_bytes, working, expert_bytes, experts, resident, free >= 0
    )
