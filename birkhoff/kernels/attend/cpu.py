"""Prefill attention on a CPU: blocks of queries no longer than the window, in place, over the entries they can reach.

The plain twin scores every query of a block against everything any of them sees. A window's worth of queries sees two
windows; entries after the last one visible to the block are left out altogether. Scores are made, masked, raised and
summed in one buffer.
"""

from __future__ import annotations

import torch

from birkhoff.kernels.attend import reference
from birkhoff.kernels.attend.topk_indices import TopkIndices

LEAST_BLOCK = 64


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
    if queries.dtype is not torch.float32:
        return reference.attend(queries, recent, oldest, entries, chosen, sink, window, scale)
    if isinstance(chosen, TopkIndices):
        chosen = None if entries is None else chosen.mask(entries.shape[1])
    batch, length, heads, width = queries.shape
    past = recent.shape[1] - length
    block = max(window, LEAST_BLOCK)
    reach = None if chosen is None else _reach(chosen)
    padded = bool((oldest > 0).any())
    out = torch.empty(queries.shape)
    for start in range(0, length, block):
        stop = min(start + block, length)
        first = max(past + start - window + 1, 0)
        near = recent[:, first : past + stop]
        at = torch.arange(past + start, past + stop).unsqueeze(-1)
        of = torch.arange(first, past + stop)
        hidden = (of > at) | (of <= at - window)  # [t, k]
        unseen = hidden.expand(batch, -1, -1)
        if padded:
            unseen = unseen | (of < oldest.view(-1, 1, 1))
        far = 0 if reach is None else int(reach[start:stop].max())
        q = queries[:, start:stop].reshape(batch, (stop - start) * heads, width)
        logits = torch.empty(batch, (stop - start) * heads, near.shape[1] + far)
        logits[..., : near.shape[1]] = torch.bmm(q, near.transpose(1, 2))
        if far:
            assert entries is not None and chosen is not None
            logits[..., near.shape[1] :] = torch.bmm(q, entries[:, :far].transpose(1, 2))
            unseen = torch.cat((unseen, ~chosen[:, start:stop, :far]), dim=-1)
        logits = logits.view(batch, stop - start, heads, -1)
        logits.mul_(scale).masked_fill_(unseen.unsqueeze(2), -torch.inf)
        top = logits.amax(-1, keepdim=True)
        logits.sub_(top).exp_()
        total = logits.sum(-1, keepdim=True).add_((sink.view(-1, 1) - top).exp_())
        weight = logits.view(batch, (stop - start) * heads, -1)
        mixed = torch.bmm(weight[..., : near.shape[1]], near)
        if far:
            assert entries is not None
            mixed.baddbmm_(weight[..., near.shape[1] :], entries[:, :far])
        torch.div(mixed.view(batch, stop - start, heads, width), total, out=out[:, start:stop])
    return out


def _reach(chosen: torch.Tensor) -> torch.Tensor:
    """[T]: how many entries, from the first, any sequence's query t may look at."""
    last = chosen.shape[-1] - chosen.flip(-1).to(torch.uint8).argmax(-1)
    return torch.where(chosen.any(-1), last, 0).amax(0)
