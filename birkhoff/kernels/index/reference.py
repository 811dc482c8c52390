"""Indexer scores and top-k selection in plain PyTorch."""

from __future__ import annotations

import torch

from birkhoff.kernels.attend.topk_indices import TopkIndices

QUERY_BLOCK = 256  # queries scored at a time, which bounds the memory of [heads, entries] scores


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
