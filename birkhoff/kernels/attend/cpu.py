"""One query per sequence on a CPU: window and entries are multiplied apart, so that no keys are copied together."""

from __future__ import annotations

import torch

from birkhoff.kernels.attend import reference


def attend_one(
    queries: torch.Tensor,
    recent: torch.Tensor,
    entries: torch.Tensor | None,
    seen: torch.Tensor | None,
    sink: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    if queries.dtype is not torch.float32:
        return reference.attend_one(queries, recent, entries, seen, sink, scale)
    batch, heads, _ = queries.shape
    count = recent.shape[1]
    logits = [torch.bmm(queries, recent.transpose(1, 2))]
    if entries is not None:
        logits.append(torch.bmm(queries, entries.transpose(1, 2)))
    logits.append((sink / scale).view(1, heads, 1).expand(batch, heads, 1))
    joined = torch.cat(logits, dim=-1).mul_(scale)
    if seen is not None:
        joined[..., :-1].masked_fill_(~seen.unsqueeze(1), -torch.inf)
    weight = joined.softmax(-1)
    out = torch.bmm(weight[..., :count], recent)
    if entries is not None:
        out.baddbmm_(weight[..., count:-1], entries)
    return out
