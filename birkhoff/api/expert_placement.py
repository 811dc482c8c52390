"""Where a model's experts go: what a caller asked for, held against the memory there is, then memory for them.

`experts` is "auto" (as many on the device as fit), "device" (all of them, or a refusal), "host" (none), a share of all
as a number from 0.0 to 1.0, or bytes of device memory for them. `gpu_memory` is what the whole model may take of the
device. Only packed models can be placed; everywhere else experts lie where the model does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from birkhoff.byte_size import format_bytes, parse_bytes
from birkhoff.engine.memory_plan import MemoryBudget, default_cache, plan_budget
from birkhoff.errors import CapacityError, OptionError, quoted
from birkhoff.model.transformer import Transformer
from birkhoff.offload.expert_counts import ExpertCounts
from birkhoff.offload.expert_layout import PackedExpertLayout
from birkhoff.offload.expert_store import ExpertStore
from birkhoff.offload.expert_usage import ExpertUsage


@dataclass(frozen=True)
class PlacementOptions:
    """What a caller said about memory. `share` and `expert_bytes` are None unless asked for."""

    everything: bool = False
    share: float | None = None
    expert_bytes: int | None = None
    gpu_memory: int | None = None
    counts: Path | None = None

    @property
    def idle(self) -> bool:
        """Nothing was asked that an unplaced model would not do too."""
        return (
            self.share is None
            and self.expert_bytes is None
            and self.gpu_memory is None
            and self.counts is None
        )


@dataclass(frozen=True)
class PlacedExperts:
    budget: MemoryBudget
    store: ExpertStore
    heat: ExpertUsage


def wish_of(experts: Any, gpu_memory: Any, expert_counts: Any) -> PlacementOptions:
    """The options, checked before anything is read."""
    memory = None if gpu_memory is None else _bytes("gpu_memory", gpu_memory)
    if expert_counts is not None and not isinstance(expert_counts, (str, Path)):
        raise OptionError(f"expert_counts is {quoted(expert_counts)}, expected the path of a file, or None.")
    counts = None if expert_counts is None else Path(expert_counts).expanduser()
    if counts is not None and not counts.parent.is_dir():
        raise OptionError(
            f"expert_counts is {quoted(str(counts))}, whose folder does not exist. Make it first."
        )
    if experts in ("auto", "device"):
        return PlacementOptions(experts == "device", None, None, memory, counts)
    if experts == "host":
        return PlacementOptions(False, 0.0, None, memory, counts)
    share = _share(experts)
    if share is not None:
        return PlacementOptions(False, share, None, memory, counts)
    return PlacementOptions(False, None, _bytes("experts", experts), memory, counts)


def _share(experts: Any) -> float | None:
    """A number from 0.0 to 1.0, also as text: written with a point, since whole numbers are bytes."""
    text = str(experts) if isinstance(experts, (float, str)) else ""
    try:
        value = float(text)
    except ValueError:
        return None
    if "." not in text:
        return None
    if not 0.0 <= value <= 1.0:
        raise OptionError(
            f"experts is {quoted(experts)}, a share lies between 0.0 and 1.0; bytes are whole numbers."
        )
    return value


def _bytes(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        value = quoted(value)
    try:
        return parse_bytes(str(value))
    except OptionError:
        more = ", 'auto', 'device', 'host' or a share such as 0.5" if name == "experts" else ""
        raise OptionError(f"{name} is {quoted(value)}, expected bytes such as '24GiB'{more}.") from None


def refuse_unplaceable(wish: PlacementOptions) -> None:
    """For models that are not packed: asking for a placement is an error, not something to forget."""
    if not wish.idle:
        raise OptionError(
            "experts, gpu_memory and expert_counts place FP4 experts between a CUDA device and host memory: they need "
            "a checkpoint in the released formats, Triton kernels and plain numerics. Leave them out here."
        )


def place(
    network: Transformer,
    wish: PlacementOptions,
    device: torch.device,
    free_bytes: int,
    host_bytes: int,
    cache_bytes: int | None,
    requests: int,
    context: int | None,
) -> PlacedExperts | None:
    """Memory for the experts of a packed model that has none yet, or None when all of them go where the model goes."""
    config, numerics = network.config, network.numerics
    total = min(wish.gpu_memory or free_bytes, free_bytes)
    item = numerics.dtype.itemsize
    cache = default_cache(config, total, requests, context, item) if cache_bytes is None else cache_bytes
    budget = plan_budget(
        config,
        total,
        cache,
        dtype=numerics.dtype,
        mtp=network.mtp is not None,
        share=wish.share,
        expert_bytes=wish.expert_bytes,
    )
    if budget.hot == budget.experts and wish.share is None and wish.counts is None:
        return None
    if wish.everything and budget.hot < budget.experts:
        raise CapacityError(
            f"experts is 'device', but {budget.hot} of {budget.experts} fit {format_bytes(total)} beside weights "
            f"{format_bytes(budget.dense_bytes)}, cache {format_bytes(cache)} and working space {format_bytes(budget.working_bytes)}. "
            "Use 'auto', or a larger device."
        )
    if budget.host_bytes > host_bytes:
        raise CapacityError(
            f"{budget.experts - budget.hot} experts would lie in {format_bytes(budget.host_bytes)} of host memory, and "
            f"{format_bytes(host_bytes)} are free. Free host memory, or give the device more."
        )
    layers = budget.experts // config.n_routed_experts
    counts = wish.counts
    known = (
        ExpertCounts.load(counts, layers, config.n_routed_experts)
        if counts is not None and counts.exists()
        else None
    )
    heat = ExpertUsage(layers, config.n_routed_experts, known)
    store = ExpertStore(PackedExpertLayout.of(config), heat.hottest(budget.hot), device, budget.spare)
    return PlacedExperts(budget, store, heat)


def placed_text(budget: MemoryBudget) -> str:
    return (
        f"{budget.hot} of {budget.experts} experts on the device ({100 * budget.share:.1f} %), "
        f"{format_bytes(budget.host_bytes)} of host memory for the others"
    )
