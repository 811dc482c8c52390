"""Attention of the many queries of a prompt on a GPU (flash attention), with the contract of the reference.

A program handles one query and many of its heads: all heads see the same keys, so a tile of keys is read once for
all of them and used by the tensor cores as keys and as values. It iterates over the window of the query, then over
its entries (the first ones, or the listed ones), and adds the sink at the end; nothing of size queries x keys is
stored. Scores and sums are float32; probabilities are rounded to the dtype of the keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from birkhoff.kernels.attend import reference
from birkhoff.kernels.attend.topk_indices import TopkIndices
from birkhoff.kernels.gpu import power_of_two


@triton.jit
def _attend_tile(q, k, visible, row_max, row_sum, acc, scale, FP32: tl.constexpr):
    """One online-softmax step with a tile of keys [KEYS, WIDTH]; `scale` includes log2(e), since exp2 is used."""
    if FP32:
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    else:
        logits = tl.dot(q, tl.trans(k)) * scale
    logits = tl.where(visible[None, :], logits, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(logits, axis=1))
    rescale = tl.exp2(row_max - new_max)
    p = tl.exp2(logits - new_max[:, None])
    row_sum = row_sum * rescale + tl.sum(p, axis=1)
    if FP32:
        acc = tl.dot(p, k, acc * rescale[:, None], input_precision="ieee")
    else:
        acc = tl.dot(p.to(k.dtype), k, acc * rescale[:, None])
    return new_max, row_sum, acc


@triton.jit(do_not_specialize=["length", "span", "num_entries", "topk"])
def _attend(
    queries,
    recent,
    oldest,
    entries,
    counts,
    indices,
    sink,
    out,
    length,
    span,
    window,
    num_entries,
    topk,
    heads,
    scale,
    ENTRIES: tl.constexpr,
    INDEXED: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    FP32: tl.constexpr,
):
    row = tl.program_id(1)
    sequence = row // length
    at = span - length + row % length
    h = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, PADDED)
    at_out = (row.to(tl.int64) * heads + h)[:, None] * WIDTH + d[None, :]
    in_range = (h < heads)[:, None] & (d < WIDTH)[None, :]
    q = tl.load(queries + at_out, mask=in_range, other=0.0)
    row_max = tl.full([HEADS], -1e30, tl.float32)
    row_sum = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, PADDED], tl.float32)
    near = recent + sequence.to(tl.int64) * span * WIDTH
    first = tl.maximum(tl.maximum(at - window + 1, 0), tl.load(oldest + sequence).to(tl.int32))
    for start in range(first, at + 1, KEYS):
        j = start + tl.arange(0, KEYS)
        visible = j <= at
        k = tl.load(
            near + j[:, None] * WIDTH + d[None, :], mask=visible[:, None] & (d < WIDTH)[None, :], other=0.0
        )
        row_max, row_sum, acc = _attend_tile(q, k, visible, row_max, row_sum, acc, scale, FP32)
    if ENTRIES:
        far = entries + sequence.to(tl.int64) * num_entries * WIDTH
        count = tl.load(counts + row)
        for start in range(0, count, KEYS):
            e = start + tl.arange(0, KEYS)
            visible = e < count
            entry = e
            if INDEXED:
                entry = tl.load(indices + row.to(tl.int64) * topk + e, mask=visible, other=0)
            tile = visible[:, None] & (d < WIDTH)[None, :]
            k = tl.load(far + entry.to(tl.int64)[:, None] * WIDTH + d[None, :], mask=tile, other=0.0)
            row_max, row_sum, acc = _attend_tile(q, k, visible, row_max, row_sum, acc, scale, FP32)
    sink_logit = tl.load(sink + h, mask=h < heads, other=0.0) * 1.4426950408889634
    top = tl.maximum(row_max, sink_logit)
    weight = tl.exp2(row_max - top)
    result = acc * (weight / (row_sum * weight + tl.exp2(sink_logit - top)))[:, None]
    tl.store(out + at_out, result.to(out.dtype.element_ty), mask=in_range)


def tile_config(heads: int, fp32: bool) -> dict[str, int]:
    """Heads per program, keys per tile, warps and stages."""
    if fp32:
        return {"HEADS": min(16, power_of_two(heads, 16)), "KEYS": 16, "num_warps": 4, "num_stages": 1}
    head_tile = min(64, power_of_two(heads, 16))
    return {
        "HEADS": head_tile,
        "KEYS": 64 if head_tile == 64 else 32,
        "num_warps": 8 if head_tile == 64 else 4,
        "num_stages": 2,
    }


def attend(
    queries: torch.Tensor,
    recent: torch.Tensor,
    oldest: torch.Tensor,
    entries: torch.Tensor | None,
    selected: torch.Tensor | TopkIndices | None,
    sink: torch.Tensor,
    window: int,
    scale: float,
    config: dict[str, int] | None = None,
) -> torch.Tensor:
    if isinstance(selected, torch.Tensor):
        return reference.attend(queries, recent, oldest, entries, selected, sink, window, scale)
    batch, length, heads, width = queries.shape
    queries, recent = queries.contiguous(), recent.contiguous()
    out = torch.empty_like(queries)
    has_entries = entries is not None and selected is not None
    far = entries.contiguous() if has_entries else recent  # type: ignore[union-attr]
    counts = selected.counts.contiguous() if isinstance(selected, TopkIndices) else oldest
    indexed = isinstance(selected, TopkIndices) and selected.indices is not None
    indices = selected.indices.contiguous() if indexed else oldest  # type: ignore[union-attr]
    fp32 = queries.dtype is torch.float32
    config = config or tile_config(heads, fp32)
    _attend[(-(-heads // config["HEADS"]), batch * length)](
        queries,
        recent,
        oldest,
        far,
        counts,
        indices,
        sink,
        out,
        length,
        recent.shape[1],
        window,
        far.shape[1],
        indices.shape[-1],
        heads,
        scale * 1.4426950408889634,
        ENTRIES=has_entries,
        INDEXED=indexed,
        WIDTH=width,
        PADDED=power_of_two(width, 16),
        FP32=fp32,
        **config,
    )
    return out
