"""The indexer over the many queries of a prompt on a GPU: scores of a block of queries, then their top-k.

`index_topk` is the twin of the reference. `_score` keeps a tile of index keys and iterates over queries; entries that a
query cannot see, and queries that keep all visible entries, are not scored. Scores are stored for `QUERY_BLOCK` queries
at a time. The selection is `topk_entries` of `decode.py`: exact, ties go to the lower index.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from birkhoff.kernels.attend.topk_indices import TopkIndices
from birkhoff.kernels.gpu import power_of_two
from birkhoff.kernels.index.decode import topk_entries

QUERY_BLOCK = 1024


@triton.jit(
    do_not_specialize=["rows", "first_row", "length", "num_entries"],
    do_not_specialize_on_alignment=["counts"],
)
def _score(
    queries,
    keys,
    weights,
    counts,
    scores,
    rows,
    first_row,
    length,
    num_entries,
    topk,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    ENTRIES: tl.constexpr,
    FP32: tl.constexpr,
):
    first = tl.program_id(0) * ENTRIES
    e = first + tl.arange(0, ENTRIES)
    h = tl.arange(0, HEADS)
    d = tl.arange(0, WIDTH)
    first_query = tl.program_id(1) * QUERIES
    sequence = (first_row // length).to(tl.int64)  # the queries of a launch belong to one sequence
    k = tl.load(
        keys + (sequence * num_entries + e.to(tl.int64)[None, :]) * WIDTH + d[:, None],
        mask=(e < num_entries)[None, :],
        other=0.0,
    )
    for i in range(QUERIES):
        row = first_query + i
        count = tl.load(counts + row, mask=row < rows, other=0)
        if (count > topk) & (first < count):
            at = row.to(tl.int64) * HEADS
            q = tl.load(queries + (at + h)[:, None] * WIDTH + d[None, :])
            if FP32:
                match = tl.dot(q, k, input_precision="ieee")
            else:
                match = tl.dot(q, k)
            w = tl.load(weights + at + h).to(tl.float32)
            tl.store(
                scores + row.to(tl.int64) * num_entries + e,
                tl.sum(tl.maximum(match, 0.0) * w[:, None], axis=0),
                mask=e < count,
            )


def index_topk(
    queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, topk: int
) -> TopkIndices:
    batch, length, heads, width = queries.shape
    entries = keys.shape[1]
    assert heads == power_of_two(heads, 16) and width == power_of_two(width, 16)
    queries = queries.to(keys.dtype).flatten(0, 1).contiguous()
    keys = keys.contiguous()
    weights = weights.float().flatten(0, 1).contiguous()
    visible = counts.to(torch.int32).flatten().contiguous()
    indices = torch.empty(batch * length, topk, dtype=torch.int32, device=keys.device)
    fp32 = keys.dtype is torch.float32
    size = min(QUERY_BLOCK, length)
    scores = torch.empty(size, entries, dtype=torch.float32, device=keys.device)
    for start in (sequence * length + first for sequence in range(batch) for first in range(0, length, size)):
        rows = min(size, length - start % length)
        block = slice(start, start + rows)
        _score[(-(-entries // 128), -(-rows // 16))](
            queries[block],
            keys,
            weights[block],
            visible[block],
            scores,
            rows,
            start,
            length,
            entries,
            topk,
            HEADS=heads,
            WIDTH=width,
            QUERIES=16,
            ENTRIES=128,
            FP32=fp32,
            num_warps=4 if fp32 else 8,
            num_stages=2,
        )
        topk_entries(scores[:rows], 4 * visible[block].long() - 1, indices[block])
    return TopkIndices(counts.to(torch.int32).clamp_max(topk), indices.view(batch, length, topk))
