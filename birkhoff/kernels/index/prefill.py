"""The indexer over the many queries of a prompt on a GPU: scores of all queries, then their top-k, two launches.

`index_chunks` and `index_topk` are the twins of the reference. `_score` keeps a tile of index keys, read from their
pages, and iterates over queries. Entries are the rows of its products, so that a sum over heads stays within a few
threads; tiles that no query of a program sees, or whose queries keep all visible entries, are not scored. Scores of at
most `MAX_SCORES` pairs are stored at a time. The selection is `topk_entries` of `decode.py`: exact, ties go to the
lower index.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from birkhoff.kernels.attend.topk_indices import TopkIndices
from birkhoff.kernels.gpu import HOPPER_SHARED, power_of_two, shared_memory
from birkhoff.kernels.index.decode import topk_entries
from birkhoff.kernels.index.reference import IndexChunk

MAX_SCORES = 1 << 26  # pairs of a query and an entry, four bytes each


@triton.jit(
    do_not_specialize=["rows", "slot", "max_entries", "weight_stride", "table_stride"],
    do_not_specialize_on_alignment=["weights", "counts", "scores"],
)
def _score(
    queries,
    weights,
    weight_stride,
    counts,
    pages,
    table,
    table_stride,
    slot,
    scores,
    rows,
    max_entries,
    topk,
    scale,
    PER_PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    ENTRIES: tl.constexpr,
    FP32: tl.constexpr,
):
    first = tl.program_id(0) * ENTRIES
    first_query = tl.program_id(1) * QUERIES
    r = first_query + tl.arange(0, QUERIES)
    seen = tl.load(counts + r, mask=r < rows, other=0)
    if tl.max(tl.where(seen > topk, seen, 0), axis=0) > first:
        e = first + tl.arange(0, ENTRIES)
        d = tl.arange(0, WIDTH)
        h = tl.arange(0, HEADS)
        at_page = table + slot * table_stride + e // PER_PAGE
        page = tl.load(at_page, mask=e < max_entries, other=0).to(tl.int64)
        at_key = (page * PER_PAGE + e % PER_PAGE) * WIDTH
        k = tl.load(pages + at_key[:, None] + d[None, :], mask=(e < max_entries)[:, None], other=0.0)
        w = tl.load(weights + first_query.to(tl.int64) * weight_stride + h)
        for i in range(QUERIES):
            row = (first_query + i).to(tl.int64)
            at_query = (row * HEADS + h)[:, None] * WIDTH + d[None, :]
            q = tl.load(queries + at_query, mask=row < rows, other=0.0)
            next_w = tl.load(weights + (row + 1) * weight_stride + h, mask=row + 1 < rows, other=0.0)
            if FP32:
                match = tl.dot(k, tl.trans(q), input_precision="ieee")
            else:
                match = tl.dot(k, tl.trans(q))
            # weights are rounded to the dtype of the model, whose products may be float32
            match = tl.maximum(match, 0.0) * (w.to(k.dtype).to(tl.float32) * scale)[None, :]
            w = next_w
            tl.store(
                scores + row * max_entries + e, tl.sum(match, axis=1), mask=(e < max_entries) & (row < rows)
            )


def tile_config(fp32: bool, shared: int = HOPPER_SHARED) -> dict[str, int]:
    """Queries and entries per program, warps and stages."""
    if fp32:
        return {"QUERIES": 16, "ENTRIES": 64, "num_warps": 4, "num_stages": 1}
    large = shared >= HOPPER_SHARED
    return {"QUERIES": 32, "ENTRIES": 256 if large else 128, "num_warps": 8 if large else 4, "num_stages": 3}


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
    n, heads, width = queries.shape
    assert heads == power_of_two(heads, 16) and width == power_of_two(width, 16)
    assert counts.dtype is torch.int32 and weights.stride(1) == 1
    queries = queries.to(pages.dtype).contiguous()
    entries = max(chunk.entries for chunk in chunks)
    fp32 = pages.dtype is torch.float32
    config = tile_config(fp32, shared_memory(pages.device))
    indices = torch.empty(n, topk, dtype=torch.int32, device=pages.device)
    size = min(max(MAX_SCORES // entries, 16), n)
    scores = torch.empty(size, entries, dtype=torch.float32, device=pages.device)
    for start in range(0, n, size):
        stop = min(start + size, n)
        for chunk in chunks:
            block = slice(max(chunk.first, start), min(chunk.first + chunk.length, stop))
            rows = block.stop - block.start
            if rows <= 0:
                continue
            tiles = (-(-chunk.entries // config["ENTRIES"]), -(-rows // config["QUERIES"]))
            _score[tiles](
                queries[block],
                weights[block],
                weights.stride(0),
                counts[block],
                pages,
                table,
                table.stride(0),
                chunk.slot,
                scores[block.start - start :],
                rows,
                entries,
                topk,
                scale,
                HEADS=heads,
                WIDTH=width,
                PER_PAGE=pages.shape[1],
                FP32=fp32,
                **config,
            )
        topk_entries(scores[: stop - start], counts[start:stop], indices[start:stop], counted=True)
    return indices


def index_topk(
    queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, topk: int
) -> TopkIndices:
    """The keys of a sequence are its only page."""
    batch, length = counts.shape
    table = torch.arange(batch, device=keys.device).unsqueeze(-1)
    visible = counts.to(torch.int32)
    chunks = [IndexChunk(slot * length, length, slot, keys.shape[1]) for slot in range(batch)]
    flat = (queries.flatten(0, 1), weights.flatten(0, 1))
    indices = index_chunks(*flat, keys.contiguous(), table, visible.flatten(), chunks, topk, 1.0)
    return TopkIndices(visible.clamp_max(topk), indices.view(batch, length, topk))
