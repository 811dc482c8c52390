"""Prefill attention on a CPU: blocks of at most a window of queries, over the entries they can reach.

The reference scores every query of a block against all keys that any of them sees. A block of one window of queries
sees two windows; entries after the last one visible to the block are skipped. Scores, mask, exponential and sum use
one buffer in place.
"""

from __future__ import annotations

import torch

from birkhoff.kernels.attend import reference
from birkhoff.kernels.attend.topk_indices import TopkIndices
from birkhoff.kernels.packed import native

MIN_BLOCK = 64


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
    if queries.dtype is not torch.float32:
        return reference.attend(queries, recent, oldest, entries, selected, sink, window, scale)
    if isinstance(selected, TopkIndices):
        selected = None if entries is None else selected.mask(entries.shape[1])
    if native.available():
        return native.attend(queries, recent, oldest, entries, selected, sink, window, scale)
    batch, length, heads, width = queries.shape
    past = recent.shape[1] - length
    block = max(window, MIN_BLOCK)
    entry_reach = None if selected is None else _reach(selected)
    padded = bool((oldest > 0).any())
    out = torch.empty(queries.shape)
    for start in range(0, length, block):
        stop = min(start + block, length)
        first = max(past + start - window + 1, 0)
        near = recent[:, first : past + stop]
        query_at = torch.arange(past + start, past + stop).unsqueeze(-1)
        key_at = torch.arange(first, past + stop)
        hidden = (key_at > query_at) | (key_at <= query_at - window)  # [t, k]
        hidden_mask = hidden.expand(batch, -1, -1)
        if padded:
            hidden_mask = hidden_mask | (key_at < oldest.view(-1, 1, 1))
        far_count = 0 if entry_reach is None else int(entry_reach[start:stop].max())
        q = queries[:, start:stop].reshape(batch, (stop - start) * heads, width)
        logits = torch.empty(batch, (stop - start) * heads, near.shape[1] + far_count)
        logits[..., : near.shape[1]] = torch.bmm(q, near.transpose(1, 2))
        if far_count:
            assert entries is not None and selected is not None
            logits[..., near.shape[1] :] = torch.bmm(q, entries[:, :far_count].transpose(1, 2))
            hidden_mask = torch.cat((hidden_mask, ~selected[:, start:stop, :far_count]), dim=-1)
        logits = logits.view(batch, stop - start, heads, -1)
        logits.mul_(scale).masked_fill_(hidden_mask.unsqueeze(2), -torch.inf)
        top = logits.amax(-1, keepdim=True)
        logits.sub_(top).exp_()
        denominator = logits.sum(-1, keepdim=True).add_((sink.view(-1, 1) - top).exp_())
        probs = logits.view(batch, (stop - start) * heads, -1)
        weighted = torch.bmm(probs[..., : near.shape[1]], near)
        if far_count:
            assert entries is not None
            weighted.baddbmm_(probs[..., near.shape[1] :], entries[:, :far_count])
        torch.div(weighted.view(batch, stop - start, heads, width), denominator, out=out[:, start:stop])
    return out


def _reach(selected: torch.Tensor) -> torch.Tensor:
    """[T]: number of leading entries that contain all those visible to query t of any sequence."""
    last = selected.shape[-1] - selected.flip(-1).to(torch.uint8).argmax(-1)
    return torch.where(selected.any(-1), last, 0).amax(0)
