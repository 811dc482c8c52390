"""Memory arithmetic: bytes of weights and experts on a device or a host, and how its memory is divided.

The dense weights are counted on a model on the meta device, as they will be held: FP8 codes, float32 where the release
computes in float32, and copies that kernels keep. The rest of the device holds the cache (`cache_plan.py`), working
space, and as many experts as fit; the other experts stay in host memory. A plan is made before anything is allocated.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from birkhoff.byte_size import format_bytes
from birkhoff.config import PAGE_TOKENS, V4Config
from birkhoff.errors import CapacityError
from birkhoff.kernels.packed import TYPES
from birkhoff.model.cache_size import context_bytes, page_bytes, slot_bytes
from birkhoff.model.linear import Linear, Numerics
from birkhoff.model.mhc import Mixer
from birkhoff.model.moe import Experts, SharedExpert
from birkhoff.model.transformer import Transformer
from birkhoff.offload.expert_layout import PackedExpertLayout

WORKING_SHARE, MAX_WORKING_BYTES = 0.06, 5 * 2**30  # allowance for activations, graphs and libraries
MAX_HOST_WORKING_BYTES = 2**30  # the same on a CPU
MIN_SPARE_SLOTS = 2  # expert slots without which no expert can move


@dataclass(frozen=True)
class WeightBytes:
    """`dense`: bytes on the device by kind, without routed experts. `read`: those that one step reads. `expert`: bytes
    of one routed expert, the largest where layers differ. `experts`: number of routed experts."""

    dense: dict[str, int]
    read: int
    expert: int
    experts: int


def weight_bytes(config: V4Config, dtype: torch.dtype = torch.bfloat16, mtp: bool = False) -> WeightBytes:
    """Bytes of a model in the released formats; `mtp` includes the MTP block."""
    with torch.device("meta"):
        return model_bytes(Transformer(config, Numerics(dtype), packed=True, mtp=mtp))


def model_bytes(model: Transformer) -> WeightBytes:
    """Bytes of a packed model on a GPU, counted before it is given memory."""
    config, dtype = model.config, model.numerics.dtype
    kinds = (
        "projections",
        "shared experts",
        "compressors, routers",
        "mixers, norms, tables",
        "head",
        "embedding",
        "copies for kernels",
        "mtp",
    )
    dense = dict.fromkeys(kinds, 0)
    read = 0
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            continue
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        size = sum(tensor.nbytes for tensor in tensors)
        kind = _weight_kind(name, module)
        used = size
        copies = 0
        if isinstance(module, Linear):
            copies = _kernel_copy_bytes(name, module)
            used = size if module.packed else 2 * module.weight.numel()
        elif isinstance(module, Mixer) and dtype.itemsize == 2:
            copies = module.fn.nbytes  # two bfloat16 halves, for prefill
        dense["mtp" if name.startswith("mtp") else "copies for kernels"] += copies
        if kind == "embedding" and tensors:
            used = 0  # one row per token
        used -= sum(tensor.nbytes for key, tensor in module.named_buffers(recurse=False) if key == "tid2eid")
        dense[kind] += size
        read += 0 if name.startswith("mtp") else used
    stacks = model.expert_stacks()
    largest = max(PackedExpertLayout.of(config, stack.types).nbytes for stack in stacks if stack.types)
    return WeightBytes(
        {kind: size for kind, size in dense.items() if size},
        read,
        largest,
        config.n_routed_experts * len(stacks),
    )


def _weight_kind(name: str, module: torch.nn.Module) -> str:
    if name.startswith("mtp"):
        return "mtp"
    if name == "":
        return "embedding"
    if name == "head":
        return "head"
    if "shared_experts" in name and not isinstance(module, SharedExpert):
        return "shared experts"
    if isinstance(module, Linear):
        return "projections" if module.role == "fp8" else "compressors, routers"
    return "mixers, norms, tables"


def _kernel_copy_bytes(name: str, layer: Linear) -> int:
    """Bytes that kernels keep besides a matrix: FP8 scales row by row, and a 16-bit copy of a float32 weight. Small
    matrices that decoding stacks with others have both twice, and FP4 scales once more."""
    stacked = name.endswith(("attn.wq_a", "attn.wkv", "weights_proj"))
    times = 2 if stacked else 1
    if not layer.packed:
        return times * 2 * layer.weight.numel() if layer.weight.dtype is torch.float32 else 0
    if layer.code_type == TYPES["FP8"]:
        return times * -(-layer.codes.shape[1] // 128) * len(layer.codes)  # one scale per 128 columns
    return layer.scale.nbytes if stacked and layer.code_type == TYPES["FP4"] else 0


@dataclass(frozen=True)
class MemoryBudget:
    """How `device_bytes` are divided: `hot` of `experts` are on the device, with `spare` slots for those that move."""

    device_bytes: int
    weights: dict[str, int]
    cache_bytes: int
    working_bytes: int
    expert_bytes: int
    experts: int
    hot: int
    spare: int

    @property
    def share(self) -> float:
        return self.hot / self.experts

    @property
    def dense_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def hot_bytes(self) -> int:
        return (self.hot + self.spare) * self.expert_bytes

    @property
    def host_bytes(self) -> int:
        """Pinned host memory for the other experts and for exchanges."""
        return (self.experts - self.hot + min(self.spare, self.hot)) * self.expert_bytes

    @property
    def left_bytes(self) -> int:
        return self.device_bytes - self.dense_bytes - self.cache_bytes - self.working_bytes - self.hot_bytes

    def __str__(self) -> str:
        return (
            f"{self.hot} of {self.experts} experts on the device ({100 * self.share:.1f} %), "
            f"{format_bytes(self.host_bytes)} of host memory for the others"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "share": self.share,
            "dense_bytes": self.dense_bytes,
            "hot_bytes": self.hot_bytes,
            "host_bytes": self.host_bytes,
            "left_bytes": self.left_bytes,
        }


def spare_slots(cold: int, layers: int) -> int:
    """Expert slots for copies in flight: the cold experts of two layers, so that prefill can prefetch; 8 to 64."""
    return min(cold, max(8, min(64, 2 * -(-cold // layers))))


def plan_budget(
    config: V4Config,
    device_bytes: int,
    cache_bytes: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    mtp: bool = False,
    share: float | None = None,
    expert_bytes: int | None = None,
    weights: WeightBytes | None = None,
) -> MemoryBudget:
    """Fill a device with the dense weights, cache and working space, then with experts: all that fit, or a `share` of
    all, or as many as `expert_bytes` hold. `weights` are by default those of a model in the released formats.

    Raises `CapacityError` when the dense part does not fit, or fewer experts fit than requested."""
    weights = weights or weight_bytes(config, dtype, mtp)
    working = min(int(WORKING_SHARE * device_bytes), MAX_WORKING_BYTES)
    dense = sum(weights.dense.values())
    layers = weights.experts // config.n_routed_experts
    room = device_bytes - dense - cache_bytes - working
    text = f"weights {format_bytes(dense)}, cache {format_bytes(cache_bytes)}, working space {format_bytes(working)}"
    if room < 0:
        unit = " A size without a unit is bytes: write it as 24GiB." if device_bytes < 2**20 else ""
        raise CapacityError(
            f"the model needs {format_bytes(device_bytes - room)} without a single routed expert ({text}), and may use "
            f"{format_bytes(device_bytes)}. Lower max_context, max_requests or cache_bytes, or take a larger "
            f"device.{unit}"
        )

    total, slots = weights.experts, room // weights.expert
    requested = share is not None or expert_bytes is not None
    target = min(total, expert_bytes // weights.expert) if expert_bytes is not None else total
    if share is not None:
        target = round(share * total)
    hot = min(target, slots) if requested or slots >= total else slots
    while not requested and hot and hot + spare_slots(total - hot, layers) > slots:
        hot = max(0, slots - spare_slots(total - hot, layers))  # fewer hot experts need more spare slots
    spare = min(spare_slots(total - hot, layers), slots - hot)
    if (hot < target and requested) or spare < min(MIN_SPARE_SLOTS, total - hot):
        least = target + min(MIN_SPARE_SLOTS, total - target) if requested else MIN_SPARE_SLOTS
        raise CapacityError(
            f"{target if requested else 0} experts and places to move through take "
            f"{format_bytes(least * weights.expert)}, beside {text} there are {format_bytes(room)} of "
            f"{format_bytes(device_bytes)} left. Ask for fewer experts on the device or free memory."
        )
    return MemoryBudget(device_bytes, weights.dense, cache_bytes, working, weights.expert, total, hot, spare)


@dataclass(frozen=True)
class HostBudget:
    """How a model that runs on the CPU uses `host_bytes`. `mapped` experts are not part of it: they stay in their files
    and use what is left as page cache."""

    host_bytes: int
    dense_bytes: int
    expert_bytes: int
    experts: int
    cache_bytes: int
    working_bytes: int
    mapped: bool

    @property
    def used_bytes(self) -> int:
        held = 0 if self.mapped else self.expert_bytes
        return self.dense_bytes + held + self.cache_bytes + self.working_bytes

    @property
    def left_bytes(self) -> int:
        return self.host_bytes - self.used_bytes

    def __str__(self) -> str:
        if not self.mapped:
            return f"{self.experts} experts in memory ({format_bytes(self.expert_bytes)})"
        left = max(self.left_bytes, 0)
        from_disk = " and disk" if self.expert_bytes > left else ""
        return (
            f"{self.experts} experts stay in their files ({format_bytes(self.expert_bytes)}), read from page cache"
            f"{from_disk}: {format_bytes(left)} of memory are left for it"
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "used_bytes": self.used_bytes, "left_bytes": self.left_bytes}


def held_bytes(model: Transformer) -> tuple[int, int, int]:
    """Bytes of a model's tensors without routed experts, bytes of the routed experts, and their number."""
    dense = experts = count = 0
    for module in model.modules():
        tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        size = sum(tensor.nbytes for tensor in tensors)
        if isinstance(module, Experts):
            experts += size
            count += module.count
        else:
            dense += size
    return dense, experts, count


def cache_within(device_bytes: int, held: int) -> int:
    """Bytes that `device_bytes` leave for the cache beside weights of `held` bytes and the working space."""
    working = min(int(WORKING_SHARE * device_bytes), MAX_WORKING_BYTES)
    return max(device_bytes - working - held, 0)


def plan_host(
    model: Transformer,
    host_bytes: int,
    cache_bytes: int | None,
    requests: int,
    context: int | None,
    mapped: bool | None = None,
) -> HostBudget:
    """Plan the memory of a model on the CPU, which may still be on the meta device.

    `mapped` keeps routed experts in their files; None does so if they do not fit. Without `cache_bytes` the cache gets
    a quarter of what the weights leave, and at least what `context` needs. Raises `CapacityError` with the numbers and
    what would fit."""
    config, item_bytes = model.config, model.numerics.dtype.itemsize
    dense, experts, count = held_bytes(model)
    working = min(int(WORKING_SHARE * host_bytes), MAX_HOST_WORKING_BYTES)
    needed = 0
    if context is not None:
        needed = requests * sum(
            context_bytes(config, min(context, config.max_position_embeddings), item_bytes).values()
        )
    least = max(needed, requests * (slot_bytes(config, item_bytes) + page_bytes(config, item_bytes)))
    can_map = all(stack.packed for stack in model.expert_stacks())
    cache = least if cache_bytes is None else cache_bytes
    if mapped is None:
        mapped = can_map and dense + experts + cache + working > host_bytes
    held = dense + (0 if mapped else experts)
    room = host_bytes - held - working
    if cache_bytes is None:
        cache = max(least, room // 4)
    budget = HostBudget(host_bytes, dense, experts, count, cache, working, mapped)
    if room < cache:
        refusal = _host_refusal(budget, config, item_bytes, requests, can_map, cache_bytes is not None)
        raise CapacityError(refusal)
    return budget


def _host_refusal(
    budget: HostBudget, config: V4Config, item_bytes: int, requests: int, can_map: bool, cache_given: bool
) -> str:
    """What does not fit, with the numbers, and what would. `cache_given`: the caller chose the size of the cache."""
    experts = "" if budget.mapped else f", experts {format_bytes(budget.expert_bytes)}"
    text = (
        f"the model needs {format_bytes(budget.used_bytes)} of host memory (weights "
        f"{format_bytes(budget.dense_bytes)}{experts}, cache {format_bytes(budget.cache_bytes)}, working space "
        f"{format_bytes(budget.working_bytes)}), and {format_bytes(budget.host_bytes)} are free."
    )
    advice = []
    if not budget.mapped and can_map:
        advice.append("experts='mapped' leaves the experts in their files")
    if not budget.mapped and not can_map:
        advice.append("weights as stored take less (weights='auto', which needs a C++ compiler)")
    room = (
        budget.host_bytes
        - budget.working_bytes
        - budget.dense_bytes
        - (0 if budget.mapped else budget.expert_bytes)
    )
    fixed = requests * slot_bytes(config, item_bytes)
    each = page_bytes(config, item_bytes)
    tokens = (room - fixed) // (each * requests) * PAGE_TOKENS if each and room > fixed else 0
    if cache_given and room > 0:
        advice.append(f"cache_bytes={room} would fit")
    elif tokens:
        advice.append(f"max_context={min(tokens, config.max_position_embeddings)} would fit")
    elif room > slot_bytes(config, item_bytes) + each and requests > 1:
        advice.append("fewer max_requests would fit")
    if not advice:
        advice.append("use a machine with more memory, or a smaller format of the model")
    return f"{text} What would help: {'; '.join(advice)}."
