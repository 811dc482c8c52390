"""Mixture of experts of a decode step on a GPU.

`route` is one program: scores, selection, weights and the routing plan. The plan groups (token, choice) pairs by
expert, so that every expert in use is read once, for any number of tokens: slot s of the plan is expert `slots[s, 0]`
with pairs `order[1, f : f + slots[s, 2]]`, `f = slots[s, 1]`; slots in use come first. `gate_up` and `down` run over
slots. Experts are read through a table of addresses (`[E, 4]` int64: gate and up, their scales, down, its scales), so
they may be anywhere a kernel can read. Outputs are one row per pair; the consumer sums them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from birkhoff.kernels.gpu import power_of_two
from birkhoff.kernels.packed.unpack import decode_e2m1, decode_e8m0


@triton.jit
def _score(z):
    """sqrt(softplus(z)), accurate also where e^z is negligible against one."""
    e = tl.exp(-tl.abs(z))
    log1p = tl.where(e < 1e-3, e * (1.0 - e * (0.5 - e * 0.3333333)), tl.log(1.0 + e))
    return tl.sqrt(tl.maximum(z, 0.0) + log1p)


@triton.jit
def _route(
    logits,
    logit_stride,
    bias,
    hash_table,
    tokens,
    ids,
    weights,
    order,
    slots,
    n,
    experts,
    topk,
    factor,
    HASHED: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    b = tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    valid = b < n
    tile = valid[:, None] & (e < experts)[None, :]
    scores = _score(tl.load(logits + b[:, None] * logit_stride + e[None, :], mask=tile, other=0.0))
    biased = tl.where(tile, scores, float("-inf"))
    if not HASHED:
        biased += tl.load(bias + e, mask=e < experts, other=0.0)[None, :]
    token = tl.load(tokens + b, mask=valid, other=0)
    counts = tl.zeros([EXPERTS], tl.int32)
    total = tl.zeros([TOKENS], tl.float32)
    for choice in range(topk):
        if HASHED:
            expert = tl.load(hash_table + token * topk + choice, mask=valid, other=0).to(tl.int32)
        else:
            expert = tl.argmax(biased, axis=1, tie_break_left=True).to(tl.int32)
        is_expert = (e[None, :] == expert[:, None]) & valid[:, None]
        if not HASHED:
            biased = tl.where(is_expert, float("-inf"), biased)
        score = tl.sum(tl.where(is_expert, scores, 0.0), axis=1)
        total += score
        selected = is_expert.to(tl.int32)
        pair_rank = tl.sum(tl.where(is_expert, tl.cumsum(selected, axis=0) - 1 + counts[None, :], 0), axis=1)
        counts += tl.sum(selected, axis=0)
        at = b * topk + choice
        tl.store(ids + at, expert, mask=valid)
        tl.store(weights + at, score, mask=valid)
        # temporarily: rank of this pair among the pairs of its expert
        tl.store(order + at, pair_rank, mask=valid)
    used = counts > 0
    starts = tl.cumsum(counts, axis=0) - counts
    slot = tl.cumsum(used.to(tl.int32), axis=0) - 1
    tl.store(slots + slot * 16, e, mask=used)
    tl.store(slots + slot * 16 + 1, starts, mask=used)
    tl.store(slots + slot * 16 + 2, counts, mask=used)
    in_use = tl.sum(used.to(tl.int32), axis=0)
    tl.store(
        slots + e * 16 + 2, tl.zeros([EXPERTS], tl.int32), mask=(e >= in_use) & (e < n * topk) & (e < experts)
    )
    tl.debug_barrier()
    for choice in range(topk):
        at = b * topk + choice
        expert = tl.load(ids + at, mask=valid, other=0)
        pair_rank = tl.load(order + at, mask=valid, other=0)
        score = tl.load(weights + at, mask=valid, other=0.0)
        tl.store(weights + at, score / tl.where(valid, total, 1.0) * factor, mask=valid)
        is_expert = e[None, :] == expert[:, None]
        start = tl.sum(tl.where(is_expert, starts[None, :], 0), axis=1)
        tl.store(order + n * topk + start + pair_rank, at, mask=valid)


def route(logits, bias, hash_table, tokens, addresses, ids, weights, order, slots, factor) -> None:
    """logits [n, E] -> ids, weights [n, k], order [2, n * k] (row 1 is the result), slots [min(E, n * k), 16]."""
    n, experts = logits.shape
    topk = ids.shape[1]
    _route[(1,)](
        logits,
        logits.stride(0),
        logits if bias is None else bias,
        ids if hash_table is None else hash_table,
        tokens,
        ids,
        weights,
        order,
        slots,
        n,
        experts,
        topk,
        factor,
        HASHED=hash_table is not None,
        TOKENS=power_of_two(n),
        EXPERTS=power_of_two(experts),
        num_warps=1 if n == 1 else 4 if n <= 16 else 8,
    )


@triton.jit
def _fp4_tile(codes, scales, r, start, rows, inner, INNER: tl.constexpr):
    """Even and odd columns of a decoded tile, [rows, INNER / 2] each."""
    h = start // 2 + tl.arange(0, INNER // 2)
    tile = (r < rows)[:, None] & (h < inner // 2)[None, :]
    packed = tl.load(codes + r.to(tl.int64)[:, None] * (inner // 2) + h[None, :], mask=tile, other=0).to(
        tl.int32
    )
    s = tl.load(scales + r.to(tl.int64)[:, None] * (inner // 32) + (h // 16)[None, :], mask=tile, other=127)
    factor = decode_e8m0(s)
    return decode_e2m1(packed & 15) * factor, decode_e2m1(packed >> 4) * factor


@triton.jit
def _dot_even_odd(total, even, odd, x_even, x_odd, FP32: tl.constexpr):
    if FP32:
        total = tl.dot(even, x_even.to(tl.float32), total, input_precision="ieee")
        return tl.dot(odd, x_odd.to(tl.float32), total, input_precision="ieee")
    total = tl.dot(even.to(x_even.dtype), x_even, total)
    return tl.dot(odd.to(x_odd.dtype), x_odd, total)


@triton.jit
def _gate_up(
    x,
    addresses,
    slots,
    order,
    weights,
    z,
    inner,
    width,
    topk,
    limit,
    FP32: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
):
    slot = tl.program_id(0)
    count = tl.load(slots + slot * 16 + 2)
    if count > 0:
        expert = tl.load(slots + slot * 16)
        first = tl.load(slots + slot * 16 + 1)
        address = tl.load(addresses + expert * 4)
        count = tl.where(address == 0, 0, count)  # experts without an address are computed elsewhere
        codes = address.to(tl.pointer_type(tl.uint8))
        scales = tl.load(addresses + expert * 4 + 1).to(tl.pointer_type(tl.uint8))
        r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        for base in range(0, count, TOKENS):
            t = base + tl.arange(0, TOKENS)
            pair = tl.load(order + first + t, mask=t < count, other=0)
            row = (pair // topk).to(tl.int64)
            a = tl.zeros([ROWS, TOKENS], tl.float32)
            b = tl.zeros([ROWS, TOKENS], tl.float32)
            for start in range(0, width, INNER):
                h = start // 2 + tl.arange(0, INNER // 2)
                in_range = (t < count)[None, :] & (h < width // 2)[:, None]
                at = x + row[None, :] * width + 2 * h[:, None]
                x_even = tl.load(at, mask=in_range, other=0.0)
                x_odd = tl.load(at + 1, mask=in_range, other=0.0)
                even, odd = _fp4_tile(codes, scales, r, start, inner, width, INNER)
                a = _dot_even_odd(a, even, odd, x_even, x_odd, FP32)
                up = codes + inner.to(tl.int64) * (width // 2)
                up_scales = scales + inner.to(tl.int64) * (width // 32)
                even, odd = _fp4_tile(up, up_scales, r, start, inner, width, INNER)
                b = _dot_even_odd(b, even, odd, x_even, x_odd, FP32)
            a = tl.minimum(a, limit)
            b = tl.minimum(tl.maximum(b, -limit), limit)
            weight = tl.load(weights + pair, mask=t < count, other=0.0)
            out = a / (1.0 + tl.exp(-a)) * b * weight[None, :]
            target = z + pair.to(tl.int64)[None, :] * inner + r[:, None]
            tl.store(target, out.to(z.dtype.element_ty), mask=(t < count)[None, :] & (r < inner)[:, None])


@triton.jit
def _down(
    z,
    addresses,
    slots,
    order,
    y,
    inner,
    width,
    topk,
    FP32: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
):
    slot = tl.program_id(0)
    count = tl.load(slots + slot * 16 + 2)
    if count > 0:
        expert = tl.load(slots + slot * 16)
        first = tl.load(slots + slot * 16 + 1)
        address = tl.load(addresses + expert * 4 + 2)
        count = tl.where(address == 0, 0, count)
        codes = address.to(tl.pointer_type(tl.uint8))
        scales = tl.load(addresses + expert * 4 + 3).to(tl.pointer_type(tl.uint8))
        r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        for base in range(0, count, TOKENS):
            t = base + tl.arange(0, TOKENS)
            pair = tl.load(order + first + t, mask=t < count, other=0).to(tl.int64)
            total = tl.zeros([ROWS, TOKENS], tl.float32)
            for start in range(0, inner, INNER):
                h = start // 2 + tl.arange(0, INNER // 2)
                in_range = (t < count)[None, :] & (h < inner // 2)[:, None]
                at = z + pair[None, :] * inner + 2 * h[:, None]
                z_even = tl.load(at, mask=in_range, other=0.0)
                z_odd = tl.load(at + 1, mask=in_range, other=0.0)
                even, odd = _fp4_tile(codes, scales, r, start, width, inner, INNER)
                total = _dot_even_odd(total, even, odd, z_even, z_odd, FP32)
            row = (pair // topk) * (topk + 1) + pair % topk
            tl.store(
                y + row[None, :] * width + r[:, None], total, mask=(t < count)[None, :] & (r < width)[:, None]
            )


def gate_up(x, addresses, slots, order, weights, z, limit) -> None:
    """x [n, d] -> z [n * k, inner]: clamped SwiGLU times the routing weight, in the dtype of z."""
    fp32 = x.dtype is torch.float32
    inner, width = z.shape[1], x.shape[1]
    _gate_up[(slots.shape[0], -(-inner // 32))](
        x,
        addresses,
        slots,
        order[1],
        weights,
        z,
        inner,
        width,
        weights.shape[1],
        limit,
        FP32=fp32,
        TOKENS=16,
        ROWS=32,
        INNER=64,
        num_warps=4,
    )


def down(z, addresses, slots, order, y) -> None:
    """z [n * k, inner] -> y [n, k + 1, d] float32, rows 0..k-1; the last row belongs to the shared expert."""
    fp32 = z.dtype is torch.float32
    inner, width = z.shape[1], y.shape[2]
    _down[(slots.shape[0], -(-width // 64))](
        z,
        addresses,
        slots,
        order[1],
        y,
        inner,
        width,
        y.shape[1] - 1,
        FP32=fp32,
        TOKENS=16,
        ROWS=64,
        INNER=64,
        num_warps=4,
    )


@triton.jit
def _swiglu(gate_up_rows, z, inner, stride, limit, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = tl.minimum(tl.load(gate_up_rows + row * stride + i, mask=i < inner, other=0.0).to(tl.float32), limit)
    b = tl.load(gate_up_rows + row * stride + inner + i, mask=i < inner, other=0.0).to(tl.float32)
    out = a / (1.0 + tl.exp(-a)) * tl.minimum(tl.maximum(b, -limit), limit)
    tl.store(z + row * inner + i, out.to(z.dtype.element_ty), mask=i < inner)


def swiglu(gate_up_rows, z, limit) -> None:
    """gate_up_rows [n, 2 * inner] -> z [n, inner]: clamped SwiGLU."""
    n, inner = z.shape
    _swiglu[(n, -(-inner // 256))](
        gate_up_rows, z, inner, gate_up_rows.stride(0), limit, BLOCK=256, num_warps=2
    )
