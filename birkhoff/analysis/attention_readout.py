"""What one token remembers: where its attention goes, layer by layer, in tokens of the text.

A query of V4 sees a sliding window of single tokens, compressed entries that each stand for a block of 4 or 128 tokens
(for blocks of 4 only the indexer's choice), and a sink that takes what is not wanted. `remembered` computes the same
attention again from the sublayer's input and keeps the weights instead of the values, so that they can be shown. It is
one row of plain arithmetic per layer; the running model is not touched.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from birkhoff.model.batch import Batch
from birkhoff.model.block import Block
from birkhoff.model.compressor import visible_entries
from birkhoff.model.rope import Rope
from birkhoff.model.state import Fresh

QUERY_BLOCK = 128  # tokens whose weights are held at a time


@dataclass(frozen=True)
class AttentionReadout:
    """One layer's attention of one token, averaged over heads; `window`, `entries` and `sink` sum to 1."""

    ratio: int  # tokens per compressed entry; 0: this layer has none
    first: int  # position of the window's first token
    window: torch.Tensor  # [tokens]
    entries: torch.Tensor  # [entries]: entry e stands for tokens e * ratio ..
    chosen: (
        torch.Tensor
    )  # [entries] bool: what the indexer let through (all visible ones where there is none)
    sink: float


@dataclass(frozen=True)
class AttentionWeights:
    """The attention of one token: `share` [heads, keys + 1], the sink last; `keys` [keys, c], window first."""

    share: torch.Tensor
    keys: torch.Tensor
    first: int
    window: int
    chosen: torch.Tensor


@dataclass(frozen=True)
class _Sublayer:
    """One attention sublayer before its softmax: queries [T, h, c], keys [T, c], entries [E, c], chosen [T, E]."""

    queries: torch.Tensor
    keys: torch.Tensor
    entries: torch.Tensor
    chosen: torch.Tensor

    @classmethod
    def of(cls, block: Block, u: torch.Tensor, token_ids: torch.Tensor, rope: Rope) -> _Sublayer:
        attention, batch = block.attn, Batch.whole(token_ids)
        group = batch.groups[0]
        state = Fresh()
        phases = rope.step(batch.positions)
        turn = phases.compressed if attention.ratio else phases.sliding
        latent, keys, *rows = attention.entry(block.attn_norm(u))
        latent = attention.q_norm(latent)
        queries = attention.wq_b(latent).unflatten(-1, (attention.heads, attention.head_dim))
        queries = attention.kernels.rotate(attention.kernels.rms_norm(queries, None, attention.eps), turn)
        keys = attention.numerics.round_key(
            attention.kernels.rotate(attention.kv_norm(keys), turn), attention.rope_dim
        )
        entries = chosen = None
        if attention.compressor is not None:
            entries = attention.compressor(group.view(rows[0]), group, state)
            chosen = None if entries is None else visible_entries(group, entries.shape[1], attention.ratio)
        if attention.indexer is not None:
            raw, weights = group.view(rows[1]), group.view(rows[2])
            chosen = attention.indexer(
                raw, weights, group.view(latent), turn.view(group.view), chosen, group, state
            )
        if entries is None:
            entries = keys.new_zeros(1, 0, keys.shape[-1])
        if chosen is None:
            chosen = torch.ones(1, len(keys), entries.shape[1], dtype=torch.bool, device=keys.device)
        return cls(queries.float(), keys.float(), entries[0].float(), chosen[0])


def attention_weights(
    block: Block, u: torch.Tensor, token_ids: torch.Tensor, rope: Rope, position: int
) -> AttentionWeights:
    """`u` [T, d] is what the attention sublayer of this layer read (`pre_attn`) at every token of the text."""
    found = _Sublayer.of(block, u, token_ids, rope)
    attention = block.attn
    first = max(position - attention.window + 1, 0)
    seen = torch.cat((found.keys[first : position + 1], found.entries))
    window = position + 1 - first
    chosen = found.chosen
    logits = (found.queries[position] @ seen.T) * attention.scale  # [h, K]
    logits[:, window:] = logits[:, window:].masked_fill(~chosen[position], -torch.inf)
    share = torch.cat((logits, attention.attn_sink.float().unsqueeze(-1)), dim=-1).softmax(-1)
    return AttentionWeights(share, seen, first, window, chosen[position])


def remembered(
    block: Block, u: torch.Tensor, token_ids: torch.Tensor, rope: Rope, position: int
) -> AttentionReadout:
    found = attention_weights(block, u, token_ids, rope, position)
    mean = found.share.mean(0)
    return AttentionReadout(
        block.attn.ratio,
        found.first,
        mean[: found.window],
        mean[found.window : -1],
        found.chosen,
        float(mean[-1]),
    )


def masses(block: Block, u: torch.Tensor, token_ids: torch.Tensor, rope: Rope) -> torch.Tensor:
    """How much of every token's attention goes to the window, to compressed entries and to the sink: [T, 3]."""
    found = _Sublayer.of(block, u, token_ids, rope)
    attention = block.attn
    length, parts = len(found.keys), []
    for start in range(0, length, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, length)
        first = max(start - attention.window + 1, 0)
        at = torch.arange(start, stop).unsqueeze(-1)
        of = torch.arange(first, stop)
        seen = torch.cat(
            (((of <= at) & (of > at - attention.window)).to(u.device), found.chosen[start:stop]), dim=-1
        )
        keys = torch.cat((found.keys[first:stop], found.entries))
        logits = torch.einsum("thc,kc->htk", found.queries[start:stop], keys) * attention.scale
        logits = logits.masked_fill(~seen, -torch.inf)
        sink = attention.attn_sink.float().view(-1, 1, 1).expand(-1, stop - start, 1)
        share = torch.cat((logits, sink), dim=-1).softmax(-1).mean(0)  # [t, K + 1]
        window = stop - first
        parts.append(
            torch.stack((share[:, :window].sum(-1), share[:, window:-1].sum(-1), share[:, -1]), dim=-1)
        )
    return torch.cat(parts)
