"""Experts for the many rows of a prompt on a GPU: every expert's tokens in blocks, codes unpacked in registers.

`plan` sorts (token, place) pairs by expert and cuts each expert's share into blocks of equal size, on the device and
without asking it anything: block b is expert `blocks[b, 0]` with pairs `order[f : f + blocks[b, 2]]` from
`f = blocks[b, 1]`; blocks in use come first. `_open` multiplies a block with gate and up, clamps, gates and weighs it;
`_close` takes it down and puts each pair's row in its own place, so that nobody adds to what another wrote: the sum
over a token's places has one order. Experts are found through the table of addresses that decoding uses (`[E, 4]`).

Codes decode exactly to the dtype of x, sums are float32. Even and odd columns, which lie in the low and high halves of
a byte, are multiplied apart: inputs come with their even columns before their odd ones (`planes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from birkhoff.kernels.experts import reference
from birkhoff.kernels.experts.reference import Stack
from birkhoff.kernels.gpu import power_of_two
from birkhoff.kernels.linear.triton import decode_e8m0

BLOCKS = (16, 32, 64, 128)  # tokens of a block


def block_size(pairs: int, experts: int) -> int:
    """The block that an average expert's tokens fill, within what the kernels know."""
    return min(max(power_of_two(pairs // max(experts, 1), BLOCKS[0]), BLOCKS[0]), BLOCKS[-1])


def plan(ids: torch.Tensor, experts: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [n, k] -> order [n * k] (pairs by expert, then by token), blocks [most, 4] (expert, first, count, 0)."""
    ids = ids.flatten()
    chosen, order = torch.sort(ids, stable=True)
    number = torch.arange(experts + 1, device=ids.device, dtype=ids.dtype)
    starts = torch.searchsorted(chosen, number)
    per_expert = (starts.diff() + (size - 1)) // size
    ends = per_expert.cumsum(0)
    most = ids.numel() // size + min(experts, ids.numel())
    block = torch.arange(most, device=ids.device)
    expert = torch.searchsorted(ends, block, right=True)
    known = expert.clamp_max(experts - 1)
    first = starts[known] + (block - (ends - per_expert)[known]) * size
    count = (starts[known + 1] - first).clamp_max(size)
    count = torch.where(expert < experts, count, 0)
    blocks = torch.stack((known, first, count, torch.zeros_like(count)), dim=1)
    return order.to(torch.int32), blocks.to(torch.int32)


def planes(x: torch.Tensor) -> torch.Tensor:
    """[n, d] with the even columns of a row before its odd ones."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2).contiguous()


@triton.jit
def _e2m1(codes):
    """Four-bit codes in an int32 to float32: the bits moved are the value times 2^-126."""
    bits = ((codes & 8) << 28) | ((codes & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _unpacked(codes, scales, r, start, rows, half, kept: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr):
    """Rows r of a matrix, bytes start.. of each: even and odd columns, [ROWS, HALF] each."""
    GROUPS: tl.constexpr = HALF // 16  # a scale serves 32 columns, 16 of either kind
    h = start + tl.arange(0, HALF)
    g = start // 16 + tl.arange(0, GROUPS)
    wide = r.to(tl.int64)
    at = tl.multiple_of(codes + wide[:, None] * half + h[None, :], [1, 16])
    packed = tl.load(at, mask=(r < rows)[:, None] & (h < half)[None, :], other=0).to(tl.int32)
    there = (r < rows)[:, None] & (g < half // 16)[None, :]
    scale = decode_e8m0(tl.load(scales + wide[:, None] * (half // 16) + g[None, :], mask=there, other=127))[:, :, None]
    even = tl.reshape(tl.reshape(_e2m1(packed & 15), [ROWS, GROUPS, 16]) * scale, [ROWS, HALF])
    odd = tl.reshape(tl.reshape(_e2m1(packed >> 4), [ROWS, GROUPS, 16]) * scale, [ROWS, HALF])
    return even.to(kept), odd.to(kept)


@triton.jit
def _step(total, even, odd, x_even, x_odd, WIDE: tl.constexpr):
    if WIDE:
        total = tl.dot(even, x_even, total, input_precision="ieee")
        return tl.dot(odd, x_odd, total, input_precision="ieee")
    return tl.dot(odd, x_odd, tl.dot(even, x_even, total))


@triton.jit
def _open(
    x, table, blocks, order, weights, z, inner, width, places, limit,
    WIDE: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    count = tl.load(blocks + block * 4 + 2)
    if count > 0:
        expert = tl.load(blocks + block * 4)
        first = tl.load(blocks + block * 4 + 1)
        codes = tl.load(table + expert * 4).to(tl.pointer_type(tl.uint8))
        scales = tl.load(table + expert * 4 + 1).to(tl.pointer_type(tl.uint8))
        kept: tl.constexpr = x.dtype.element_ty
        half = width // 2
        # Even rows first, then odd ones: what is stored below lies side by side in its plane.
        i = tl.arange(0, ROWS)
        r = tl.program_id(0) * ROWS + 2 * (i % (ROWS // 2)) + i // (ROWS // 2)
        t = tl.arange(0, TOKENS)
        pair = tl.load(order + first + t, mask=t < count, other=0)
        row = (pair // places).to(tl.int64)
        up, up_scales = codes + inner.to(tl.int64) * half, scales + inner.to(tl.int64) * (half // 16)
        a = tl.zeros([ROWS, TOKENS], tl.float32)
        b = tl.zeros([ROWS, TOKENS], tl.float32)
        for start in range(0, half, HALF):
            h = start + tl.arange(0, HALF)
            inside = (t < count)[None, :] & (h < half)[:, None]
            at = x + row[None, :] * width + h[:, None]
            x_even = tl.load(at, mask=inside, other=0.0)
            x_odd = tl.load(at + half, mask=inside, other=0.0)
            even, odd = _unpacked(codes, scales, r, start, inner, half, kept, ROWS, HALF)
            a = _step(a, even, odd, x_even, x_odd, WIDE)
            even, odd = _unpacked(up, up_scales, r, start, inner, half, kept, ROWS, HALF)
            b = _step(b, even, odd, x_even, x_odd, WIDE)
        a = tl.minimum(a, limit)
        b = tl.minimum(tl.maximum(b, -limit), limit)
        gain = tl.load(weights + pair, mask=t < count, other=0.0)
        out = a / (1.0 + tl.exp(-a)) * b * gain[None, :]
        into = z + (first + t).to(tl.int64)[None, :] * inner + ((r % 2) * (inner // 2) + r // 2)[:, None]
        tl.store(into, out.to(z.dtype.element_ty), mask=(t < count)[None, :] & (r < inner)[:, None])


@triton.jit
def _close(
    z, table, blocks, order, y, inner, width,
    WIDE: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    count = tl.load(blocks + block * 4 + 2)
    if count > 0:
        expert = tl.load(blocks + block * 4)
        first = tl.load(blocks + block * 4 + 1)
        codes = tl.load(table + expert * 4 + 2).to(tl.pointer_type(tl.uint8))
        scales = tl.load(table + expert * 4 + 3).to(tl.pointer_type(tl.uint8))
        kept: tl.constexpr = z.dtype.element_ty
        half = inner // 2
        r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        t = tl.arange(0, TOKENS)
        pair = tl.load(order + first + t, mask=t < count, other=0).to(tl.int64)
        total = tl.zeros([ROWS, TOKENS], tl.float32)
        for start in range(0, half, HALF):
            h = start + tl.arange(0, HALF)
            inside = (t < count)[None, :] & (h < half)[:, None]
            at = z + (first + t).to(tl.int64)[None, :] * inner + h[:, None]
            z_even = tl.load(at, mask=inside, other=0.0)
            z_odd = tl.load(at + half, mask=inside, other=0.0)
            even, odd = _unpacked(codes, scales, r, start, width, half, kept, ROWS, HALF)
            total = _step(total, even, odd, z_even, z_odd, WIDE)
        into = y + pair[None, :] * width + r[:, None]
        tl.store(into, total.to(y.dtype.element_ty), mask=(t < count)[None, :] & (r < width)[:, None])


def shape_of(size: int, wide: bool, gated: bool) -> dict[str, int]:
    """Tiles for blocks of `size` tokens: weight rows and bytes of a row at a time, warps and stages."""
    if wide:
        return {"ROWS": 32, "HALF": 32, "num_warps": 4, "num_stages": 2}
    # Two sums of 128 x 128 leave no registers for more than 32 bytes of a row: with 64 they spill.
    half = 32 if size == 128 and gated else 64
    return {"ROWS": 128 if size >= 64 else 64, "HALF": half, "num_warps": 8 if size >= 64 else 4, "num_stages": 3}


def open_experts(x, table, blocks, order, weights, z, limit, size: int, shape: dict[str, int] | None = None) -> None:
    """x [n, d] in planes -> z [pairs in their order, inner] in planes: gated, clamped, times the routing weight."""
    inner, width, wide = z.shape[1], x.shape[1], x.dtype is torch.float32
    shape = shape or shape_of(size, wide, gated=True)
    _open[(-(-inner // shape["ROWS"]), len(blocks))](
        x, table, blocks, order, weights, z, inner, width, weights.shape[1], limit, WIDE=wide, TOKENS=size, **shape
    )


def close_experts(z, table, blocks, order, y, size: int, shape: dict[str, int] | None = None) -> None:
    """z -> y [n * k, d], every pair in its place."""
    inner, width, wide = z.shape[1], y.shape[1], z.dtype is torch.float32
    shape = shape or shape_of(size, wide, gated=False)
    _close[(-(-width // shape["ROWS"]), len(blocks))](
        z, table, blocks, order, y, inner, width, WIDE=wide, TOKENS=size, **shape
    )


def _of(blocks: torch.Tensor, ready: Sequence[int], experts: int) -> torch.Tensor:
    """The plan of these experts alone: blocks of all others are empty."""
    here = torch.zeros(experts, dtype=torch.bool)
    here[list(ready)] = True
    mine = blocks.clone()
    mine[:, 2] *= here.to(blocks.device)[blocks[:, 0].long()]
    return mine


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    stack: Stack,
    limit: float,
    round_input: Callable[[torch.Tensor], torch.Tensor] | None,
    size: int | None = None,
) -> torch.Tensor:
    """`size` are the tokens of a block, chosen by their number unless given."""
    if stack.turns is None or round_input is not None:
        return reference.experts(x, ids, weights, stack, limit, round_input)
    count, places = ids.shape
    size = size or block_size(count * places, stack.count)
    order, blocks = plan(ids, stack.count, size)
    z = torch.empty(count * places, stack.inner, dtype=x.dtype, device=x.device)
    y = torch.empty(count * places, x.shape[1], dtype=x.dtype, device=x.device)
    entering, weights = planes(x), weights.contiguous()
    for ready, table in stack.turns():
        mine = blocks if ready is None else _of(blocks, ready, stack.count)
        open_experts(entering, table, mine, order, weights, z, limit, size)
        close_experts(z, table, mine, order, y, size)
    return y.view(count, places, -1).sum(1, dtype=torch.float32)
