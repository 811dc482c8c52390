"""Flash-decoding attention of one new token per sequence on a GPU, directly over the cache.

The keys of a token are the ring of its window and its compressed entries (all finished ones, or the listed ones), as
one range that is split among programs: each handles sixteen heads and one split of the keys, normalises and rotates
its queries, and stores an unnormalised sum with its maximum logit and sum of exponentials. `_combine` merges the
splits, adds the sink and applies the inverse rotation. Scores and sums are float32; probabilities are rounded to the
dtype of the keys. On NVIDIA GPUs `cuda/attend.cu` does the same for small batches, in the same buffers.

With rules (`attend/__init__.py`) a program looks its keys up in the list of its row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from birkhoff.kernels.gpu import power_of_two
from birkhoff.kernels.rope.decode import rope, rope_heads

FORBID, ZERO = tl.constexpr(2), tl.constexpr(4)  # kinds of rules; 0 is of positions


@triton.jit
def _attend(
    queries,
    query_stride,
    keys,
    ring,
    window,
    pages,
    table,
    table_stride,
    topk_indices,
    topk,
    slots,
    positions,
    cos,
    sin,
    partial_out,
    partial_max,
    partial_sum,
    heads,
    split,
    scale,
    eps,
    splits,
    rule_counts,
    rules,
    RATIO: tl.constexpr,
    INDEXED: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    FP32: tl.constexpr,
    RULES: tl.constexpr,
    RULE_WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    position = tl.load(positions + row).to(tl.int32)  # 64-bit division is slow
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, WIDTH)
    key_type = keys.dtype.element_ty
    q = tl.load(
        queries + row * query_stride + h[:, None] * WIDTH + d[None, :], mask=(h < heads)[:, None], other=0.0
    )
    q = q.to(tl.float32)
    q = (q * (1.0 / tl.sqrt(tl.sum(q * q, axis=1) / WIDTH + eps))[:, None]).to(key_type).to(tl.float32)
    at = row * 4 * (ROPE_DIM // 2)
    q = rope_heads(q, cos + at, sin + at, HEADS, WIDTH, ROPE_DIM).to(key_type)
    entries = tl.full([], 0, tl.int32)
    if RATIO > 0:
        entries = (position + 1) // RATIO
        if INDEXED:
            entries = tl.minimum(entries, topk)
    row_max = tl.full([HEADS], -1e30, tl.float32)
    row_sum = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, WIDTH], tl.float32)
    newest = position % ring
    first = tl.program_id(2) * split
    for start in range(first, tl.minimum(first + split, ring + entries), KEYS):
        j = start + tl.arange(0, KEYS)
        age = newest - j
        age = tl.where(age < 0, age + ring, age)  # steps since this ring row was written
        recent = (j < ring) & (age < window) & (age <= position)
        visible = recent
        source = keys + (slot * ring + j) * WIDTH
        if RATIO > 0:
            PER_PAGE: tl.constexpr = 128 // RATIO
            e = j - ring
            far = (e >= 0) & (e < entries)
            entry = tl.maximum(e, 0)
            if INDEXED:
                entry = tl.load(topk_indices + row * topk + entry, mask=far, other=0)
            page = tl.load(table + slot * table_stride + entry // PER_PAGE, mask=far, other=0)
            source = tl.where(far, pages + (page * PER_PAGE + entry % PER_PAGE) * WIDTH, source)
            visible = recent | far
        stored = visible
        if RULES > 0:
            number = position - age
            of_entry = j >= ring
            if RATIO > 0:
                number = tl.where(far, entry, number)
            hidden = tl.zeros([HEADS, KEYS], tl.int32)
            zero = tl.zeros([KEYS], tl.int32)
            for r in range(tl.load(rule_counts + row)):
                rule = rules + (row * RULES + r) * RULE_WIDTH
                kind = tl.load(rule)
                inside = (
                    (number >= tl.load(rule + 1)) & (number < tl.load(rule + 2)) & (of_entry == (kind > 0))
                )
                heads_on = (tl.load(rule + 3 + h // 32, mask=h < heads, other=0) >> (h % 32)) & 1
                hides = tl.where(kind <= FORBID, heads_on, 0)
                hidden |= hides[:, None] & inside.to(tl.int32)[None, :]
                zero |= tl.where(kind == ZERO, inside.to(tl.int32), 0)
            stored = visible & (zero == 0)
        k = tl.load(source[:, None] + d[None, :], mask=stored[:, None], other=0.0)
        if FP32:
            logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        else:
            logits = tl.dot(q, tl.trans(k)) * scale
        if RULES > 0:
            logits = tl.where(visible[None, :] & (hidden == 0), logits, float("-inf"))
        else:
            logits = tl.where(visible[None, :], logits, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(logits, axis=1))
        rescale = tl.exp(row_max - new_max)
        p = tl.exp(logits - new_max[:, None])
        row_sum = row_sum * rescale + tl.sum(p, axis=1)
        if FP32:
            acc = tl.dot(p, k, acc * rescale[:, None], input_precision="ieee")
        else:
            acc = tl.dot(p.to(key_type), k, acc * rescale[:, None])
        row_max = new_max
    partial_row = (row * splits + tl.program_id(2)) * heads + h
    tl.store(partial_out + partial_row[:, None] * WIDTH + d[None, :], acc, mask=(h < heads)[:, None])
    tl.store(partial_max + partial_row, row_max, mask=h < heads)
    tl.store(partial_sum + partial_row, row_sum, mask=h < heads)


@triton.jit
def _combine(
    partial_out,
    partial_max,
    partial_sum,
    sink,
    cos,
    sin,
    out,
    out_fp16,
    heads,
    splits,
    rule_sink,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    FP16: tl.constexpr,
    PDL: tl.constexpr,
    RULES: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, WIDTH)
    partial_row = (row * splits + s) * heads + head
    row_max = tl.load(partial_max + partial_row, mask=s < splits, other=-1e30)
    row_sum = tl.load(partial_sum + partial_row, mask=s < splits, other=0.0)
    sink_logit = tl.load(sink + head)
    if RULES > 0:
        sink_logit += tl.load(rule_sink + row * heads + head)
    top = tl.maximum(tl.max(row_max, axis=0), sink_logit)
    weight = tl.exp(row_max - top)
    denominator = tl.sum(row_sum * weight, axis=0) + tl.exp(sink_logit - top)
    if RULES > 0:
        denominator = tl.where(denominator > 0, denominator, 1.0)  # a head that sees nothing: the sum is 0
    part = tl.load(
        partial_out + partial_row[:, None] * WIDTH + d[None, :], mask=(s < splits)[:, None], other=0.0
    )
    key_type = out.dtype.element_ty
    result = (tl.sum(part * weight[:, None], axis=0) / denominator).to(key_type).to(tl.float32)
    at = row * 4 * (ROPE_DIM // 2)
    rotated = rope(result, cos + at, sin + at, WIDTH, ROPE_DIM, -1)
    tl.store(out + (row * heads + head) * WIDTH + d, rotated.to(key_type))
    if FP16:
        tl.store(out_fp16 + (row * heads + head) * WIDTH + d, rotated.to(tl.float16))


def heads_per_program(rows: int, heads: int) -> int:
    """Small batches need many programs; large ones read each key once for more heads."""
    return 32 if rows >= 16 and heads >= 32 else 16


def split_keys(rows: int, heads: int, num_keys: int, processors: int = 132) -> tuple[int, int]:
    """Number of splits of the keys and keys per split, for about two programs per SM."""
    head_tile = heads_per_program(rows, heads)
    blocks = rows * -(-heads // head_tile)
    target_splits = max(1, -(-2 * processors // blocks))
    min_split = 32 if head_tile == 16 else 64
    keys_per_split = -(-num_keys // target_splits)
    split = max(min_split, -(-keys_per_split // min_split) * min_split)
    return -(-num_keys // split), split


def attend(
    queries,
    keys,
    window,
    pages,
    ratio,
    table,
    topk_indices,
    slots,
    positions,
    cos,
    sin,
    partial_out,
    partial_max,
    partial_sum,
    sink,
    split,
    scale,
    eps,
    out,
    out_fp16,
    pdl=False,
    rules=None,
) -> None:
    """queries [n, >= h * c] as projected; keys [slots, ring, c]; pages of entries or None; topk_indices [n, topk] or
    None; partial_out [n, splits, h, c], partial_max and partial_sum [n, splits, h] float32 -> out [n, h * c], and in
    float16 if `out_fp16` is given. `rules`: counts [n], table [n, most, 3 + words] int32 and sink [n, h] float32."""
    n, splits, heads, width = partial_out.shape
    rope_dim = 2 * cos.shape[-1]
    fp32 = keys.dtype is torch.float32
    head_tile = heads_per_program(n, heads)
    small, indexed = head_tile == 16, topk_indices is not None
    rule_counts, rule_table, rule_sink = (slots, slots, sink) if rules is None else rules
    most, rule_width = (0, 0) if rules is None else rule_table.shape[1:]
    _attend[(n, -(-heads // head_tile), splits)](
        queries,
        queries.stride(0),
        keys,
        keys.shape[1],
        window,
        keys if pages is None else pages,
        table,
        table.stride(0),
        topk_indices if indexed else slots,
        topk_indices.shape[1] if indexed else 1,
        slots,
        positions,
        cos,
        sin,
        partial_out,
        partial_max,
        partial_sum,
        heads,
        split,
        scale,
        eps,
        splits,
        rule_counts,
        rule_table,
        RATIO=ratio,
        INDEXED=indexed,
        HEADS=head_tile,
        WIDTH=width,
        ROPE_DIM=rope_dim,
        KEYS=16 if fp32 else 32 if small else 64,
        FP32=fp32,
        RULES=most,
        RULE_WIDTH=rule_width,
        num_warps=4 if small else 8,
        num_stages=2,
    )
    _combine[(n, heads)](
        partial_out,
        partial_max,
        partial_sum,
        sink,
        cos,
        sin,
        out,
        out if out_fp16 is None else out_fp16,
        heads,
        splits,
        rule_sink,
        SPLITS=power_of_two(splits),
        WIDTH=width,
        ROPE_DIM=rope_dim,
        FP16=out_fp16 is not None,
        num_warps=4,
        PDL=pdl,
        RULES=most,
    )
