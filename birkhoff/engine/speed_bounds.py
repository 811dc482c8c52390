"""Upper bounds on decoding speed: the bytes a step must read, divided by the bandwidth of device and bus.

A bound, not a prediction: computation, launches and what overlaps are left out.
"""

from __future__ import annotations

from typing import Any

from birkhoff.config import V4Config
from birkhoff.engine.cache_plan import CACHE_TOKENS
from birkhoff.engine.memory_plan import MemoryBudget, model_bytes, weight_bytes
from birkhoff.model.cache_size import cache_by_kind, context_bytes, step_cache_bytes
from birkhoff.model.transformer import Transformer
from birkhoff.offload.expert_layout import PackedExpertLayout

DEVICE_SPEED, BUS_SPEED = 4.3e12, 55e9  # bytes per second of an H200 and of PCIe 5 x16
FORECAST_BATCHES = (1, 8, 64)
FORECAST_MISSES = (1.0, 0.25, 0.1, 0.0)  # miss rates to forecast, relative to a random placement


def distinct_experts(config: V4Config, batch: int) -> float:
    """Expected number of experts of a layer that a step of `batch` tokens reads when all are equally likely."""
    chance = config.num_experts_per_tok / config.n_routed_experts
    return config.n_routed_experts * (1 - (1 - chance) ** batch)


def tokens_per_second(
    config: V4Config,
    misses: float,
    batch: int = 1,
    read: int | None = None,
    device_speed: float = DEVICE_SPEED,
    bus_speed: float = BUS_SPEED,
    expert_bytes: int | None = None,
) -> float:
    """Upper bound: dense weights and hot experts are read at `device_speed`, the share `misses` of experts at
    `bus_speed`, without overlap. `read` is `WeightBytes.read`, `expert_bytes` `WeightBytes.expert`."""
    dense = weight_bytes(config).read if read is None else read
    each = PackedExpertLayout.of(config).nbytes if expert_bytes is None else expert_bytes
    experts = config.num_hidden_layers * distinct_experts(config, batch) * each
    seconds = (dense + experts * (1 - misses)) / device_speed + experts * misses / bus_speed
    return batch / seconds


def forecast(
    model: Transformer,
    budget: MemoryBudget,
    *,
    context: int | None = None,
    requests: int = 1,
    device_speed: float = DEVICE_SPEED,
    bus_speed: float = BUS_SPEED,
) -> dict[str, Any]:
    """A memory plan and the speed bounds that follow from it, as plain data. The model needs no memory.

    Speeds are given for the miss rate of a random placement and for lower ones."""
    config = model.config
    tokens = min(context or CACHE_TOKENS, config.max_position_embeddings)
    weights, misses = model_bytes(model), 1 - budget.share
    speeds = (device_speed, bus_speed, weights.expert)
    limits = [
        {
            "misses": misses * part,
            "tokens_per_second": {
                str(batch): tokens_per_second(config, misses * part, batch, weights.read, *speeds)
                for batch in FORECAST_BATCHES
            },
        }
        for part in (FORECAST_MISSES if misses else (1.0,))
    ]
    return {
        "plan": budget.to_dict(),
        "context": {
            "tokens": tokens,
            "requests": requests,
            "bytes_by_kind": context_bytes(config, tokens),
            "bytes_per_token_by_kind": {kind: each.per_token for kind, each in cache_by_kind(config).items()},
            "bytes_read_per_token_by_kind": step_cache_bytes(config, tokens),
        },
        "limits": limits,
        "speeds": {"device": device_speed, "bus": bus_speed},
    }
