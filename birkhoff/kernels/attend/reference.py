"""Shared-key attention in plain PyTorch, a block of queries at a time so that scores stay small."""

from __future__ import annotations

import torch

from birkhoff.kernels.attend.topk_indices import TopkIndices

QUERY_BLOCK = 256


def attend(
    queries: torch.Tensor,
    recent: torch.Tensor,
    oldest: torch.Tensor,
    entries: torch.Tensor | None,
    chosen: torch.Tensor | TopkIndices | None,
    sink: torch.Tensor,
    window: int,
    scale: float,
) -> torch.Tensor:
    if isinstance(chosen, TopkIndices):
        chosen = None if entries is None else chosen.mask(entries.shape[1])
    length = queries.shape[1]
    past = recent.shape[1] - queries.shape[1]
    blocks = []
    for start in range(0, length, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, length)
        first = max(past + start - window + 1, 0)  # the oldest key any query of this block can see
        keys = recent[:, first : past + stop]
        at = torch.arange(past + start, past + stop, device=recent.device).unsqueeze(-1)  # [t, 1]
        of = torch.arange(first, past + stop, device=recent.device)  # [k]
        seen = ((of <= at) & (of > at - window)) & (of >= oldest.view(-1, 1, 1))  # [B, t, k]
        if entries is not None and chosen is not None:
            keys = torch.cat((keys, entries), dim=1)
            seen = torch.cat((seen, chosen[:, start:stop]), dim=-1)
        blocks.append(_attend_dense(queries[:, start:stop], keys, seen, sink, scale))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)


def _attend_dense(q: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, sink: torch.Tensor, scale: float):
    batch, length, heads, width = q.shape
    wide = keys.float()
    logits = (q.float().reshape(batch, length * heads, width) @ wide.transpose(-1, -2)) * scale
    logits = logits.view(batch, length, heads, -1).masked_fill(~seen.unsqueeze(2), -torch.inf)
    top = logits.amax(-1, keepdim=True)  # a query always sees itself: finite
    weight = (logits - top).exp()
    total = weight.sum(-1, keepdim=True) + (sink.float().view(-1, 1) - top).exp()
    weight = weight.to(q.dtype).float()
    out = weight.view(batch, length * heads, -1) @ wide
    return (out.view(batch, length, heads, width) / total).to(q.dtype)


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
    else:  # an unseen row may be another sequence's, and NaN: weight zero would not silence it
        keys = keys.masked_fill(~seen.unsqueeze(-1), 0.0)
    return _attend_dense(queries.unsqueeze(1), keys, seen.unsqueeze(1), sink, scale).squeeze(1)
