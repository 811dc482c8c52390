"""Indexer scores and top-k selection in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from birkhoff.kernels.attend.topk_indices import TopkIndices

QUERY_BLOCK = 256  # queries scored at a time, which bounds the memory of [heads, entries] scores


class IndexChunk(NamedTuple):
    """Rows first .. first + length - 1 of a step, which are queries of one slot over its first `entries` entries."""

    first: int
    length: int
    slot: int
    entries: int


def score(queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    batch, length, heads, width = queries.shape
    match = queries.float().reshape(batch, length * heads, width) @ keys.float().transpose(-1, -2)
    match = (
        match.view(batch, length, heads, -1).relu_()
        if not match.requires_grad
        else match.view(batch, length, heads, -1).relu()
    )
    return (weights.float().unsqueeze(-2) @ match).squeeze(-2)


def topk_mask(scores: torch.Tensor, visible: torch.Tensor, topk: int) -> torch.Tensor:
    if scores.shape[-1] <= topk:
        return visible
    scores = scores.masked_fill(~visible, -torch.inf)
    threshold = scores.topk(topk, dim=-1).values[..., -1:]  # the topk-th value
    above, tied = scores > threshold, scores == threshold
    ties_kept = topk - above.sum(-1, keepdim=True)
    return (above | (tied & (tied.cumsum(-1) <= ties_kept))) & visible


def index_topk(
    queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, topk: int
) -> TopkIndices:
    visible = TopkIndices(counts).mask(keys.shape[1])
    blocks = [
        topk_mask(score(q, keys, w), v, topk)
        for q, w, v in zip(*(t.split(QUERY_BLOCK, dim=1) for t in (queries, weights, visible)))
    ]
    # Selected entries first, in ascending order; indices after `counts` are ignored.
    indices = (~torch.cat(blocks, dim=1)).to(torch.uint8).sort(dim=-1, stable=True).indices[..., :topk]
    return TopkIndices(counts.to(torch.int32).clamp_max(topk), indices.to(torch.int32))


def index_chunks(
    queries: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    counts: torch.Tensor,
    chunks: Sequence[IndexChunk],
    topk: int,
    scale: float,
) -> torch.Tensor:
    first = torch.arange(topk, dtype=torch.int32, device=counts.device)
    indices = first.expand(len(queries), -1).contiguous()
    weights = weights.to(queries.dtype).float() * scale
    for chunk in chunks:
        rows = slice(chunk.first, chunk.first + chunk.length)
        keys = pages[table[chunk.slot]].flatten(0, 1)[: chunk.entries]
        query, weight, count = (part[rows].unsqueeze(0) for part in (queries, weights, counts))
        found = index_topk(query, keys.unsqueeze(0), weight, count, topk).indices
        assert found is not None
        indices[rows] = found[0]
    return indices
