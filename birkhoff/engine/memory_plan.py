"""Where a model's bytes go on a device, and what decoding costs at most, from the config alone.

The dense part is counted on a model without memory, as it will be held: FP8 codes, float32 where the release computes
in it, and what kernels keep beside it. Then come the cache, working space, and as many FP4 experts as are left room
for; the others stay in host memory. `tokens_per_second` is arithmetic: what a step must read, divided by how fast
device and bus can read. It is a limit, not a promise.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from birkhoff.byte_size import format_bytes
from birkhoff.config import PAGE_TOKENS, V4Config
from birkhoff.errors import CapacityError
from birkhoff.model.linear import Linear, Numerics
from birkhoff.model.mhc import Mixer
from birkhoff.model.moe import Experts, SharedExpert
from birkhoff.model.transformer import Transformer
from birkhoff.offload.expert_layout import PackedExpertLayout

WORKING_SHARE, MOST_WORKING = 0.06, 5 * 2**30  # activations, graphs, libraries: an allowance
CACHE_SHARE, CACHE_TOKENS = 8, 32_768  # without other wishes: this context, within an eighth of the device
DEVICE_SPEED, BUS_SPEED = 4.3e12, 55e9  # bytes a second of an H200 and of PCIe 5 with sixteen lanes
LEAST_SPARE = 2  # places without which nothing can move
KINDS = {0: "swa", 4: "csa", 128: "hca"}


@dataclass(frozen=True)
class LayerCache:
    """What layers of one kind remember, all of them together, in bytes: per token of context, and per sequence."""

    layers: int
    per_token: float
    per_sequence: int


def cache_by_kind(config: V4Config, item_bytes: int = 2, lookback: int = 0) -> dict[str, LayerCache]:
    """The windows are of fixed size, in every layer; compressed entries and index keys grow with the context."""
    found = {}
    for ratio, kind in KINDS.items():
        layers = sum(each == ratio for each in config.compress_ratios)
        width = config.head_dim + (config.index_head_dim if ratio == 4 else 0)
        fixed = (config.sliding_window + lookback) * config.head_dim * item_bytes
        if ratio:
            overlap = 2 if ratio == 4 else 1
            fixed += ratio * (overlap + -(-lookback // ratio)) * 2 * overlap * width * 4  # raw rows, float32
        found[kind] = LayerCache(
            layers, layers * width * item_bytes / ratio if ratio else 0.0, layers * fixed
        )
    return found


def context_bytes(config: V4Config, tokens: int, item_bytes: int = 2) -> dict[str, int]:
    """One sequence of `tokens` tokens by kind of layer, in whole pages as the cache is given out."""
    pages = -(-tokens // PAGE_TOKENS)
    return {
        kind: each.per_sequence + round(each.per_token * pages * PAGE_TOKENS)
        for kind, each in cache_by_kind(config, item_bytes).items()
    }


def step_cache_bytes(config: V4Config, context: int, item_bytes: int = 2) -> dict[str, float]:
    """What one new token reads of the cache behind `context` tokens, by kind: window, chosen entries, index keys."""
    found = {}
    for ratio, kind in KINDS.items():
        layers = sum(each == ratio for each in config.compress_ratios)
        entries = context / ratio if ratio else 0.0
        numbers = float(min(context, config.sliding_window) * config.head_dim)
        if ratio == 4:
            numbers += min(config.index_topk, entries) * config.head_dim + entries * config.index_head_dim
        elif ratio:
            numbers += entries * config.head_dim
        found[kind] = layers * numbers * item_bytes
    return found


@dataclass(frozen=True)
class WeightBytes:
    """`held` by kind: bytes on the device without routed experts. `read`: of those, what one step reads."""

    held: dict[str, int]
    read: int
    expert: int
    experts: int


def weights_of(config: V4Config, dtype: torch.dtype = torch.bfloat16, mtp: bool = False) -> WeightBytes:
    """A packed model's, as it will be laid out; with `mtp` the block that guesses too."""
    with torch.device("meta"):
        model = Transformer(config, Numerics(dtype), packed=True, mtp=mtp)
    held = dict.fromkeys(
        (
            "projections",
            "shared experts",
            "compressors, routers",
            "mixers, norms, tables",
            "head",
            "embedding",
            "copies for kernels",
            "mtp",
        ),
        0,
    )
    read = 0
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            continue
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        size = sum(tensor.nbytes for tensor in own)
        inside = _kind(name, module)
        used = size
        beside = 0
        if isinstance(module, Linear):
            beside = _copies(name, module)
            used = size if module.packed else 2 * module.weight.numel()
        elif isinstance(module, Mixer) and dtype.itemsize == 2:
            beside = module.fn.nbytes  # its two halves, which prompts read
        held["mtp" if name.startswith("mtp") else "copies for kernels"] += beside
        if inside == "embedding" and own:
            used = 0
        used -= sum(tensor.nbytes for key, tensor in module.named_buffers(recurse=False) if key == "tid2eid")
        held[inside] += size
        read += 0 if name.startswith("mtp") else used
    record = PackedExpertLayout.of(config)
    return WeightBytes(
        {kind: size for kind, size in held.items() if size},
        read,
        record.nbytes,
        config.n_routed_experts * len(model.expert_stacks()),
    )


def _kind(name: str, module: torch.nn.Module) -> str:
    if name.startswith("mtp"):
        return "mtp"
    if name == "":
        return "embedding"
    if name == "head":
        return "head"
    if "shared_experts" in name and not isinstance(module, SharedExpert):
        return "shared experts"
    if isinstance(module, Linear):
        return "projections" if module.packed else "compressors, routers"
    return "mixers, norms, tables"


def _copies(name: str, layer: Linear) -> int:
    """What kernels keep beside a matrix: scales row by row, and 16 bits of what is held in 32; both once more for small
    ones that decoding stacks with others."""
    times = 2 if name.endswith(("attn.wq_a", "attn.wkv", "weights_proj")) else 1
    if not layer.packed:
        return times * 2 * layer.weight.numel() if layer.weight.dtype is torch.float32 else 0
    codes = [getattr(layer, key) for key, _ in layer.held()]
    return times * -(-codes[0].shape[1] // 128) * sum(len(part) for part in codes)


@dataclass(frozen=True)
class MemoryBudget:
    """How `device_bytes` are shared out: `hot` of `experts` on the device, `spare` runs for those that move."""

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
        """Page-locked host memory for the others, and for exchanges."""
        return (self.experts - self.hot + min(self.spare, self.hot)) * self.expert_bytes

    @property
    def left_bytes(self) -> int:
        return self.device_bytes - self.dense_bytes - self.cache_bytes - self.working_bytes - self.hot_bytes

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "share": self.share,
            "dense_bytes": self.dense_bytes,
            "hot_bytes": self.hot_bytes,
            "host_bytes": self.host_bytes,
            "left_bytes": self.left_bytes,
        }


def spare_runs(cold: int, layers: int) -> int:
    """Runs for copies under way: two layers' cold experts, so that a prompt's copies run ahead, within limits."""
    return min(cold, max(8, min(64, 2 * -(-cold // layers))))


def default_cache(
    config: V4Config, device_bytes: int, requests: int = 1, context: int | None = None, item_bytes: int = 2
) -> int:
    """Cache for so many requests where nobody said how much: of `context` tokens each, or as many as are sensible."""
    tokens = min(context or CACHE_TOKENS, config.max_position_embeddings)
    wanted = requests * sum(context_bytes(config, tokens, item_bytes).values())
    return wanted if context is not None else min(wanted, device_bytes // CACHE_SHARE)


def plan_budget(
    config: V4Config,
    device_bytes: int,
    cache_bytes: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    mtp: bool = False,
    share: float | None = None,
    expert_bytes: int | None = None,
) -> MemoryBudget:
    """Fill a device with what must be there, then with experts: all that fit, or a `share` of all, or as many as
    `expert_bytes` hold. Refuses when the rest does not fit, or more experts were asked for than fit beside it."""
    weights = weights_of(config, dtype, mtp)
    working = min(int(WORKING_SHARE * device_bytes), MOST_WORKING)
    dense = sum(weights.held.values())
    layers = weights.experts // config.n_routed_experts
    room = device_bytes - dense - cache_bytes - working
    text = f"weights {format_bytes(dense)}, cache {format_bytes(cache_bytes)}, working space {format_bytes(working)}"
    if room < 0:
        unit = " A size without a unit is bytes: write it as 24GiB." if device_bytes < 2**20 else ""
        raise CapacityError(
            f"the model needs {format_bytes(device_bytes - room)} without a single routed expert ({text}), and may use "
            f"{format_bytes(device_bytes)}. Lower max_context, max_requests or cache_bytes, or take a larger device.{unit}"
        )

    total, places = weights.experts, room // weights.expert
    asked = share is not None or expert_bytes is not None
    wanted = min(total, expert_bytes // weights.expert) if expert_bytes is not None else total
    if share is not None:
        wanted = round(share * total)
    hot = min(wanted, places) if asked or places >= total else places
    while not asked and hot and hot + spare_runs(total - hot, layers) > places:
        hot = max(
            0, places - spare_runs(total - hot, layers)
        )  # fewer hot ones want more spare places, up to a limit
    spare = min(spare_runs(total - hot, layers), places - hot)
    if (hot < wanted and asked) or spare < min(LEAST_SPARE, total - hot):
        least = wanted + min(LEAST_SPARE, total - wanted) if asked else LEAST_SPARE
        raise CapacityError(
            f"{wanted if asked else 0} experts and places to move through take {format_bytes(least * weights.expert)}, beside "
            f"{text} there are {format_bytes(room)} of {format_bytes(device_bytes)} left. Ask for fewer experts on the device or free "
            "memory."
        )
    return MemoryBudget(device_bytes, weights.held, cache_bytes, working, weights.expert, total, hot, spare)


def distinct_experts(config: V4Config, batch: int) -> float:
    """How many experts of a layer a step of `batch` tokens reads when all are equally likely."""
    chance = config.num_experts_per_tok / config.n_routed_experts
    return config.n_routed_experts * (1 - (1 - chance) ** batch)


def tokens_per_second(
    config: V4Config,
    misses: float,
    batch: int = 1,
    read: int | None = None,
    device_speed: float = DEVICE_SPEED,
    bus_speed: float = BUS_SPEED,
) -> float:
    """At most: dense weights and hot experts at the device's speed, the share `misses` of experts over the bus, one
    after the other. `read` is what `weights_of` says of the dense part."""
    dense = weights_of(config).read if read is None else read
    experts = (
        config.num_hidden_layers * distinct_experts(config, batch) * PackedExpertLayout.of(config).nbytes
    )
    seconds = (dense + experts * (1 - misses)) / device_speed + experts * misses / bus_speed
    return batch / seconds
