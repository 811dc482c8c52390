"""Routing of the many rows of a prompt on a GPU: expert selection, and (token, choice) pairs sorted by expert.

`route` is the twin of the one in `reference.py`. `plan` sorts (token, choice) pairs by expert and divides the pairs of
each expert into blocks of nearly equal length, on the device and without synchronisation: block b is expert
`blocks[b, 0]` with pairs `order[f : f + blocks[b, 2]]`, `f = blocks[b, 1]`; blocks in use come first. One program per
expert scans all pairs twice: to count its own, then to store them after those of the preceding experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from birkhoff.kernels.experts.decode import _score
from birkhoff.kernels.gpu import power_of_two

TOKENS = 16  # per program of `_topk_experts`
PAIRS = 1024  # per iteration
BLOCKS = 64  # per iteration


@triton.jit(do_not_specialize=["n"])
def _topk_experts(
    logits,
    bias,
    hash_ids,
    ids,
    weights,
    n,
    experts,
    topk,
    factor,
    HASHED: tl.constexpr,
    BIASED: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
):
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    k = tl.arange(0, TOPK)
    valid = t < n
    tile = valid[:, None] & (e < experts)[None, :]
    scores = _score(tl.load(logits + t[:, None] * experts + e[None, :], mask=tile, other=0.0).to(tl.float32))
    candidates = tl.where(tile, scores, float("-inf"))
    if BIASED:
        candidates += tl.load(bias + e, mask=e < experts, other=0.0)[None, :]
    selected_scores = tl.zeros([TOKENS, TOPK], tl.float32)
    for choice in range(topk):
        if HASHED:
            expert = tl.load(hash_ids + t * topk + choice, mask=valid, other=0).to(tl.int32)
        else:
            expert = tl.argmax(candidates, axis=1, tie_break_left=True).to(tl.int32)
        is_expert = e[None, :] == expert[:, None]
        candidates = tl.where(is_expert, float("-inf"), candidates)
        score = tl.sum(tl.where(is_expert, scores, 0.0), axis=1)
        selected_scores = tl.where((k == choice)[None, :], score[:, None], selected_scores)
        tl.store(ids + t * topk + choice, expert.to(tl.int64), mask=valid)
    normalised = selected_scores / tl.where(valid, tl.sum(selected_scores, axis=1), 1.0)[:, None] * factor
    tl.store(weights + t[:, None] * topk + k[None, :], normalised, mask=valid[:, None] & (k < topk)[None, :])


def route(logits, bias, ids, topk: int, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    lead, experts = logits.shape[:-1], logits.shape[-1]
    logits = logits.reshape(-1, experts).contiguous()
    n = len(logits)
    hash_ids = logits if ids is None else ids.reshape(n, topk).contiguous()
    selected = torch.empty(n, topk, dtype=torch.int64, device=logits.device)
    weights = torch.empty(n, topk, dtype=torch.float32, device=logits.device)
    if n:
        _topk_experts[(-(-n // TOKENS),)](
            logits,
            logits if bias is None else bias,
            hash_ids,
            selected,
            weights,
            n,
            experts,
            topk,
            factor,
            HASHED=ids is not None,
            BIASED=bias is not None and ids is None,
            TOKENS=TOKENS,
            EXPERTS=power_of_two(experts),
            TOPK=power_of_two(topk),
            num_warps=4,
        )
    return selected.view(*lead, topk), weights.view(*lead, topk)


@triton.jit(do_not_specialize=["pairs"])
def _count_pairs(ids, counts, pairs, PAIRS: tl.constexpr):
    expert = tl.program_id(0)
    total = tl.zeros([PAIRS], tl.int32)
    for start in range(0, pairs, PAIRS):
        p = start + tl.arange(0, PAIRS)
        total += (tl.load(ids + p, mask=p < pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["pairs", "max_blocks"])
def _sort_pairs(
    ids,
    counts,
    order,
    blocks,
    pairs,
    experts,
    size,
    max_blocks,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    expert = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    expert_counts = tl.load(counts + e, mask=e < experts, other=0)
    expert_blocks = (expert_counts + size - 1) // size
    count = tl.load(counts + expert)
    first = tl.sum(tl.where(e < expert, expert_counts, 0), axis=0)
    at = first
    for start in range(0, pairs, PAIRS):
        p = start + tl.arange(0, PAIRS)
        is_expert = tl.load(ids + p, mask=p < pairs, other=-1) == expert
        rank = tl.cumsum(is_expert.to(tl.int32), axis=0)
        tl.store(order + at + rank - 1, p, mask=is_expert)
        at += tl.sum(is_expert.to(tl.int32), axis=0)
    own_blocks = (count + size - 1) // size
    used = tl.sum(expert_blocks, axis=0)
    # blocks of equal length: a last one of few tokens would take as long as a full one
    length = (count + own_blocks - 1) // tl.maximum(own_blocks, 1)
    length = tl.minimum((length + 15) // 16 * 16, size)
    block = tl.sum(tl.where(e < expert, expert_blocks, 0), axis=0)
    for start in range(0, own_blocks, BLOCKS):
        b = start + tl.arange(0, BLOCKS)
        into = blocks + (block + b) * 4
        tl.store(into, tl.zeros_like(b) + expert, mask=b < own_blocks)
        tl.store(into + 1, first + b * length, mask=b < own_blocks)
        tl.store(into + 2, tl.minimum(count - b * length, length), mask=b < own_blocks)
        tl.store(into + 3, tl.zeros_like(b) + used, mask=b < own_blocks)
    if expert == experts - 1:  # unused blocks are empty
        for start in range(block + own_blocks, max_blocks, BLOCKS):
            b = start + tl.arange(0, BLOCKS)
            for column in tl.static_range(3):
                tl.store(blocks + b * 4 + column, tl.zeros_like(b), mask=b < max_blocks)
            tl.store(blocks + b * 4 + 3, tl.zeros_like(b) + used, mask=b < max_blocks)


def plan(ids: torch.Tensor, experts: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [n, k] -> order [n * k] (pairs by expert, then by token), blocks [most, 4] (expert, first, count, number of
    blocks in use)."""
    ids = ids.contiguous()
    pairs = ids.numel()
    max_blocks = pairs // size + min(experts, pairs)
    counts, order = (torch.empty(length, dtype=torch.int32, device=ids.device) for length in (experts, pairs))
    blocks = torch.empty(max_blocks, 4, dtype=torch.int32, device=ids.device)
    if pairs:
        _count_pairs[(experts,)](ids, counts, pairs, PAIRS=PAIRS, num_warps=4)
        _sort_pairs[(experts,)](
            ids,
            counts,
            order,
            blocks,
            pairs,
            experts,
            size,
            max_blocks,
            EXPERTS=power_of_two(experts),
            PAIRS=PAIRS,
            BLOCKS=BLOCKS,
            num_warps=4,
        )
    return order, blocks
