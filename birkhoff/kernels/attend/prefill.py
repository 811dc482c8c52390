"""Attention of the many queries of a prompt on a GPU (flash attention), with the contract of the reference.

A program handles one query and many of its heads: all heads see the same keys, so a tile of keys is read once for
all of them and used by the tensor cores as keys and as values. It iterates over the keys of the query: its window (keys
before its chunk are in the ring of its slot), then its entries in their pages (the first ones, or the listed ones), and
adds the sink at the end; nothing of size queries x keys is stored, and the chunks of any number of sequences are one
launch. Where entries are listed, `_list_keys` first stores where every key is, so that a tile of keys is one load away
instead of three. Scores and sums are float32; probabilities are rounded to the dtype of the keys.
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
def _key_offsets(
    i,
    row,
    position,
    keys,
    bases,
    ring,
    pages,
    table,
    table_stride,
    slots,
    starts,
    counts,
    indices,
    topk,
    window,
    ENTRIES: tl.constexpr,
    INDEXED: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    PER_PAGE: tl.constexpr,
):
    """Where the keys numbered `i` of a query begin, in elements after `keys`: those of the window, of which the ones
    before the chunk are in the ring, then its entries."""
    BYTES: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth // 8
    slot = tl.load(slots + row)
    near = tl.minimum(position + 1, window)
    at = position + 1 - near + i
    cached = (ring.to(tl.int64) - keys.to(tl.int64)) // BYTES + (slot * RING + at % RING) * WIDTH
    offset = tl.where(at < tl.load(starts + row), cached, (tl.load(bases + row) + at) * WIDTH)
    if ENTRIES:
        far = i >= near
        entry = tl.maximum(i - near, 0)
        if INDEXED:
            entry = tl.load(indices + row * topk + entry, mask=far, other=0)
        page = tl.load(table + slot * table_stride + entry // PER_PAGE, mask=far, other=0).to(tl.int64)
        in_pages = (page * PER_PAGE + entry % PER_PAGE) * WIDTH
        offset = tl.where(far, (pages.to(tl.int64) - keys.to(tl.int64)) // BYTES + in_pages, offset)
    return tl.multiple_of(offset, 8)


@triton.jit(
    do_not_specialize=["topk", "listed"],
    do_not_specialize_on_alignment=["bases", "slots", "positions", "starts", "counts"],
)
def _list_keys(
    keys,
    bases,
    ring,
    pages,
    table,
    table_stride,
    slots,
    positions,
    starts,
    counts,
    indices,
    topk,
    window,
    offsets,
    listed,
    ENTRIES: tl.constexpr,
    INDEXED: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    PER_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row).to(tl.int32)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    last = tl.minimum(position, window - 1)
    if ENTRIES:
        last += tl.load(counts + row)
    places = _key_offsets(
        tl.minimum(i, last),
        row,
        position,
        keys,
        bases,
        ring,
        pages,
        table,
        table_stride,
        slots,
        starts,
        counts,
        indices,
        topk,
        window,
        ENTRIES,
        INDEXED,
        WIDTH,
        RING,
        PER_PAGE,
    )
    tl.store(offsets + row * listed + i, places, mask=i < listed)


@triton.jit(
    do_not_specialize=["topk"],
    do_not_specialize_on_alignment=["bases", "slots", "positions", "starts", "counts"],
)
def _attend(
    queries,
    keys,
    bases,
    ring,
    pages,
    table,
    table_stride,
    slots,
    positions,
    starts,
    counts,
    offsets,
    listed,
    sink,
    out,
    window,
    heads,
    scale,
    cos,
    sin,
    PAIRS: tl.constexpr,
    ENTRIES: tl.constexpr,
    LISTED: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    RING: tl.constexpr,
    PER_PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    FP32: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    h = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, PADDED)
    at_out = (row * heads + h)[:, None] * WIDTH + d[None, :]
    in_range = (h < heads)[:, None] & (d < WIDTH)[None, :]
    q = tl.load(queries + at_out, mask=in_range, other=0.0)
    position = tl.load(positions + row).to(tl.int32)
    total = tl.minimum(position + 1, window)
    if ENTRIES:
        total += tl.load(counts + row)
    row_max = tl.full([HEADS], -1e30, tl.float32)
    row_sum = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, PADDED], tl.float32)
    for start in range(0, total, KEYS):
        i = start + tl.arange(0, KEYS)
        if LISTED:
            offset = tl.multiple_of(tl.load(offsets + row * listed + i), 8)
        else:
            offset = _key_offsets(
                tl.minimum(i, total - 1),
                row,
                position,
                keys,
                bases,
                ring,
                pages,
                table,
                table_stride,
                slots,
                starts,
                counts,
                offsets,
                0,
                window,
                ENTRIES,
                False,
                WIDTH,
                RING,
                PER_PAGE,
            )
        at_key = offset[:, None] + d[None, :]
        if WIDTH == PADDED:
            k = tl.load(keys + at_key)
        else:
            k = tl.load(keys + at_key, mask=(d < WIDTH)[None, :], other=0.0)
        if FP32:
            logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        else:
            logits = tl.dot(q, tl.trans(k))
        # This branch is also what lets two groups of warps divide the product: of two products in a row without one
        # Triton has all warps compute all of the first.
        if start + KEYS > total:
            logits = tl.where((i < total)[None, :], logits, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(logits, axis=1) * scale)
        rescale = tl.exp2(row_max - new_max)
        p = tl.exp2(logits * scale - new_max[:, None])
        row_max = new_max
        row_sum = row_sum * rescale + tl.sum(p, axis=1)
        if FP32:
            acc = tl.dot(p, k, acc * rescale[:, None], input_precision="ieee")
        else:
            acc = tl.dot(p.to(k.dtype), k, acc * rescale[:, None])
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


def tile_config(heads: int, fp32: bool, hopper: bool = True, listed: bool = True) -> dict[str, int]:
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
        "num_stages": 3 if listed else 2,  # offsets are read a tile before their keys
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
    queries, keys, ring = queries.contiguous(), keys.contiguous(), ring.contiguous()
    out = torch.empty_like(queries)
    fp32 = queries.dtype is torch.float32
    far = keys if pages is None else pages.contiguous()
    counts = indices = offsets = slots
    listed = 0
    if selected is not None:
        counts = selected.counts.flatten()
        if selected.indices is not None:
            indices = selected.indices.view(n, -1)
            listed = window + indices.shape[1] + 128 - (window + indices.shape[1]) % 128  # whole tiles
    config = config or tile_config(heads, fp32, is_hopper(queries.device), listed > 0)
    places = (keys, bases, ring, far, table, table.stride(0), slots, positions, starts, counts)
    per_page = 1 if pages is None else pages.shape[1]
    settings = {"WIDTH": width, "RING": ring.shape[1], "PER_PAGE": per_page}
    if listed:
        offsets = torch.empty(n, listed, dtype=torch.int64, device=keys.device)
        _list_keys[(n, listed // 128)](
            *places,
            indices,
            indices.shape[1],
            window,
            offsets,
            listed,
            BLOCK=128,
            ENTRIES=True,
            INDEXED=True,
            **settings,
        )
    _attend[(-(-heads // config["HEADS"]), n)](
        queries,
        *places,
        offsets,
        listed,
        sink,
        out,
        window,
        heads,
        scale * 1.4426950408889634,
        sink if phases is None else phases.cos.contiguous(),
        sink if phases is None else phases.sin.contiguous(),
        PAIRS=0 if phases is None else phases.cos.shape[-1],
        ENTRIES=pages is not None and selected is not None,
        LISTED=listed > 0,
        PADDED=power_of_two(width, 16),
        FP32=fp32,
        **settings,
        **config,
    )
    return out
