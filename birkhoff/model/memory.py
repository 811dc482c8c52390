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


@dataclass(frozen=True)
class Memory:
    """One layer's attention of one token, averaged over heads; `window`, `entries` and `sink` sum to 1."""

    ratio: int  # tokens per compressed entry; 0: this layer has none
    first: int  # position of the window's first token
    window: torch.Tensor  # [tokens]
    entries: torch.Tensor  # [entries]: entry e stands for tokens e * ratio ..
    chosen: torch.Tensor  # [entries] bool: what the indexer let through (all visible ones where there is none)
    sink: float


@dataclass(frozen=True)
class Weights:
    """The attention of one token: `share` [heads, keys + 1], the sink last; `keys` [keys, c], window first."""

    share: torch.Tensor
    keys: torch.Tensor
    first: int
    window: int
    chosen: torch.Tensor


def attention_weights(block: Block, u: torch.Tensor, token_ids: torch.Tensor, rope: Rope, position: int) -> Weights:
    """`u` [T, d] is what the attention sublayer of this layer read (`pre_attn`) at every token of the text."""
    attention, batch = block.attn, Batch.whole(token_ids)
    group, state, phases = batch.groups[0], Fresh(), rope.step(batch.positions)
    turn = phases.compressed if attention.ratio else phases.sliding
    latent, keys, *rows = attention.entry(block.attn_norm(u))
    latent = attention.q_norm(latent)
    queries = attention.wq_b(latent).unflatten(-1, (attention.heads, attention.head_dim))
    queries = attention.kernels.rotate(attention.kernels.rms_norm(queries, None, attention.eps), turn)
    keys = attention.numerics.round_key(attention.kernels.rotate(attention.kv_norm(keys), turn), attention.rope_dim)
    entries = chosen = None
    if attention.compressor is not None:
        entries = attention.compressor(group.view(rows[0]), group, state)
        chosen = None if entries is None else visible_entries(group, entries.shape[1], attention.ratio)
    if attention.indexer is not None:
        raw, weights = group.view(rows[1]), group.view(rows[2])
        chosen = attention.indexer(raw, weights, group.view(latent), turn.view(group.view), chosen, group, state)
    first = max(position - attention.window + 1, 0)
    seen, mine = keys[first : position + 1], torch.zeros(0, dtype=torch.bool, device=u.device)
    if entries is not None:
        mine = mine.new_ones(entries.shape[1]) if chosen is None else chosen[0, position]
        seen = torch.cat((seen, entries[0]))
    logits = (queries[position].float() @ seen.float().T) * attention.scale  # [h, K]
    window = position + 1 - first
    logits[:, window:] = logits[:, window:].masked_fill(~mine, -torch.inf)
    share = torch.cat((logits, attention.attn_sink.float().unsqueeze(-1)), dim=-1).softmax(-1)
    return Weights(share, seen, first, window, mine)


def remembered(block: Block, u: torch.Tensor, token_ids: torch.Tensor, rope: Rope, position: int) -> Memory:
    found = attention_weights(block, u, token_ids, rope, position)
    mean = found.share.mean(0)
    return Memory(
        block.attn.ratio, found.first, mean[: found.window], mean[found.window : -1], found.chosen, float(mean[-1])
    )
