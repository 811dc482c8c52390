"""Experts for the many rows of a prompt on a GPU: tokens in blocks per expert, codes decoded in registers.

`routing.py` determines the blocks. `_gate_up` multiplies a block with gate and up, applies clamped SwiGLU and the
routing weight; `_down` multiplies with down and stores the row of each pair separately, so that nothing is
accumulated in memory and the sum over the choices of a token has a fixed order (`_sum_pairs`). Experts are read
through the table of addresses that decode uses (`[E, 4]`).

Codes decode exactly to the dtype of x, sums are float32. Even and odd columns, stored in the low and high four bits
of a byte, are multiplied separately: inputs are deinterleaved, even columns before odd ones. Rows of gate and up form
one tile, half of it each, so that both use one tile of inputs.

With four warps per program two programs fit a multiprocessor: while one decodes, the other multiplies. Decoding cannot
be hidden behind the products of a block of a hundred tokens, so on GPUs with bfloat16x2 multiplication four bytes are
decoded to eight values by 24 instructions (`FOUR_BYTES`), half as many as with plain arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from birkhoff.kernels.cuda import prompt_experts as cuda
from birkhoff.kernels.experts import block_types, fp8, reference
from birkhoff.kernels.experts.decode import _dot_even_odd, _swiglu
from birkhoff.kernels.experts.reference import Stack
from birkhoff.kernels.experts.routing import plan
from birkhoff.kernels.gpu import HOPPER_SHARED, power_of_two, shared_memory
from birkhoff.kernels.packed.unpack import decode_e2m1, decode_e8m0
from birkhoff.kernels.quant.device import (
    empty_codes,
    fp8_groups,
    has_fp8,
    quantise_fp8,
    rounds_to_codes,
    store_codes,
)
from birkhoff.kernels.quant.rounded_rows import Input, RoundedRows, rows_of

BLOCKS = (16, 32, 64, 128)  # tokens per block

# Bytes 0 to 3 of $4, times scales $5 (bytes 0 and 1) and $6 (bytes 2 and 3): low nibbles to $0 and $1, high nibbles to
# $2 and $3. The bits of a code shifted into bfloat16 position are its value times 2^-126; that is undone before the
# scale is applied, since a common factor could overflow.
FOUR_BYTES: tl.constexpr = tl.constexpr(
    """{
    .reg .b32 a, b, t, u, m;
    mov.b32 m, 0x7E807E80;
    prmt.b32 a, $4, 0, 0x1404;
    prmt.b32 b, $4, 0, 0x3424;
    shl.b32 t, a, 4;
    shr.b32 u, a, 2;
    and.b32 u, u, 0x01C001C0;
    lop3.b32 t, t, 0x80008000, u, 0xEA;
    mul.bf16x2 t, t, m;
    mul.bf16x2 $0, t, $5;
    shl.b32 t, b, 4;
    shr.b32 u, b, 2;
    and.b32 u, u, 0x01C001C0;
    lop3.b32 t, t, 0x80008000, u, 0xEA;
    mul.bf16x2 t, t, m;
    mul.bf16x2 $1, t, $6;
    shr.b32 u, a, 6;
    and.b32 u, u, 0x01C001C0;
    lop3.b32 t, a, 0x80008000, u, 0xEA;
    mul.bf16x2 t, t, m;
    mul.bf16x2 $2, t, $5;
    shr.b32 u, b, 6;
    and.b32 u, u, 0x01C001C0;
    lop3.b32 t, b, 0x80008000, u, 0xEA;
    mul.bf16x2 t, t, m;
    mul.bf16x2 $3, t, $6;
    }"""
)


def block_size(pairs: int, experts: int) -> int:
    """Block size that fits the tokens of an average expert, among the supported ones."""
    return min(max(power_of_two(pairs // max(experts, 1), BLOCKS[0]), BLOCKS[0]), BLOCKS[-1])


@triton.jit
def _deinterleave(x, out, half, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    interleaved = tl.load(x + row * 2 * half + i, mask=i < 2 * half, other=0.0)
    even, odd = tl.split(tl.reshape(interleaved, [BLOCK, 2]))
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + row * 2 * half + h, even, mask=h < half)
    tl.store(out + row * 2 * half + half + h, odd, mask=h < half)


def deinterleave(x: torch.Tensor) -> torch.Tensor:
    """x [n, d] with the even columns of a row before its odd ones."""
    x = x.contiguous()
    out, half = torch.empty_like(x), x.shape[1] // 2
    block = min(1024, power_of_two(half))
    if len(x):
        _deinterleave[(len(x), -(-half // block))](x, out, half, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _round_halves(z, half, GROUPS: tl.constexpr):
    """Round rows whose even columns come before the odd ones, in groups of 128 columns: 64 in each half."""
    row = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    c = tl.arange(0, 128)
    h = g[:, None] * 64 + (c % 64)[None, :]
    at = z + row * 2 * half + (c // 64)[None, :] * half + h
    v = tl.load(at, mask=h < half, other=0.0).to(tl.float32)
    tl.store(at, fp8_groups(v).to(z.dtype.element_ty), mask=h < half)


def _round_deinterleaved(z: torch.Tensor) -> None:
    """Round deinterleaved rows z [n, d] in place, as `round_input` does in their natural order."""
    groups = -(-z.shape[1] // 128)
    per_program = min(16, power_of_two(groups))
    if len(z):
        _round_halves[(len(z), -(-groups // per_program))](
            z, z.shape[1] // 2, GROUPS=per_program, num_warps=4
        )


@triton.jit
def _decoded(
    codes,
    scales,
    r,
    valid,
    start,
    row_bytes,
    dtype: tl.constexpr,
    BF16X2: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Rows r of a matrix, bytes start.. of each: decoded even and odd columns, [ROWS, BYTES] each."""
    GROUPS: tl.constexpr = BYTES // 16  # a scale covers 32 columns, 16 even and 16 odd
    h = start + tl.arange(0, BYTES)
    g = start // 16 + tl.arange(0, GROUPS)
    row = r.to(tl.int64)
    at = tl.multiple_of(codes + row[:, None] * row_bytes + h[None, :], [1, 16])
    packed = tl.load(at, mask=valid[:, None] & (h < row_bytes)[None, :], other=0)
    scale_valid = valid[:, None] & (g < row_bytes // 16)[None, :]
    scale = decode_e8m0(
        tl.load(scales + row[:, None] * (row_bytes // 16) + g[None, :], mask=scale_valid, other=127)
    )
    if BF16X2:
        scale_per_byte = tl.reshape(
            tl.broadcast_to(scale.to(tl.bfloat16)[:, :, None], [ROWS, GROUPS, 16]), [ROWS, BYTES]
        )
        return tl.inline_asm_elementwise(
            FOUR_BYTES,
            "=r,=r,=r,=r,r,r,r",
            [packed, scale_per_byte],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    packed = packed.to(tl.int32)
    even = tl.reshape(
        tl.reshape(decode_e2m1(packed & 15), [ROWS, GROUPS, 16]) * scale[:, :, None], [ROWS, BYTES]
    )
    odd = tl.reshape(
        tl.reshape(decode_e2m1(packed >> 4), [ROWS, GROUPS, 16]) * scale[:, :, None], [ROWS, BYTES]
    )
    return even.to(dtype), odd.to(dtype)


@triton.jit
def _gate_up(
    x,
    addresses,
    blocks,
    order,
    weights,
    z,
    inner,
    width,
    topk,
    limit,
    FP32: tl.constexpr,
    BF16X2: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
):
    block = tl.program_id(1)
    count = tl.load(blocks + block * 4 + 2)
    if count > 0:
        expert = tl.load(blocks + block * 4)
        first = tl.load(blocks + block * 4 + 1)
        codes = tl.load(addresses + expert * 4).to(tl.pointer_type(tl.uint8))
        scales = tl.load(addresses + expert * 4 + 1).to(tl.pointer_type(tl.uint8))
        dtype: tl.constexpr = x.dtype.element_ty
        row_bytes = width // 2
        # Rows of gate, then the same rows of up; even rows first, so that the deinterleaved result is contiguous.
        PART: tl.constexpr = ROWS // 2
        i = tl.arange(0, ROWS)
        j = i % PART
        own_rows = tl.program_id(0) * PART + 2 * (j % (PART // 2)) + j // (PART // 2)
        t = tl.arange(0, TOKENS)
        pair = tl.load(order + first + t, mask=t < count, other=0)
        row = (pair // topk).to(tl.int64)
        total = tl.zeros([ROWS, TOKENS], tl.float32)
        for start in range(0, row_bytes, BYTES):
            h = start + tl.arange(0, BYTES)
            in_range = (t < count)[None, :] & (h < row_bytes)[:, None]
            at = x + row[None, :] * width + h[:, None]
            x_even = tl.load(at, mask=in_range, other=0.0)
            x_odd = tl.load(at + row_bytes, mask=in_range, other=0.0)
            even, odd = _decoded(
                codes,
                scales,
                own_rows + (i // PART) * inner,
                own_rows < inner,
                start,
                row_bytes,
                dtype,
                BF16X2,
                ROWS,
                BYTES,
            )
            total = _dot_even_odd(total, even, odd, x_even, x_odd, FP32)
        a, b = tl.split(tl.permute(tl.reshape(total, [2, PART, TOKENS]), (1, 2, 0)))
        a = tl.minimum(a, limit)
        b = tl.minimum(tl.maximum(b, -limit), limit)
        weight = tl.load(weights + pair, mask=t < count, other=0.0)
        out = a / (1.0 + tl.exp(-a)) * b * weight[None, :]
        k = tl.arange(0, PART)
        r = tl.program_id(0) * PART + 2 * (k % (PART // 2)) + k // (PART // 2)
        target = z + (first + t).to(tl.int64)[None, :] * inner + ((r % 2) * (inner // 2) + r // 2)[:, None]
        tl.store(target, out.to(z.dtype.element_ty), mask=(t < count)[None, :] & (r < inner)[:, None])


@triton.jit
def _down(
    z,
    addresses,
    blocks,
    order,
    y,
    inner,
    width,
    FP32: tl.constexpr,
    BF16X2: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
):
    block = tl.program_id(1)
    count = tl.load(blocks + block * 4 + 2)
    if count > 0:
        expert = tl.load(blocks + block * 4)
        first = tl.load(blocks + block * 4 + 1)
        codes = tl.load(addresses + expert * 4 + 2).to(tl.pointer_type(tl.uint8))
        scales = tl.load(addresses + expert * 4 + 3).to(tl.pointer_type(tl.uint8))
        dtype: tl.constexpr = z.dtype.element_ty
        row_bytes = inner // 2
        r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        t = tl.arange(0, TOKENS)
        pair = tl.load(order + first + t, mask=t < count, other=0).to(tl.int64)
        total = tl.zeros([ROWS, TOKENS], tl.float32)
        for start in range(0, row_bytes, BYTES):
            h = start + tl.arange(0, BYTES)
            in_range = (t < count)[None, :] & (h < row_bytes)[:, None]
            at = z + (first + t).to(tl.int64)[None, :] * inner + h[:, None]
            z_even = tl.load(at, mask=in_range, other=0.0)
            z_odd = tl.load(at + row_bytes, mask=in_range, other=0.0)
            even, odd = _decoded(codes, scales, r, r < width, start, row_bytes, dtype, BF16X2, ROWS, BYTES)
            total = _dot_even_odd(total, even, odd, z_even, z_odd, FP32)
        target = y + pair[None, :] * width + r[:, None]
        tl.store(target, total.to(y.dtype.element_ty), mask=(t < count)[None, :] & (r < width)[:, None])


def tile_config(fp32: bool, gated: bool, shared: int = HOPPER_SHARED) -> dict[str, int]:
    """Tile sizes: weight rows, bytes of a row per iteration, warps and stages."""
    if fp32:
        return {"ROWS": 32, "BYTES": 32, "num_warps": 4, "num_stages": 2}
    stages = 2 if shared < 100_000 else 3 if gated else 4
    return {"ROWS": 128, "BYTES": 64 if gated else 32, "num_warps": 4, "num_stages": stages}


def has_bf16x2(x: torch.Tensor) -> bool:
    """Whether the GPU has bfloat16x2 multiplication: NVIDIA, compute capability 9.0 or higher."""
    if x.dtype is not torch.bfloat16 or not x.is_cuda or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(x.device) >= (9, 0)


def gate_up(x, addresses, blocks, order, weights, z, limit, size: int) -> None:
    """x [n, d] deinterleaved -> z [pairs in sorted order, inner] deinterleaved: SwiGLU times the routing weight."""
    inner = z.shape[1]
    width = x.shape[1]
    fp32 = x.dtype is torch.float32
    config = tile_config(fp32, True, shared_memory(x.device))
    _gate_up[(-(-2 * inner // config["ROWS"]), len(blocks))](
        x,
        addresses,
        blocks,
        order,
        weights,
        z,
        inner,
        width,
        weights.shape[1],
        limit,
        FP32=fp32,
        BF16X2=has_bf16x2(x),
        TOKENS=size,
        **config,
    )


def down(z, addresses, blocks, order, y, size: int) -> None:
    """z [pairs in sorted order, inner] -> y [n * k, d] in pair order."""
    inner = z.shape[1]
    width = y.shape[1]
    fp32 = z.dtype is torch.float32
    config = tile_config(fp32, False, shared_memory(z.device))
    _down[(-(-width // config["ROWS"]), len(blocks))](
        z, addresses, blocks, order, y, inner, width, FP32=fp32, BF16X2=has_bf16x2(z), TOKENS=size, **config
    )


@triton.jit
def _sum_pairs(y, shared, out, width, topk, SHARED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(topk):
        total += tl.load(y + (row * topk + choice) * width + d, mask=d < width, other=0.0).to(tl.float32)
    if SHARED:
        total += tl.load(shared + row * width + d, mask=d < width, other=0.0).to(tl.float32)
    tl.store(out + row * width + d, total.to(out.dtype.element_ty), mask=d < width)


def sum_pairs(y: torch.Tensor, topk: int, shared: torch.Tensor | None) -> torch.Tensor:
    """y [n * topk, d] -> [n, d] float32: the sum over the rows of a token; plus `shared` [n, d], in its dtype."""
    width = y.shape[1]
    n = len(y) // topk
    out = torch.empty(n, width, dtype=torch.float32 if shared is None else shared.dtype, device=y.device)
    block = min(1024, power_of_two(width))
    if n:
        _sum_pairs[(n, -(-width // block))](
            y,
            y if shared is None else shared.contiguous(),
            out,
            width,
            topk,
            SHARED=shared is not None,
            BLOCK=block,
            num_warps=4,
        )
    return out


@triton.jit(do_not_specialize=["rows", "scale_stride"])
def _swiglu_codes(
    gate_up_rows,
    z,
    codes,
    scales,
    scale_stride,
    rows,
    inner,
    stride,
    limit,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`_swiglu`, with the FP8 codes of the result."""
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    i = tl.arange(0, BLOCK)
    tile = (r < rows)[:, None] & (i < inner)[None, :]
    at = gate_up_rows + r[:, None] * stride + i[None, :]
    a = tl.minimum(tl.load(at, mask=tile, other=0.0).to(tl.float32), limit)
    b = tl.load(at + inner, mask=tile, other=0.0).to(tl.float32)
    out = (a / (1.0 + tl.exp(-a)) * tl.minimum(tl.maximum(b, -limit), limit)).to(z.dtype.element_ty)
    tl.store(z + r[:, None] * inner + i[None, :], out, mask=tile)
    store_codes(out.to(tl.float32), r, r < rows, codes, codes, scales, scale_stride, inner, 0, ROWS, BLOCK)


def glu(gate_up_rows: torch.Tensor, limit: float, dtype: torch.dtype, released: bool = False) -> Input:
    if gate_up_rows.stride(-1) != 1:
        gate_up_rows = gate_up_rows.contiguous()
    n, inner = gate_up_rows.shape[0], gate_up_rows.shape[1] // 2
    z = torch.empty(n, inner, dtype=dtype, device=gate_up_rows.device)
    if released and rounds_to_codes(z, inner):
        codes, scales = empty_codes(n, inner, z.device)
        block = power_of_two(inner)
        rows = max(1, 4096 // block)
        strides = (scales.stride(0), n, inner, gate_up_rows.stride(0))
        _swiglu_codes[(-(-n // rows),)](
            gate_up_rows, z, codes, scales, *strides, limit, ROWS=rows, BLOCK=block, num_warps=8
        )
        return RoundedRows(z, codes, scales)
    block = min(1024, power_of_two(inner))
    if n:
        _swiglu[(n, -(-inner // block))](
            gate_up_rows, z, inner, gate_up_rows.stride(0), limit, BLOCK=block, num_warps=4
        )
    return z


def _blocks_of(blocks: torch.Tensor, ready: Sequence[int], experts: int) -> torch.Tensor:
    """The plan restricted to these experts: all other blocks are empty."""
    is_ready = torch.zeros(experts, dtype=torch.bool)
    is_ready[list(ready)] = True
    own_blocks = blocks.clone()
    own_blocks[:, 2] *= is_ready.to(blocks.device)[blocks[:, 0].long()]
    return own_blocks


def experts(
    x: Input,
    ids: torch.Tensor,
    weights: torch.Tensor,
    stack: Stack,
    limit: float,
    round_input: Callable[[torch.Tensor], torch.Tensor] | None,
    shared: torch.Tensor | None = None,
    size: int | None = None,
) -> torch.Tensor:
    """`size`: tokens per block (default: by the number of pairs)."""
    rounded = x if isinstance(x, RoundedRows) else None
    x = rows_of(x)
    if stack.batches is None:
        return reference.experts(x, ids, weights, stack, limit, round_input, shared)
    count, topk = ids.shape
    size = size or block_size(count * topk, stack.count)
    order, blocks = plan(ids, stack.count, size)
    z = torch.empty(count * topk, stack.inner, dtype=x.dtype, device=x.device)
    y = torch.empty(count * topk, x.shape[1], dtype=x.dtype, device=x.device)
    weights = weights.contiguous()
    packed_fp4 = stack.types is None or all(kind.name == "FP4" for kind in stack.types)
    rounds = round_input is not None
    if rounds and packed_fp4 and fp8.takes(x.dtype, x.shape[1], stack.inner) and has_fp8(x):
        by_cuda = cuda.supports(x, stack.inner)
        if rounded is None or rounded.ordered is None:
            quantised = quantise_fp8(x.contiguous(), cuda.input_order(x, stack.inner))
        else:
            quantised = rounded.ordered, rounded.scales
        for ready, addresses in stack.batches():
            own_blocks = blocks if ready is None else _blocks_of(blocks, ready, stack.count)
            if by_cuda:
                middle = cuda.gate_up(*quantised, addresses, own_blocks, order, weights, stack.inner, limit)
                cuda.down(*middle, addresses, own_blocks, order, y)
            else:
                fp8.gate_up(*quantised, addresses, own_blocks, order, weights, z, limit, size)
                fp8.down(*quantise_fp8(z, "halves"), addresses, own_blocks, order, y, size)
        return sum_pairs(y, topk, shared)
    if round_input is not None:
        x = round_input(x)
    if not packed_fp4:
        assert stack.types is not None
        gated, summed = stack.types
        config = block_types.tile_config(size, x.dtype is torch.float32, decoding=False)
        x, y = x.contiguous(), y.view(count, topk, -1)
        for ready, addresses in stack.batches():
            own_blocks = blocks if ready is None else _blocks_of(blocks, ready, stack.count)
            block_types.gate_up(gated, x, addresses, own_blocks, order, weights, z, limit, config)
            z = z if round_input is None else round_input(z)
            block_types.down(summed, z, addresses, own_blocks, order, y, topk, config)
        return sum_pairs(y.flatten(0, 1), topk, shared)
    inputs = deinterleave(x)
    for ready, addresses in stack.batches():
        own_blocks = blocks if ready is None else _blocks_of(blocks, ready, stack.count)
        gate_up(inputs, addresses, own_blocks, order, weights, z, limit, size)
        if round_input is not None:
            _round_deinterleaved(z)
        down(z, addresses, own_blocks, order, y, size)
    return sum_pairs(y, topk, shared)
