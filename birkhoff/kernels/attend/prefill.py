"""Attention of the many queries of a prompt on a GPU (flash attention), with the contract of the reference.

A program handles one query and many of its heads: all heads see the same keys, so a tile of keys is read once for
all of them and used by the tensor cores as keys and as values. It iterates over the keys of the query: its window (keys
before its chunk are in the ring of its slot), then its entries in their pages (the first ones, or the listed ones), and
adds the sink at the end; nothing of size queries x keys is stored, and the chunks of any number of sequences are one
launch. `_list_keys` first stores where every key is, so that a tile of keys is one load away instead of three. Scores
and sums are float32; probabilities are rounded to the dtype of the keys. At the sizes of V4-Flash on Hopper the kernel
of `hopper.py` is used.
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

LIST_TILE = 128  # offsets of keys that a program stores
MAX_LISTED = 1 << 24  # offsets, eight bytes each
LOG2_E = 1.4426950408889634


@triton.jit(
    do_not_specialize=["topk", "listed"],
    do_not_specialize_on_alignment=["bases", "slots", "positions", "starts", "counts", "offsets"],
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
    """Where the keys of a query begin, in elements after `keys`: those of the window, of which the ones before the
    chunk are in the ring, then its entries. The rest of the list repeats the last one."""
    BYTES: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth // 8
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    position = tl.load(positions + row).to(tl.int32)
    near = tl.minimum(position + 1, window)
    last = near - 1
    if ENTRIES:
        last += tl.load(counts + row)
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i = tl.minimum(number, last)
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
    tl.store(offsets + row * listed + number, offset, mask=number < listed)


@triton.jit(do_not_specialize=["listed"], do_not_specialize_on_alignment=["positions", "counts"])
def _attend(
    queries,
    keys,
    offsets,
    listed,
    positions,
    counts,
    sink,
    out,
    window,
    heads,
    scale,
    cos,
    sin,
    PAIRS: tl.constexpr,
    ENTRIES: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    FP32: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    h = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, PADDED)
    at_out = (row * heads + h)[:, None] * WIDTH + d[None, :]
    in_range = (h < heads)[:, None] & (d < WIDTH)[None, :]
    q = tl.load(queries + at_out, mask=in_range, other=0.0)
    total = tl.minimum(tl.load(positions + row).to(tl.int32) + 1, window)
    if ENTRIES:
        total += tl.load(counts + row)
    row_max = tl.full([HEADS], -1e30, tl.float32)
    row_sum = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, PADDED], tl.float32)
    for start in range(0, total, KEYS):
        i = start + tl.arange(0, KEYS)
        offset = tl.multiple_of(tl.load(offsets + row * listed + i), 8)
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
        "num_stages": 3,  # offsets are read a tile before their keys
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
) -> torch.Tensor:
    if isinstance(selected, torch.Tensor):
        return reference.attend(queries, recent, oldest, entries, selected, sink, window, scale)
    batch, length = queries.shape[:2]
    span = recent.shape[1]
    sequences = torch.arange(batch, device=queries.device)

    def per_row(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(length)  # an expanded view of one sequence would have a stride of 0

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
    out = _launch(queries, keys, rows.bases, ring, pages, table, *ids, selected, sink, window, scale, fused)
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
) -> torch.Tensor:
    """`bases + position` is the row of a key in `keys`. With `phases` the result is rotated back. Offsets of at most
    `MAX_LISTED` keys are stored at a time."""
    n, heads, width = queries.shape
    queries, keys, ring = queries.contiguous(), keys.contiguous(), ring.contiguous()
    pages = (
        None if pages is None else pages.contiguous()
    )  # kept until `_attend`, which reads it through offsets
    out = torch.empty_like(queries)
    fp32 = queries.dtype is torch.float32
    pairs = 0 if phases is None else phases.cos.shape[-1]
    config = tile_config(heads, fp32, is_hopper(queries.device))
    counts = indices = slots.unsqueeze(-1)
    longest, per_page = window, 1
    entries = pages is not None and selected is not None
    if pages is not None and selected is not None:
        per_page = pages.shape[1]
        counts, most = selected.counts.flatten(), table.shape[1] * per_page
        if selected.indices is not None:
            indices = selected.indices.view(n, -1)
            most = indices.shape[1]
        longest += most if selected.most is None else min(most, selected.most)
    listed = (longest // LIST_TILE + 1) * LIST_TILE
    size = min(max(MAX_LISTED // listed, 1), n)
    offsets = torch.empty(size, listed, dtype=torch.int64, device=keys.device)
    cos, sin = (sink, sink) if phases is None else (phases.cos.contiguous(), phases.sin.contiguous())
    for start in range(0, n, size):
        rows = slice(start, min(start + size, n))
        count = rows.stop - rows.start
        _list_keys[(count, listed // LIST_TILE)](
            keys,
            bases[rows],
            ring,
            keys if pages is None else pages,
            table,
            table.stride(0),
            slots[rows],
            positions[rows],
            starts[rows],
            counts[rows],
            indices[rows],
            indices.shape[1],
            window,
            offsets,
            listed,
            ENTRIES=entries,
            INDEXED=selected is not None and selected.indices is not None,
            WIDTH=width,
            RING=ring.shape[1],
            PER_PAGE=per_page,
            BLOCK=LIST_TILE,
        )
        parts = (queries[rows], keys, offsets, listed, positions[rows], counts[rows], sink, out[rows], window)
        angles = (cos, sin) if phases is None else (cos[rows], sin[rows])
        if _has_own_kernel(queries, pairs):
            from birkhoff.kernels.attend.hopper import attend_rows

            attend_rows(*parts, scale * LOG2_E, *angles, entries)
            continue
        _attend[(-(-heads // config["HEADS"]), count)](
            *parts,
            heads,
            scale * LOG2_E,
            *angles,
            PAIRS=pairs,
            ENTRIES=entries,
            WIDTH=width,
            PADDED=power_of_two(width, 16),
            FP32=fp32,
            **config,
        )
    return out


def _has_own_kernel(queries: torch.Tensor, pairs: int) -> bool:
    """Whether these are the sizes and the GPU of `hopper.py`."""
    sizes = (*queries.shape[1:], pairs) == (64, 512, 32) and queries.dtype is torch.bfloat16
    return sizes and queries.is_cuda and is_hopper(queries.device)
