"""Shared-key attention in plain PyTorch, a block of queries at a time to bound the memory of scores."""

from __future__ import annotations

import torch

from birkhoff.kernels.attend.topk_indices import TopkIndices
from birkhoff.kernels.rope.reference import Phases, rotate
from birkhoff.kernels.row_index import RowIndex

QUERY_BLOCK = 256


def attend(
    queries: torch.Tensor,
    recent: torch.Tensor,
    oldest: torch.Tensor,
    entries: torch.Tensor | None,
    selected: torch.Tensor | TopkIndices | None,
    sink: torch.Tensor,
    window: int,
    scale: float,
) -> torch.Tensor:
    if isinstance(selected, TopkIndices):
        selected = None if entries is None else selected.mask(entries.shape[1])
    length = queries.shape[1]
    past = recent.shape[1] - queries.shape[1]
    blocks = []
    for start in range(0, length, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, length)
        first = max(past + start - window + 1, 0)  # the oldest key visible to a query of this block
        keys = recent[:, first : past + stop]
        query_at = torch.arange(past + start, past + stop, device=recent.device).unsqueeze(-1)  # [t, 1]
        key_at = torch.arange(first, past + stop, device=recent.device)  # [k]
        seen = ((key_at <= query_at) & (key_at > query_at - window)) & (
            key_at >= oldest.view(-1, 1, 1)
        )  # [B, t, k]
        if entries is not None and selected is not None:
            keys = torch.cat((keys, entries), dim=1)
            seen = torch.cat((seen, selected[:, start:stop]), dim=-1)
        blocks.append(_attend_dense(queries[:, start:stop], keys, seen, sink, scale))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)


def _attend_dense(q: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, sink: torch.Tensor, scale: float):
    batch, length, heads, width = q.shape
    fp32 = keys.float()
    logits = (q.float().reshape(batch, length * heads, width) @ fp32.transpose(-1, -2)) * scale
    logits = logits.view(batch, length, heads, -1).masked_fill(~seen.unsqueeze(2), -torch.inf)
    top = logits.amax(-1, keepdim=True)  # a query always sees itself: finite
    probs = (logits - top).exp()
    denominator = probs.sum(-1, keepdim=True) + (sink.float().view(-1, 1) - top).exp()
    probs = probs.to(q.dtype).float()
    out = probs.view(batch, length * heads, -1) @ fp32
    return (out.view(batch, length, heads, width) / denominator).to(q.dtype)


def attend_one(
    queries: torch.Tensor,
    recent: torch.Tensor,
    entries: torch.Tensor | None,
    seen: torch.Tensor | None,
    sink: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    keys = recent if entries is None else torch.cat((recent, entries), dim=1)
    if seen is None:
        seen = torch.ones(keys.shape[:2], dtype=torch.bool, device=keys.device)
    else:  # an unseen row may hold another sequence's NaN, which a zero weight would not mask
        keys = keys.masked_fill(~seen.unsqueeze(-1), 0.0)
    return _attend_dense(queries.unsqueeze(1), keys, seen.unsqueeze(1), sink, scale).squeeze(1)


def attend_paged(
    queries: torch.Tensor,
    keys: torch.Tensor,
    ring: torch.Tensor,
    pages: torch.Tensor | None,
    table: torch.Tensor,
    rows: RowIndex,
    selected: TopkIndices | None,
    sink: torch.Tensor,
    window: int,
    scale: float,
    phases: Phases,
) -> torch.Tensor:
    out = torch.empty_like(queries)
    for row, (slot, position, start) in enumerate(
        torch.stack((rows.slots, rows.positions, rows.starts), dim=-1).tolist()
    ):
        first = max(position - window + 1, 0)
        before = ring[slot, torch.arange(first, max(start, first), device=ring.device) % ring.shape[1]]
        own = keys[row - (position - max(start, first)) : row + 1]
        seen = [before, own]
        if pages is not None and selected is not None:
            count = int(selected.counts[row])
            entries = torch.arange(count, device=ring.device)
            if selected.indices is not None:
                entries = selected.indices[row, :count].long()
            seen.append(pages[table[slot, entries // pages.shape[1]], entries % pages.shape[1]])
        out[row] = attend_one(queries[row : row + 1], torch.cat(seen).unsqueeze(0), None, None, sink, scale)[
            0
        ]
    return rotate(out, phases, inverse=True)
