"""Attention weights of a text per layer: sliding window, compressed entries and sink, in token positions.

A V4 query attends to a sliding window of single tokens, to compressed entries that each cover a block of 4 or 128
tokens (for blocks of 4 only those selected by the indexer), and to a sink. The attention of one layer is recomputed
here from the sublayer's input (`pre_attn`), keeping the weights instead of the output; the running model is not
involved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from birkhoff.analysis.forward import trace
from birkhoff.errors import SiteError, quoted
from birkhoff.model.batch import Batch
from birkhoff.model.block import Block
from birkhoff.model.compressor import visible_entries
from birkhoff.model.rope import Rope
from birkhoff.model.state import Fresh
from birkhoff.option_checks import as_int

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine
    from birkhoff.steering.resolver import Steering

QUERY_BLOCK = 128  # query tokens per block; bounds the memory of the weights
KINDS = {0: "window", 4: "csa", 128: "hca"}  # layer kind by compression ratio

SMALLEST_WEIGHT = 1e-4  # of a span in JSON


@dataclass(frozen=True)
class AttentionReadout:
    """Attention of one token in one layer, averaged over heads; `window`, `entries` and `sink` sum to 1."""

    ratio: int  # tokens per compressed entry; 0: the layer has none
    first: int  # position of the window's first token
    window: torch.Tensor  # [tokens]
    entries: torch.Tensor  # [entries]: entry e covers tokens e * ratio .. (e + 1) * ratio - 1
    chosen: torch.Tensor  # [entries] bool: selected by the indexer; all visible entries without one
    sink: float


@dataclass(frozen=True)
class AttentionWeights:
    """Attention of one token by head: `share` [heads, keys + 1], the sink last; `keys` [keys, c], window first."""

    share: torch.Tensor
    keys: torch.Tensor
    first: int
    window: int
    chosen: torch.Tensor


def attention(
    engine: Engine, texts: Sequence[Sequence[int]], position: int = -1, steer: Steering = None
) -> list[list[AttentionReadout]]:
    """Return for each text one `AttentionReadout` per layer, of the token at `position`; negative positions count from
    the end."""
    cut = []
    for ids in texts:
        if as_int(position) is None or not -len(ids) <= position < len(ids):
            raise SiteError(f"position is {quoted(position)}, the text has {len(ids)} tokens.")
        cut.append(list(ids)[: position % len(ids) + 1])  # attention is causal: later tokens have no effect
    model = engine.v4_model
    readouts = []
    with torch.no_grad():
        for each in trace(engine, cut, "pre_attn", steer):
            tokens = torch.tensor(each.token_ids, device=model.device)
            readouts.append(
                [
                    layer_readout(block, each["pre_attn", layer], tokens, model.rope, len(tokens) - 1)
                    for layer, block in enumerate(model.blocks())
                ]
            )
    return readouts


def attention_masses(engine: Engine, token_ids: Sequence[int], steer: Steering = None) -> torch.Tensor:
    """Return [layers, T, 3]: attention mass on the window, on compressed entries and on the sink, for every token."""
    recorded = engine.trace(token_ids, hooks=["pre_attn"], steer=steer)
    model, tokens = engine.v4_model, torch.tensor(list(token_ids), device=engine.model.embed.device)
    with torch.no_grad():
        masses = [
            layer_masses(block, recorded["pre_attn", layer], tokens, model.rope)
            for layer, block in enumerate(model.layers)
            if isinstance(block, Block)
        ]
    return torch.stack(masses)


def attention_json(readouts: Sequence[AttentionReadout]) -> list[dict[str, Any]]:
    """Convert readouts to JSON: spans `[from, to)` of the text with their weight.

    Weights below `SMALLEST_WEIGHT` are summed in `rest`, so that all weights still sum to 1.
    """
    layers = []
    for readout in readouts:
        spans, rest = [], 0.0
        for offset, weight in enumerate(readout.window.tolist()):
            if weight >= SMALLEST_WEIGHT:
                start = readout.first + offset
                spans.append({"from": start, "to": start + 1, "weight": weight})
            else:
                rest += weight
        blocks = []
        for entry, (weight, chosen) in enumerate(zip(readout.entries.tolist(), readout.chosen.tolist())):
            if weight >= SMALLEST_WEIGHT:
                start = entry * readout.ratio
                blocks.append(
                    {"from": start, "to": start + readout.ratio, "weight": weight, "chosen": chosen}
                )
            else:
                rest += weight
        layers.append(
            {
                "kind": KINDS.get(readout.ratio, f"blocks of {readout.ratio}"),
                "window": spans,
                "blocks": blocks,
                "chosen": int(readout.chosen.sum()),
                "entries": len(readout.entries),
                "sink": readout.sink,
                "rest": rest,
            }
        )
    return layers


def attention_weights(
    block: Block, inputs: torch.Tensor, token_ids: torch.Tensor, rope: Rope, position: int
) -> AttentionWeights:
    """Recompute the attention of the token at `position`. `inputs` [T, d]: the sublayer's input (`pre_attn`)."""
    sublayer = _Sublayer.of(block, inputs, token_ids, rope)
    attn = block.attn
    first = max(position - attn.window + 1, 0)
    keys = torch.cat((sublayer.keys[first : position + 1], sublayer.entries))
    window = position + 1 - first
    chosen = sublayer.chosen[position]
    logits = (sublayer.queries[position] @ keys.T) * attn.scale  # [h, K]
    logits[:, window:] = logits[:, window:].masked_fill(~chosen, -torch.inf)
    share = torch.cat((logits, attn.attn_sink.float().unsqueeze(-1)), dim=-1).softmax(-1)
    return AttentionWeights(share, keys, first, window, chosen)


def layer_readout(
    block: Block, inputs: torch.Tensor, token_ids: torch.Tensor, rope: Rope, position: int
) -> AttentionReadout:
    """Recompute the attention of the token at `position`, averaged over heads; arguments as `attention_weights`."""
    weights = attention_weights(block, inputs, token_ids, rope, position)
    mean = weights.share.mean(0)
    return AttentionReadout(
        block.attn.ratio,
        weights.first,
        mean[: weights.window],
        mean[weights.window : -1],
        weights.chosen,
        float(mean[-1]),
    )


def layer_masses(block: Block, inputs: torch.Tensor, token_ids: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Return [T, 3]: each token's attention mass on the window, on compressed entries and on the sink."""
    sublayer = _Sublayer.of(block, inputs, token_ids, rope)
    attn = block.attn
    length, parts = len(sublayer.keys), []
    for start in range(0, length, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, length)
        first = max(start - attn.window + 1, 0)
        query = torch.arange(start, stop).unsqueeze(-1)
        key = torch.arange(first, stop)
        in_window = ((key <= query) & (key > query - attn.window)).to(inputs.device)
        visible = torch.cat((in_window, sublayer.chosen[start:stop]), dim=-1)
        keys = torch.cat((sublayer.keys[first:stop], sublayer.entries))
        logits = torch.einsum("thc,kc->htk", sublayer.queries[start:stop], keys) * attn.scale
        logits = logits.masked_fill(~visible, -torch.inf)
        sink = attn.attn_sink.float().view(-1, 1, 1).expand(-1, stop - start, 1)
        share = torch.cat((logits, sink), dim=-1).softmax(-1).mean(0)  # [t, K + 1]
        window = stop - first
        parts.append(
            torch.stack((share[:, :window].sum(-1), share[:, window:-1].sum(-1), share[:, -1]), dim=-1)
        )
    return torch.cat(parts)


@dataclass(frozen=True)
class _Sublayer:
    """One attention sublayer before its softmax: queries [T, h, c], keys [T, c], entries [E, c], chosen [T, E]."""

    queries: torch.Tensor
    keys: torch.Tensor
    entries: torch.Tensor
    chosen: torch.Tensor

    @classmethod
    def of(cls, block: Block, inputs: torch.Tensor, token_ids: torch.Tensor, rope: Rope) -> _Sublayer:
        attn, batch = block.attn, Batch.whole(token_ids)
        group = batch.groups[0]
        state = Fresh()
        phases = rope.step(batch.positions)
        turn = phases.compressed if attn.ratio else phases.sliding
        queries, keys, latent, rows = attn.project(block.attn_norm(inputs), turn)
        entries = chosen = None
        if attn.compressor is not None:
            entries = attn.compressor(group.view(rows[0]), group, state)
            chosen = None if entries is None else visible_entries(group, entries.shape[1], attn.ratio)
        if attn.indexer is not None:
            raw, weights = group.view(rows[1]), group.view(rows[2])
            chosen = attn.indexer(
                raw, weights, group.view(latent), turn.view(group.view), chosen, group, state
            )
        if entries is None:
            entries = keys.new_zeros(1, 0, keys.shape[-1])
        if chosen is None:
            chosen = torch.ones(1, len(keys), entries.shape[1], dtype=torch.bool, device=keys.device)
        return cls(queries.float(), keys.float(), entries[0].float(), chosen[0])
