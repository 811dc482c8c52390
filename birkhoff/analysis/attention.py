"""Where a token's attention goes: window, compressed blocks and sink, for every layer, in positions of the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from birkhoff.analysis.attention_readout import AttentionReadout, masses, remembered
from birkhoff.errors import SiteError, quoted
from birkhoff.model.block import Block

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine
    from birkhoff.steering.resolver import Steering


def attention(
    engine: Engine, token_ids: Sequence[int], position: int = -1, steer: Steering = None
) -> list[AttentionReadout]:
    """One `AttentionReadout` per layer for the token at `position`; negative ones count from the end."""
    ids = list(token_ids)
    if isinstance(position, bool) or not isinstance(position, int) or not -len(ids) <= position < len(ids):
        raise SiteError(f"position is {quoted(position)}, the text has {len(ids)} tokens.")
    ids = ids[: position % len(ids) + 1]  # what comes later is not seen
    trace = engine.trace(ids, hooks=["pre_attn"], steer=steer)
    model, tokens = engine.model, torch.tensor(ids, device=engine.model.embed.device)
    found = []
    with torch.no_grad():
        for layer, block in enumerate(model.layers):
            assert isinstance(block, Block)
            found.append(remembered(block, trace["pre_attn", layer], tokens, model.rope, len(ids) - 1))
    return found


def attention_masses(engine: Engine, token_ids: Sequence[int], steer: Steering = None) -> torch.Tensor:
    """[layers, T, 3]: shares of the window, of compressed entries and of the sink, for every token."""
    trace = engine.trace(token_ids, hooks=["pre_attn"], steer=steer)
    model, tokens = engine.model, torch.tensor(list(token_ids), device=engine.model.embed.device)
    with torch.no_grad():
        found = []
        for layer, block in enumerate(model.layers):
            assert isinstance(block, Block)
            found.append(masses(block, trace["pre_attn", layer], tokens, model.rope))
        return torch.stack(found)


def attention_json(memories: Sequence[AttentionReadout], smallest: float = 1e-4) -> list[dict[str, Any]]:
    """Plain data: spans `[from, to)` of the text with the weight that went there; weights below `smallest` are summed
    up in `rest`, so that everything still adds up to 1."""
    out = []
    for memory in memories:
        spans, rest = [], 0.0
        for offset, weight in enumerate(memory.window.tolist()):
            if weight >= smallest:
                spans.append(
                    {"from": memory.first + offset, "to": memory.first + offset + 1, "weight": weight}
                )
            else:
                rest += weight
        blocks = []
        for entry, (weight, chosen) in enumerate(zip(memory.entries.tolist(), memory.chosen.tolist())):
            if weight >= smallest:
                at = entry * memory.ratio
                blocks.append({"from": at, "to": at + memory.ratio, "weight": weight, "chosen": chosen})
            else:
                rest += weight
        kind = {0: "window", 4: "csa", 128: "hca"}.get(memory.ratio, f"blocks of {memory.ratio}")
        out.append(
            {
                "kind": kind,
                "window": spans,
                "blocks": blocks,
                "chosen": int(memory.chosen.sum()),
                "entries": len(memory.entries),
                "sink": memory.sink,
                "rest": rest,
            }
        )
    return out
