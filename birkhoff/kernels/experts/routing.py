"""Who goes where, for the many rows of a prompt on a GPU: the choice of experts, and pairs in the order of experts.

`route` is the twin of the one in `reference.py`. `plan` sorts (token, place) pairs by expert and cuts each expert's
share into blocks of equal size, on the device and without asking it anything: block b is expert `blocks[b, 0]` with
pairs `order[f : f + blocks[b, 2]]` from `f = blocks[b, 1]`; blocks in use come first. One program an expert walks all
pairs twice: to count its own, then to put them where those of the experts before it end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from birkhoff.kernels.experts.decode import _score
from birkhoff.kernels.gpu import power_of_two

TOKENS = 16  # of a program that chooses
PAIRS = 1024  # at a time
BLOCKS = 64  # at a time


@triton.jit
def _choose_experts(
    logits,
    bias,
    given,
    ids,
    weights,
    n,
    experts,
    places,
    factor,
    GIVEN: tl.constexpr,
    BIASED: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    PLACES: tl.constexpr,
):
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    k = tl.arange(0, PLACES)
    alive = t < n
    tile = alive[:, None] & (e < experts)[None, :]
    scores = _score(tl.load(logits + t[:, None] * experts + e[None, :], mask=tile, other=0.0).to(tl.float32))
    left = tl.where(tile, scores, float("-inf"))
    if BIASED:
        left += tl.load(bias + e, mask=e < experts, other=0.0)[None, :]
    picked = tl.zeros([TOKENS, PLACES], tl.float32)
    for place in range(places):
        if GIVEN:
            chosen = tl.load(given + t * places + place, mask=alive, other=0).to(tl.int32)
        else:
            chosen = tl.argmax(left, axis=1, tie_break_left=True).to(tl.int32)
        mine = e[None, :] == chosen[:, None]
        left = tl.where(mine, float("-inf"), left)
        score = tl.sum(tl.where(mine, scores, 0.0), axis=1)
        picked = tl.where((k == place)[None, :], score[:, None], picked)
        tl.store(ids + t * places + place, chosen.to(tl.int64), mask=alive)
    share = picked / tl.where(alive, tl.sum(picked, axis=1), 1.0)[:, None] * factor
    tl.store(weights + t[:, None] * places + k[None, :], share, mask=alive[:, None] & (k < places)[None, :])


def route(logits, bias, ids, topk: int, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    lead, experts = logits.shape[:-1], logits.shape[-1]
    logits = logits.reshape(-1, experts).contiguous()
    n = len(logits)
    given = logits if ids is None else ids.reshape(n, topk).contiguous()
    chosen = torch.empty(n, topk, dtype=torch.int64, device=logits.device)
    weights = torch.empty(n, topk, dtype=torch.float32, device=logits.device)
    if n:
        _choose_experts[(-(-n // TOKENS),)](
            logits,
            logits if bias is None else bias,
            given,
            chosen,
            weights,
            n,
            experts,
            topk,
            factor,
            GIVEN=ids is not None,
            BIASED=bias is not None and ids is None,
            TOKENS=TOKENS,
            EXPERTS=power_of_two(experts),
            PLACES=power_of_two(topk),
            num_warps=4,
        )
    return chosen.view(*lead, topk), weights.view(*lead, topk)


@triton.jit
def _count(ids, counts, pairs, PAIRS: tl.constexpr):
    expert = tl.program_id(0)
    total = tl.zeros([PAIRS], tl.int32)
    for start in range(0, pairs, PAIRS):
        p = start + tl.arange(0, PAIRS)
        total += (tl.load(ids + p, mask=p < pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(total, axis=0))


@triton.jit
def _place(
    ids,
    counts,
    order,
    blocks,
    pairs,
    experts,
    size,
    most,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    expert = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    each = tl.load(counts + e, mask=e < experts, other=0)
    cut = (each + size - 1) // size
    count = tl.load(counts + expert)
    first = tl.sum(tl.where(e < expert, each, 0), axis=0)
    at = first
    for start in range(0, pairs, PAIRS):
        p = start + tl.arange(0, PAIRS)
        mine = tl.load(ids + p, mask=p < pairs, other=-1) == expert
        rank = tl.cumsum(mine.to(tl.int32), axis=0)
        tl.store(order + at + rank - 1, p, mask=mine)
        at += tl.sum(mine.to(tl.int32), axis=0)
    own = (count + size - 1) // size
    block = tl.sum(tl.where(e < expert, cut, 0), axis=0)
    for start in range(0, own, BLOCKS):
        b = start + tl.arange(0, BLOCKS)
        into = blocks + (block + b) * 4
        tl.store(into, tl.zeros_like(b) + expert, mask=b < own)
        tl.store(into + 1, first + b * size, mask=b < own)
        tl.store(into + 2, tl.minimum(count - b * size, size), mask=b < own)
        tl.store(into + 3, tl.zeros_like(b), mask=b < own)
    if expert == experts - 1:  # those that nobody needs are empty
        for start in range(block + own, most, BLOCKS):
            b = start + tl.arange(0, BLOCKS)
            for column in tl.static_range(4):
                tl.store(blocks + b * 4 + column, tl.zeros_like(b), mask=b < most)


def plan(ids: torch.Tensor, experts: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [n, k] -> order [n * k] (pairs by expert, then by token), blocks [most, 4] (expert, first, count, 0)."""
    ids = ids.contiguous()
    pairs = ids.numel()
    most = pairs // size + min(experts, pairs)
    counts, order = (torch.empty(number, dtype=torch.int32, device=ids.device) for number in (experts, pairs))
    blocks = torch.empty(most, 4, dtype=torch.int32, device=ids.device)
    if pairs:
        _count[(experts,)](ids, counts, pairs, PAIRS=PAIRS, num_warps=4)
        _place[(experts,)](
            ids,
            counts,
            order,
            blocks,
            pairs,
            experts,
            size,
            most,
            EXPERTS=power_of_two(experts),
            PAIRS=PAIRS,
            BLOCKS=BLOCKS,
            num_warps=4,
        )
    return order, blocks
