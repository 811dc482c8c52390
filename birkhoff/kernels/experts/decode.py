"""Mixture of experts for the few rows of a decoding step on a GPU.

`route` is one program: scores, choice, weights, and the plan of the step. The plan groups (token, place) pairs by
expert, so that every expert in use is read once however many tokens chose it: slot s of the plan is expert
`slots[s, 0]` with pairs `order[1, f : f + slots[s, 2]]` from `f = slots[s, 1]`; slots in use come first. `gate_up`
and `down` run over slots. Experts are found through a table of addresses (`[E, 4]` int64: gate and up, their
scales, down, its scales), so they may lie anywhere a kernel can read. Outputs are one row per pair; who reads them adds
them up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from birkhoff.kernels.gpu import power_of_two
from birkhoff.kernels.linear.decode import decode_e8m0


@triton.jit
def _score(z):
    """sqrt(softplus(z)), true also where e^z vanishes beside one."""
    tiny = tl.exp(-tl.abs(z))
    rest = tl.where(tiny < 1e-3, tiny * (1.0 - tiny * (0.5 - tiny * 0.3333333)), tl.log(1.0 + tiny))
    return tl.sqrt(tl.maximum(z, 0.0) + rest)


@triton.jit
def _route(
    logits,
    logit_stride,
    bias,
    table,
    tokens,
    ids,
    weights,
    order,
    slots,
    n,
    experts,
    places,
    factor,
    HASHED: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    b = tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    alive = b < n
    tile = alive[:, None] & (e < experts)[None, :]
    scores = _score(tl.load(logits + b[:, None] * logit_stride + e[None, :], mask=tile, other=0.0))
    biased = tl.where(tile, scores, float("-inf"))
    if not HASHED:
        biased += tl.load(bias + e, mask=e < experts, other=0.0)[None, :]
    token = tl.load(tokens + b, mask=alive, other=0)
    counts = tl.zeros([EXPERTS], tl.int32)
    total = tl.zeros([TOKENS], tl.float32)
    for place in range(places):
        if HASHED:
            chosen = tl.load(table + token * places + place, mask=alive, other=0).to(tl.int32)
        else:
            chosen = tl.argmax(biased, axis=1, tie_break_left=True).to(tl.int32)
        mine = (e[None, :] == chosen[:, None]) & alive[:, None]
        if not HASHED:
            biased = tl.where(mine, float("-inf"), biased)
        score = tl.sum(tl.where(mine, scores, 0.0), axis=1)
        total += score
        marks = mine.to(tl.int32)
        before = tl.sum(tl.where(mine, tl.cumsum(marks, axis=0) - 1 + counts[None, :], 0), axis=1)
        counts += tl.sum(marks, axis=0)
        at = b * places + place
        tl.store(ids + at, chosen, mask=alive)
        tl.store(weights + at, score, mask=alive)
        tl.store(order + at, before, mask=alive)  # for now: this pair's place among its expert's
    used = counts > 0
    starts = tl.cumsum(counts, axis=0) - counts
    slot = tl.cumsum(used.to(tl.int32), axis=0) - 1
    tl.store(slots + slot * 16, e, mask=used)
    tl.store(slots + slot * 16 + 1, starts, mask=used)
    tl.store(slots + slot * 16 + 2, counts, mask=used)
    in_use = tl.sum(used.to(tl.int32), axis=0)
    tl.store(
        slots + e * 16 + 2,
        tl.zeros([EXPERTS], tl.int32),
        mask=(e >= in_use) & (e < n * places) & (e < experts),
    )
    tl.debug_barrier()
    for place in range(places):
        at = b * places + place
        chosen = tl.load(ids + at, mask=alive, other=0)
        before = tl.load(order + at, mask=alive, other=0)
        score = tl.load(weights + at, mask=alive, other=0.0)
        tl.store(weights + at, score / tl.where(alive, total, 1.0) * factor, mask=alive)
        mine = e[None, :] == chosen[:, None]
        start = tl.sum(tl.where(mine, starts[None, :], 0), axis=1)
        tl.store(order + n * places + start + before, at, mask=alive)


def route(logits, bias, table, tokens, addresses, ids, weights, order, slots, factor) -> None:
    """logits [n, E] -> ids, weights [n, k], order [2, n * k] (the second row counts), slots [min(E, n * k), 16]."""
    n, experts = logits.shape
    places = ids.shape[1]
    _route[(1,)](
        logits,
        logits.stride(0),
        logits if bias is None else bias,
        ids if table is None else table,
        tokens,
        ids,
        weights,
        order,
        slots,
        n,
        experts,
        places,
        factor,
        HASHED=table is not None,
        TOKENS=power_of_two(n),
        EXPERTS=power_of_two(experts),
        num_warps=1 if n == 1 else 4 if n <= 16 else 8,
    )


@triton.jit
def _e2m1(codes):
    """Four-bit codes in an int32 to float32: the bits moved are the value times 2^-126."""
    bits = ((codes & 8) << 28) | ((codes & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _fp4_tile(codes, scales, r, start, rows, inner, INNER: tl.constexpr):
    """Even and odd columns of a tile, decoded: [rows, INNER / 2] each."""
    h = start // 2 + tl.arange(0, INNER // 2)
    tile = (r < rows)[:, None] & (h < inner // 2)[None, :]
    packed = tl.load(codes + r.to(tl.int64)[:, None] * (inner // 2) + h[None, :], mask=tile, other=0).to(
        tl.int32
    )
    s = tl.load(scales + r.to(tl.int64)[:, None] * (inner // 32) + (h // 16)[None, :], mask=tile, other=127)
    factor = decode_e8m0(s)
    return _e2m1(packed & 15) * factor, _e2m1(packed >> 4) * factor


@triton.jit
def _step(total, even, odd, x_even, x_odd, WIDE: tl.constexpr):
    if WIDE:
        total = tl.dot(even, x_even.to(tl.float32), total, input_precision="ieee")
        return tl.dot(odd, x_odd.to(tl.float32), total, input_precision="ieee")
    total = tl.dot(even.to(x_even.dtype), x_even, total)
    return tl.dot(odd.to(x_odd.dtype), x_odd, total)


@triton.jit
def _open(
    x,
    table,
    slots,
    order,
    weights,
    z,
    inner,
    width,
    places,
    limit,
    WIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
):
    slot = tl.program_id(0)
    count = tl.load(slots + slot * 16 + 2)
    if count > 0:
        expert = tl.load(slots + slot * 16)
        first = tl.load(slots + slot * 16 + 1)
        codes = tl.load(table + expert * 4).to(tl.pointer_type(tl.uint8))
        scales = tl.load(table + expert * 4 + 1).to(tl.pointer_type(tl.uint8))
        r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        for base in range(0, count, TOKENS):
            t = base + tl.arange(0, TOKENS)
            pair = tl.load(order + first + t, mask=t < count, other=0)
            row = (pair // places).to(tl.int64)
            a = tl.zeros([ROWS, TOKENS], tl.float32)
            b = tl.zeros([ROWS, TOKENS], tl.float32)
            for start in range(0, width, INNER):
                h = start // 2 + tl.arange(0, INNER // 2)
                inside = (t < count)[None, :] & (h < width // 2)[:, None]
                at = x + row[None, :] * width + 2 * h[:, None]
                x_even = tl.load(at, mask=inside, other=0.0)
                x_odd = tl.load(at + 1, mask=inside, other=0.0)
                even, odd = _fp4_tile(codes, scales, r, start, inner, width, INNER)
                a = _step(a, even, odd, x_even, x_odd, WIDE)
                up = codes + inner.to(tl.int64) * (width // 2)
                up_scales = scales + inner.to(tl.int64) * (width // 32)
                even, odd = _fp4_tile(up, up_scales, r, start, inner, width, INNER)
                b = _step(b, even, odd, x_even, x_odd, WIDE)
            a = tl.minimum(a, limit)
            b = tl.minimum(tl.maximum(b, -limit), limit)
            gain = tl.load(weights + pair, mask=t < count, other=0.0)
            out = a / (1.0 + tl.exp(-a)) * b * gain[None, :]
            into = z + pair.to(tl.int64)[None, :] * inner + r[:, None]
            tl.store(into, out.to(z.dtype.element_ty), mask=(t < count)[None, :] & (r < inner)[:, None])


@triton.jit
def _close(
    z,
    table,
    slots,
    order,
    y,
    inner,
    width,
    places,
    WIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
):
    slot = tl.program_id(0)
    count = tl.load(slots + slot * 16 + 2)
    if count > 0:
        expert = tl.load(slots + slot * 16)
        first = tl.load(slots + slot * 16 + 1)
        codes = tl.load(table + expert * 4 + 2).to(tl.pointer_type(tl.uint8))
        scales = tl.load(table + expert * 4 + 3).to(tl.pointer_type(tl.uint8))
        r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        for base in range(0, count, TOKENS):
            t = base + tl.arange(0, TOKENS)
            pair = tl.load(order + first + t, mask=t < count, other=0).to(tl.int64)
            total = tl.zeros([ROWS, TOKENS], tl.float32)
            for start in range(0, inner, INNER):
                h = start // 2 + tl.arange(0, INNER // 2)
                inside = (t < count)[None, :] & (h < inner // 2)[:, None]
                at = z + pair[None, :] * inner + 2 * h[:, None]
                z_even = tl.load(at, mask=inside, other=0.0)
                z_odd = tl.load(at + 1, mask=inside, other=0.0)
                even, odd = _fp4_tile(codes, scales, r, start, width, inner, INNER)
                total = _step(total, even, odd, z_even, z_odd, WIDE)
            row = (pair // places) * (places + 1) + pair % places
            tl.store(
                y + row[None, :] * width + r[:, None], total, mask=(t < count)[None, :] & (r < width)[:, None]
            )


def gate_up(x, table, slots, order, weights, z, limit) -> None:
    """x [n, d] -> z [n * k, inner]: gated, clamped, times the routing weight, in z's dtype."""
    wide = x.dtype is torch.float32
    inner, width = z.shape[1], x.shape[1]
    _open[(slots.shape[0], -(-inner // 32))](
        x,
        table,
        slots,
        order[1],
        weights,
        z,
        inner,
        width,
        weights.shape[1],
        limit,
        WIDE=wide,
        TOKENS=16,
        ROWS=32,
        INNER=64,
        num_warps=4,
    )


def down(z, table, slots, order, y) -> None:
    """z [n * k, inner] -> y [n, k + 1, d] float32, places 0..k-1; the last is the shared expert's."""
    wide = z.dtype is torch.float32
    inner, width = z.shape[1], y.shape[2]
    _close[(slots.shape[0], -(-width // 64))](
        z,
        table,
        slots,
        order[1],
        y,
        inner,
        width,
        y.shape[1] - 1,
        WIDE=wide,
        TOKENS=16,
        ROWS=64,
        INNER=64,
        num_warps=4,
    )


@triton.jit
def _swiglu(opened, z, inner, stride, limit, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = tl.minimum(tl.load(opened + row * stride + i, mask=i < inner, other=0.0).to(tl.float32), limit)
    b = tl.load(opened + row * stride + inner + i, mask=i < inner, other=0.0).to(tl.float32)
    out = a / (1.0 + tl.exp(-a)) * tl.minimum(tl.maximum(b, -limit), limit)
    tl.store(z + row * inner + i, out.to(z.dtype.element_ty), mask=i < inner)


def swiglu(opened, z, limit) -> None:
    """opened [n, gate and up] -> z [n, inner]."""
    n, inner = z.shape
    _swiglu[(n, -(-inner // 256))](opened, z, inner, opened.stride(0), limit, BLOCK=256, num_warps=2)
