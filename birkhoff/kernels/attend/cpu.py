"""One query per sequence as compiled loops over its window and entries; nothing is copied or padded."""

from __future__ import annotations

import numpy as np
import torch

from birkhoff.kernels.attend import reference
from birkhoff.kernels.jit import compiled

ALL_SEEN = np.ones((0, 0), np.bool_)
NO_ENTRIES = np.ones((0, 0, 0), np.float32)


@compiled
def _attend(queries, recent, entries, seen, sink, scale, out):
    batch, heads, width = queries.shape
    near, far = recent.shape[1], entries.shape[1]
    masked = seen.shape[0] > 0
    logits = np.empty((heads, near + far), np.float32)
    for b in range(batch):
        for e in range(near + far):
            visible = not masked or seen[b, e]
            key = recent[b, e] if e < near else entries[b, e - near]
            for h in range(heads):
                total = scale * 0
                if visible:
                    q = queries[b, h]
                    for c in range(width):
                        total += q[c] * key[c]
                    logits[h, e] = total * scale
                else:
                    logits[h, e] = -np.inf
        for h in range(heads):
            row, target = logits[h], out[b, h]
            top = sink[h]
            for e in range(near + far):
                top = max(top, row[e])
            total = np.exp(sink[h] - top)
            for e in range(near + far):
                row[e] = np.exp(row[e] - top)
                total += row[e]
            for c in range(width):
                target[c] = 0
            for e in range(near):
                weight, key = row[e] / total, recent[b, e]
                for c in range(width):
                    target[c] += weight * key[c]
            for e in range(far):
                weight, key = row[near + e] / total, entries[b, e]
                for c in range(width):
                    target[c] += weight * key[c]


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
    out = torch.empty(queries.shape)
    far = NO_ENTRIES if entries is None else entries.numpy()
    mask = ALL_SEEN if seen is None else seen.numpy()
    _attend(queries.numpy(), recent.numpy(), far, mask, sink.numpy(), np.float32(scale), out.numpy())
    return out
