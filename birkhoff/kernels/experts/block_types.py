"""Experts of any packed type on a GPU, for decode steps and prompts: codes are decoded in the tile that is multiplied.

Both plans are served: of a decode step (`decode.route`: slots of 16 numbers) and of a prompt (`routing.plan`: blocks of
4). Their first three are the expert, its first pair in `order`, and its number of pairs. `gate_up` stores a row of z
per (token, choice) pair, `down` a row of y per pair; `y` has `places` rows per token, of which the first are the
choices. Experts are read through the table of addresses; those whose address is zero are left out.

FP4 experts have kernels of their own (`decode.py`, `prefill.py`, CUDA), which are faster.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from birkhoff.kernels.gpu import interpreted
from birkhoff.kernels.packed import PackedType
from birkhoff.kernels.packed.unpack import lookup_table, row_bytes, scale_bytes, unpack


@triton.jit
def _multiply(total, w, inputs, FP32: tl.constexpr):
    if FP32:
        return tl.dot(w, inputs.to(tl.float32), total, input_precision="ieee")
    return tl.dot(w.to(inputs.dtype), inputs, total)


@triton.jit
def _gate_up(
    x,
    addresses,
    plan,
    plan_stride,
    order,
    weights,
    z,
    grid,
    inner,
    width,
    topk,
    limit,
    TYPE: tl.constexpr,
    FP32: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
):
    slot = tl.program_id(1)
    count = tl.load(plan + slot * plan_stride + 2)
    if count > 0:
        expert = tl.load(plan + slot * plan_stride)
        first = tl.load(plan + slot * plan_stride + 1)
        address = tl.load(addresses + expert * 4)
        if address != 0:
            codes = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), [16])
            scales = tl.load(addresses + expert * 4 + 1).to(tl.pointer_type(tl.uint8))
            up = codes + inner.to(tl.int64) * row_bytes(width, TYPE)
            up_scales = scales + scale_bytes(inner, width, TYPE)
            r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
            for base in range(0, count, TOKENS):
                t = base + tl.arange(0, TOKENS)
                pair = tl.load(order + first + t, mask=t < count, other=0)
                row = (pair // topk).to(tl.int64)
                a = tl.zeros([ROWS, TOKENS], tl.float32)
                b = tl.zeros([ROWS, TOKENS], tl.float32)
                for start in range(0, width, INNER):
                    k = start + tl.arange(0, INNER)
                    in_range = (t < count)[None, :] & (k < width)[:, None]
                    inputs = tl.load(x + row[None, :] * width + k[:, None], mask=in_range, other=0.0)
                    w = unpack(codes, scales, grid, r, r < inner, start, width, TYPE, INNER)
                    a = _multiply(a, w, inputs, FP32)
                    w = unpack(up, up_scales, grid, r, r < inner, start, width, TYPE, INNER)
                    b = _multiply(b, w, inputs, FP32)
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
    plan,
    plan_stride,
    order,
    y,
    grid,
    inner,
    width,
    topk,
    places,
    TYPE: tl.constexpr,
    FP32: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
):
    slot = tl.program_id(1)
    count = tl.load(plan + slot * plan_stride + 2)
    if count > 0:
        expert = tl.load(plan + slot * plan_stride)
        first = tl.load(plan + slot * plan_stride + 1)
        address = tl.load(addresses + expert * 4 + 2)
        if address != 0:
            codes = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), [16])
            scales = tl.load(addresses + expert * 4 + 3).to(tl.pointer_type(tl.uint8))
            r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
            for base in range(0, count, TOKENS):
                t = base + tl.arange(0, TOKENS)
                pair = tl.load(order + first + t, mask=t < count, other=0).to(tl.int64)
                total = tl.zeros([ROWS, TOKENS], tl.float32)
                for start in range(0, inner, INNER):
                    k = start + tl.arange(0, INNER)
                    in_range = (t < count)[None, :] & (k < inner)[:, None]
                    inputs = tl.load(z + pair[None, :] * inner + k[:, None], mask=in_range, other=0.0)
                    w = unpack(codes, scales, grid, r, r < width, start, inner, TYPE, INNER)
                    total = _multiply(total, w, inputs, FP32)
                row = (pair // topk) * places + pair % topk
                target = y + row[None, :] * width + r[:, None]
                tl.store(
                    target, total.to(y.dtype.element_ty), mask=(t < count)[None, :] & (r < width)[:, None]
                )


def tile_config(tokens: int, fp32: bool, decoding: bool) -> dict[str, int]:
    """Tile sizes for up to `tokens` tokens of an expert at a time."""
    if interpreted():  # its time is that of the number of operations, not of their sizes
        return {"TOKENS": tokens, "ROWS": 256, "INNER": 256, "num_warps": 4, "num_stages": 2}
    if decoding:
        return {"TOKENS": 16, "ROWS": 16, "INNER": 128, "num_warps": 4, "num_stages": 2}
    rows, inner = (32, 32) if fp32 else (64, 64)
    return {"TOKENS": tokens, "ROWS": rows, "INNER": inner, "num_warps": 4, "num_stages": 2}


def gate_up(kind: PackedType, x, addresses, plan, order, weights, z, limit, config: dict[str, int]) -> None:
    """x [n, d] -> z [n * k, inner]: clamped SwiGLU times the routing weight, in the dtype of z."""
    inner, width = z.shape[1], x.shape[1]
    table = lookup_table(kind.name, x.device)
    _gate_up[(-(-inner // config["ROWS"]), len(plan))](
        x,
        addresses,
        plan,
        plan.stride(0),
        order,
        weights,
        z,
        x if table is None else table,
        inner,
        width,
        weights.shape[1],
        limit,
        TYPE=kind.name,
        FP32=x.dtype is torch.float32,
        **config,
    )


def down(kind: PackedType, z, addresses, plan, order, y, topk: int, config: dict[str, int]) -> None:
    """z [n * k, inner] -> y [n, places, d], the first k of each token."""
    inner, width = z.shape[1], y.shape[2]
    table = lookup_table(kind.name, z.device)
    _down[(-(-width // config["ROWS"]), len(plan))](
        z,
        addresses,
        plan,
        plan.stride(0),
        order,
        y,
        z if table is None else table,
        inner,
        width,
        topk,
        y.shape[1],
        TYPE=kind.name,
        FP32=z.dtype is torch.float32,
        **config,
    )
