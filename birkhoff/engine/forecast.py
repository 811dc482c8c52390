"""What a model would take and give on a device that need not be here: a plan of its memory and limits of its speed.

From a config alone: bytes by kind, how many experts are hot, what a context costs by kind of layer, and the tokens per
second that bytes allow at most, for the share of misses a random placement has and for smaller ones. For the
released formats, as this program holds them.
"""

from __future__ import annotations

from typing import Any

from birkhoff.config import V4Config
from birkhoff.engine.memory_plan import (
    BUS_SPEED,
    CACHE_TOKENS,
    DEVICE_SPEED,
    cache_by_kind,
    context_bytes,
    default_cache,
    plan_budget,
    step_cache_bytes,
    tokens_per_second,
    weights_of,
)

BATCHES = (1, 8, 64)
BETTER = (1.0, 0.25, 0.1, 0.0)  # parts of a random placement's misses that better ones may leave


def forecast(
    config: V4Config,
    device_bytes: int,
    *,
    context: int | None = None,
    requests: int = 1,
    device_speed: float = DEVICE_SPEED,
    bus_speed: float = BUS_SPEED,
) -> dict[str, Any]:
    """A plan and its limits as plain data; refuses a device that cannot hold the dense part, with the numbers."""
    tokens = min(context or CACHE_TOKENS, config.max_position_embeddings)
    cache = default_cache(config, device_bytes, requests, context)
    budget = plan_budget(config, device_bytes, cache)
    read, misses = weights_of(config).read, 1 - budget.share
    limits = [
        {
            "misses": misses * part,
            "tokens_per_second": {
                str(batch): tokens_per_second(config, misses * part, batch, read, device_speed, bus_speed)
                for batch in BATCHES
            },
        }
        for part in (BETTER if misses else (1.0,))
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
