"""Attention of the many queries of a prompt on a GPU (flash attention), with the contract of the reference.

A program handles one query and many of its heads: all heads see the same keys, so a tile of keys is read once for
all of them and used by the tensor cores as keys and as values. It iterates over the window of the query (keys before
its chunk come from the ring of its slot), then over its entries in their pages (the first ones, or the listed ones),
and adds the sink at the end; nothing of size queries x keys is stored, and the chunks of any number of sequences are
one launch. Scores and sums are float32; probabilities are rounded to the dtype of the keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from birkhoff.kernels.attend import reference
from birkhoff.kernels.attend.topk_indices import TopkIndices
from birkhoff.kernels.gpu import is_hopper, power_of_two
from birkhoff.kernels.rope.prefill import rotate
from birkhoff.kernels.rope.reference import Phases
from birkhoff.kernels.row_index import RowIndex


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


@triton.jit(
    do_not_specialize=["ring_size", "per_page", "topk"],
    do_not_specialize_on_alignment=["bases", "slots", "positions", "starts", "counts"],
)
def _attend(
    queries,
    keys,
    bases,
    ring,
    ring_size,
    pages,
    per_page,
    table,
    table_stride,
    slots,
    positions,
    starts,
    counts,
    indices,
    topk,
    sink,
    out,
    window,
    heads,
    scale,
    cos,
    sin,
    PAIRS: tl.constexpr,
    ENTRIES: tl.constexpr,
    INDEXED: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    FP32: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    position = tl.load(positions + row).to(tl.int32)
    begin = tl.load(starts + row).to(tl.int32)
    h = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, PADDED)
    at_out = (row * heads + h)[:, None] * WIDTH + d[None, :]
    in_range = (h < heads)[:, None] & (d < WIDTH)[None, :]
    q = tl.load(queries + at_out, mask=in_range, other=0.0)
    row_max = tl.full([HEADS], -1e30, tl.float32)
    row_sum = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, PADDED], tl.float32)
    first = tl.maximum(position - window + 1, 0)
    cached = ring + slot * ring_size * WIDTH
    for start in range(first, begin, KEYS):  # before the chunk
        j = start + tl.arange(0, KEYS)
        visible = j < begin
        k = tl.load(
            cached + (j % ring_size)[:, None] * WIDTH + d[None, :],
            mask=visible[:, None] & (d < WIDTH)[None, :],
            other=0.0,
        )
        row_max, row_sum, acc = _attend_tile(q, k, visible, row_max, row_sum, acc, scale, FP32)
    near = keys + tl.load(bases + row) * WIDTH
    for start in range(tl.maximum(first, begin), position + 1, KEYS):
        j = start + tl.arange(0, KEYS)
        visible = j <= position
        k = tl.load(
            near + j[:, None] * WIDTH + d[None, :], mask=visible[:, None] & (d < WIDTH)[None, :], other=0.0
        )
        row_max, row_sum, acc = _attend_tile(q, k, visible, row_max, row_sum, acc, scale, FP32)
    if ENTRIES:
        own_pages = table + slot * table_stride
        count = tl.load(counts + row)
        for start in range(0, count, KEYS):
            e = start + tl.arange(0, KEYS)
            visible = e < count
            entry = e
            if INDEXED:
                entry = tl.load(indices + row * topk + e, mask=visible, other=0)
            page = tl.load(own_pages + entry // per_page, mask=visible, other=0)
            tile = visible[:, None] & (d < WIDTH)[None, :]
            at_entry = page * per_page + entry % per_page
            k = tl.load(pages + at_entry[:, None] * WIDTH + d[None, :], mask=tile, other=0.0)
            row_max, row_sum, acc = _attend_tile(q, k, visible, row_max, row_sum, acc, scale, FP32)
    sink_logit = tl.load(sink + h, mask=h < heads, other=0.0) * 1.4426950408889634
    top = tl.maximum(row_max, sink_logit)
    weight = tl.exp2(row_max - top)
    result = acc * (weight / (row_sum * weight + tl.exp2(sink_logit - top)))[:, None]
    tl.store(out + at_out, result.to(out.dtype.element_ty), mask=in_range)
    if (
        PAIRS > 0
    ):  # the inverse rotation touches few channels: read them back instead of splitting all of them
        tl.debug_barrier()
        at_rotated = (
            out + (row * heads + h)[:, None] * WIDTH + (WIDTH - 2 * PAIRS + tl.arange(0, 2 * PAIRS))[None, :]
        )
        stored = tl.load(at_rotated, mask=(h < heads)[:, None], other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(stored, [HEADS, PAIRS, 2]))
        angle = row * PAIRS + tl.arange(0, PAIRS)
        c = tl.load(cos + angle)[None, :]
        s = tl.load(sin + angle)[None, :]
        rotated = tl.reshape(tl.join(even * c + odd * s, odd * c - even * s), [HEADS, 2 * PAIRS])
        tl.debug_barrier()
        tl.store(at_rotated, rotated.to(out.dtype.element_ty), mask=(h < heads)[:, None])


def tile_config(heads: int, fp32: bool, hopper: bool = True) -> dict[str, int]:
    """Heads per program, keys per tile, warps and stages."""
    if fp32:
        return {"HEADS": min(16, power_of_two(heads, 16)), "KEYS": 16, "num_warps": 4, "num_stages": 1}
    if not hopper:  # 192 KiB of shared memory on Hopper, more than there is elsewhere
        return {"HEADS": min(32, power_of_two(heads, 16)), "KEYS": 32, "num_warps": 4, "num_stages": 1}
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
    batch, length = queries.shape[:2]
    span = recent.shape[1]
    sequences = torch.arange(batch, device=queries.device)

    def per_row(values: torch.Tensor) -> torch.Tensor:
        return values.unsqueeze(-1).expand(-1, length).flatten()

    # Positions count from each sequence's first valid key; the entries of a sequence are its only page.
    within = torch.arange(span - length, span, device=queries.device)
    positions = (within - oldest.long().unsqueeze(-1)).flatten()
    out = _launch(
        queries.flatten(0, 1),
        recent.flatten(0, 1),
        per_row(sequences * span + oldest),
        recent,
        None if entries is None or selected is None else entries,
        sequences.unsqueeze(-1),
        per_row(sequences),
        positions,
        torch.zeros_like(positions),
        selected,
        sink,
        window,
        scale,
        None,
        config,
    )
    return out.view_as(queries)


def attend_paged(
    queries: torch.Tensor,
    keys: torch.Tensor,
    ring: torch.Tensor,
    pages: torch.Tensor | None,
    table: torch.Tensor,
    rows: RowIndex,
    selected: TopkIndices | None,
    sink: torch.Tensor,
    window: int,
    scale: float,
    phases: Phases,
) -> torch.Tensor:
    ids = (rows.slots, rows.positions, rows.starts)
    pairs = phases.cos.shape[-1]
    fused = phases if pairs == power_of_two(pairs) else None
    out = _launch(
        queries, keys, rows.bases, ring, pages, table, *ids, selected, sink, window, scale, fused, None
    )
    return out if fused is not None else rotate(out, phases, inverse=True, own=True)


def _launch(
    queries: torch.Tensor,
    keys: torch.Tensor,
    bases: torch.Tensor,
    ring: torch.Tensor,
    pages: torch.Tensor | None,
    table: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    starts: torch.Tensor,
    selected: TopkIndices | None,
    sink: torch.Tensor,
    window: int,
    scale: float,
    phases: Phases | None,
    config: dict[str, int] | None,
) -> torch.Tensor:
    """One program per row and tile of heads; `bases + position` is the row of a key in `keys`. With `phases` the result
    is rotated back."""
    n, heads, width = queries.shape
    queries, keys = queries.contiguous(), keys.contiguous()
    out = torch.empty_like(queries)
    fp32 = queries.dtype is torch.float32
    config = config or tile_config(heads, fp32, is_hopper(queries.device))
    far = keys if pages is None else pages.contiguous()
    counts = indices = slots
    if selected is not None:
        counts = selected.counts.flatten()
        if selected.indices is not None:
            indices = selected.indices.contiguous()
    _attend[(-(-heads // config["HEADS"]), n)](
        queries,
        keys,
        bases,
        ring,
        ring.shape[1],
        far,
        1 if pages is None else pages.shape[1],
        table,
        table.stride(0),
        slots,
        positions,
        starts,
        counts,
        indices,
        indices.shape[-1],
        sink,
        out,
        window,
        heads,
        scale * 1.4426950408889634,
        sink if phases is None else phases.cos.contiguous(),
        sink if phases is None else phases.sin.contiguous(),
        PAIRS=0 if phases is None else phases.cos.shape[-1],
        ENTRIES=pages is not None and selected is not None,
        INDEXED=selected is not None and selected.indices is not None,
        WIDTH=width,
        PADDED=power_of_two(width, 16),
        FP32=fp32,
        **config,
    )
    return out
