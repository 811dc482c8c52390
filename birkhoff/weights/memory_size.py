"""Where a model's bytes would go on a device of a given size: what must be there, the cache, experts in what is left.

Everything but the routed experts is needed for every token and stays on the device; experts can live elsewhere and are
counted whole. Numbers come from headers; the working space is an allowance, not a measurement.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

WORKING_SHARE = 0.06  # activations, library buffers, fragmentation


@dataclass(frozen=True)
class MemoryPlan:
    """`experts_resident` of `experts` fit beside everything else; `fits` says whether the rest fits at all."""

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


def plan_memory(
    device_bytes: int, form: str, always_bytes: int, expert_bytes: int, experts: int, cache_bytes: int
) -> MemoryPlan:
    """Fill a device: what is always needed, then the cache and working space, then as many experts as fit."""
    working = int(WORKING_SHARE * device_bytes)
    room = device_bytes - always_bytes - cache_bytes - working
    one = expert_bytes // experts if experts else 0
    resident = min(experts, room // one) if one and room > 0 else 0
    return MemoryPlan(
        device_bytes, form, always_bytes, cache_bytes, working, expert_bytes, experts, resident, room >= 0
    )
