"""Indexer scores and choice in plain PyTorch."""

from __future__ import annotations

import torch


def score(queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    batch, length, heads, width = queries.shape
    match = queries.float().reshape(batch, length * heads, width) @ keys.float().transpose(-1, -2)
    match = (
        match.view(batch, length, heads, -1).relu_()
        if not match.requires_grad
        else match.view(batch, length, heads, -1).relu()
    )
    return (weights.float().unsqueeze(-2) @ match).squeeze(-2)


def choose(scores: torch.Tensor, visible: torch.Tensor, topk: int) -> torch.Tensor:
    if scores.shape[-1] <= topk:
        return visible
    scores = scores.masked_fill(~visible, -torch.inf)
    worst = scores.topk(topk, dim=-1).values[..., -1:]  # the value of the last place, whichever entry holds it
    better, tied = scores > worst, scores == worst
    places = topk - better.sum(-1, keepdim=True)
    return (better | (tied & (tied.cumsum(-1) <= places))) & visible
