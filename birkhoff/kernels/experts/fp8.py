"""FP4 experts with inputs rounded to FP8, on FP8 tensor cores, for the many rows of a prompt.

The same two launches as `prefill.py`, over the same plan: gate and up with SwiGLU and routing weight, then down. What
they multiply are codes. Inputs are E4M3 with a scale per token and 128 columns (`quant.device.quantise_fp8`). Weights
are E2M1 with a scale per row and 32 columns; E4M3 holds every E2M1 value times any of twelve consecutive powers of two,
so a weight becomes an E4M3 code that includes its scale relative to the largest one of its row, exactly. Where the
scales of a row differ by more than 2^11, its columns are multiplied in several passes, each with the scales of one span
of twelve; the rest counts as zero in that pass. The row's largest scale multiplies the result.

Eight E2M1 codes (32 bits) become two words of four E4M3 codes: the three magnitude bits of a code select one of eight
bytes (`prmt`), the sign is a second selection. Inputs have the order of columns that this decoding has ("halves").
Sums of 128 columns are the hardware's, the rest is float32 (see `linear/fp8.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from birkhoff.kernels.gpu import power_of_two
from birkhoff.kernels.packed.unpack import decode_e2m1

SPAN: tl.constexpr = tl.constexpr(12)  # powers of two that an E4M3 code has room for beside an E2M1 value

# Bytes 0 to 3 of $2 hold eight codes. $3 and $7 are the E4M3 codes of 0, .5, 1, 1.5 and of 2, 3, 4, 6 times a scale.
EIGHT_CODES: tl.constexpr = tl.constexpr(
    """{
    .reg .b32 m, s, t;
    and.b32 m, $2, 0x77777777;
    shr.u32 s, $2, 3;
    and.b32 s, s, 0x11111111;
    prmt.b32 $0, $3, $7, m;
    prmt.b32 t, 0x00008000, 0, s;
    or.b32 $0, $0, t;
    shr.u32 m, m, 16;
    shr.u32 s, s, 16;
    prmt.b32 $1, $3, $7, m;
    prmt.b32 t, 0x00008000, 0, s;
    or.b32 $1, $1, t;
    }"""
)


@triton.jit
def _largest(scales, row, valid, groups, GROUPS: tl.constexpr):
    """The largest scale of each row, and how many passes the rows need."""
    g = tl.arange(0, GROUPS)
    tile = valid[:, None] & (g < groups)[None, :]
    at = scales + row[:, None] * groups + g[None, :]
    s = tl.load(at, mask=tile, other=0).to(tl.int32)
    largest = tl.max(s, axis=1)
    least = tl.min(tl.where(tile, s, largest[:, None]), axis=1)
    return largest, tl.max(largest - least, axis=0) // SPAN + 1


@triton.jit
def _as_e4m3(codes, scales, row, valid, start, row_bytes, base, PRMT: tl.constexpr, ROWS: tl.constexpr):
    """Bytes start .. start + 63 of the rows as E4M3 codes times the scale relative to `base`: the first four and the
    last four of every eight columns, [ROWS, 64] each."""
    h = start + tl.arange(0, 64)
    at = tl.multiple_of(codes + row[:, None] * row_bytes + h[None, :], [1, 16])
    packed = tl.load(at, mask=valid[:, None], other=0)
    g = start // 16 + tl.arange(0, 4)
    s = tl.load(scales + row[:, None] * (row_bytes // 16) + g[None, :], mask=valid[:, None], other=0)
    power = s.to(tl.int32) - base[:, None] + 11
    inside = (power >= 0) & (power < SPAN)
    if PRMT:
        low = tl.where(inside, 0x14100800 + power * 0x08080800, 0)
        high = tl.where(inside, 0x24201C18 + power * 0x08080808, 0)
        low = tl.reshape(tl.broadcast_to(low[:, :, None], [ROWS, 4, 16]), [ROWS, 64])
        high = tl.reshape(tl.broadcast_to(high[:, :, None], [ROWS, 4, 16]), [ROWS, 64])
        first, second = tl.inline_asm_elementwise(
            EIGHT_CODES,
            "=r,=r,r,r,r,r,r,r,r,r,r",
            [packed, low, high],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
        return first.to(tl.float8e4nv, bitcast=True), second.to(tl.float8e4nv, bitcast=True)
    factor = tl.where(inside, ((power + (127 - 5)) << 23).to(tl.float32, bitcast=True), 0.0)
    factor = tl.reshape(tl.broadcast_to(factor[:, :, None], [ROWS, 4, 16]), [ROWS, 64])
    packed = packed.to(tl.int32)
    even, odd = decode_e2m1(packed & 15) * factor, decode_e2m1(packed >> 4) * factor
    # columns 0 .. 7 of a word, then its first and its last four
    columns = tl.reshape(tl.join(even, odd), [ROWS, 16, 2, 4])
    first, second = tl.split(tl.permute(columns, (0, 1, 3, 2)))
    return (tl.reshape(first, [ROWS, 64]).to(tl.float8e4nv), tl.reshape(second, [ROWS, 64]).to(tl.float8e4nv))


@triton.jit
def _product(
    x,
    x_scale,
    x_rows,
    row_of,
    t_valid,
    codes,
    scales,
    row,
    valid,
    width,
    PRMT: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Rows of a packed matrix times the inputs of a block of tokens: [ROWS, TOKENS] float32."""
    row_bytes = width // 2
    largest, passes = _largest(scales, row, valid, width // 32, GROUPS)
    k = tl.arange(0, 64)
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    base, fraction = largest, 1.0
    for _ in range(passes):
        for block in range(width // 128):
            at = x + row_of[None, :] * width + (block * 128 + k)[:, None]
            x_first = tl.load(at, mask=t_valid[None, :], other=0.0)
            x_second = tl.load(at + 64, mask=t_valid[None, :], other=0.0)
            first, second = _as_e4m3(codes, scales, row, valid, block * 64, row_bytes, base, PRMT, ROWS)
            sums = tl.dot(first, x_first)
            sums = tl.dot(second, x_second, sums)
            factor = tl.load(x_scale + block * x_rows + row_of, mask=t_valid, other=0.0) * fraction
            total += sums * factor[None, :]
        base -= SPAN
        fraction *= 1.0 / 4096
    # a code is at most 6 * 2^6, so that the scale of a row is 2^-6 of its largest one
    return total * ((largest - 6) << 23).to(tl.float32, bitcast=True)[:, None]


@triton.jit
def _gate_up_fp8(
    x,
    x_scale,
    x_rows,
    addresses,
    blocks,
    order,
    weights,
    z,
    inner,
    width,
    topk,
    limit,
    PRMT: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    block = tl.program_id(1)
    count = tl.load(blocks + block * 4 + 2)
    if count > 0:
        expert = tl.load(blocks + block * 4)
        first = tl.load(blocks + block * 4 + 1)
        codes = tl.load(addresses + expert * 4).to(tl.pointer_type(tl.uint8))
        scales = tl.load(addresses + expert * 4 + 1).to(tl.pointer_type(tl.uint8))
        PART: tl.constexpr = ROWS // 2  # rows of gate, then the same rows of up
        i = tl.arange(0, ROWS)
        own = tl.program_id(0) * PART + i % PART
        t = tl.arange(0, TOKENS)
        pair = tl.load(order + first + t, mask=t < count, other=0)
        total = _product(
            x,
            x_scale,
            x_rows,
            (pair // topk).to(tl.int64),
            t < count,
            codes,
            scales,
            (own + (i // PART) * inner).to(tl.int64),
            own < inner,
            width,
            PRMT,
            TOKENS,
            ROWS,
            GROUPS,
        )
        a, b = tl.split(tl.permute(tl.reshape(total, [2, PART, TOKENS]), (1, 2, 0)))
        a = tl.minimum(a, limit)
        b = tl.minimum(tl.maximum(b, -limit), limit)
        weight = tl.load(weights + pair, mask=t < count, other=0.0)
        out = a / (1.0 + tl.exp(-a)) * b * weight[None, :]
        r = tl.program_id(0) * PART + tl.arange(0, PART)
        target = z + (first + t).to(tl.int64)[None, :] * inner + r[:, None]
        tl.store(target, out.to(z.dtype.element_ty), mask=(t < count)[None, :] & (r < inner)[:, None])


@triton.jit
def _down_fp8(
    z,
    z_scale,
    z_rows,
    addresses,
    blocks,
    order,
    y,
    inner,
    width,
    PRMT: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    block = tl.program_id(1)
    count = tl.load(blocks + block * 4 + 2)
    if count > 0:
        expert = tl.load(blocks + block * 4)
        first = tl.load(blocks + block * 4 + 1)
        codes = tl.load(addresses + expert * 4 + 2).to(tl.pointer_type(tl.uint8))
        scales = tl.load(addresses + expert * 4 + 3).to(tl.pointer_type(tl.uint8))
        r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        t = tl.arange(0, TOKENS)
        pair = tl.load(order + first + t, mask=t < count, other=0).to(tl.int64)
        total = _product(
            z,
            z_scale,
            z_rows,
            (first + t).to(tl.int64),
            t < count,
            codes,
            scales,
            r.to(tl.int64),
            r < width,
            inner,
            PRMT,
            TOKENS,
            ROWS,
            GROUPS,
        )
        target = y + pair[None, :] * width + r[:, None]
        tl.store(target, total.to(y.dtype.element_ty), mask=(t < count)[None, :] & (r < width)[:, None])


def tile_config(size: int) -> dict[str, int]:
    """Tile sizes: weight rows, warps and stages."""
    return {"ROWS": 128, "num_warps": 8 if size == 128 else 4, "num_stages": 3}


def gate_up(x, x_scale, addresses, blocks, order, weights, z, limit, size: int) -> None:
    """x [n, d] codes, x_scale [d / 128, n] -> z [pairs in sorted order, inner]: SwiGLU times the routing weight."""
    inner, width = z.shape[1], x.shape[1]
    config = tile_config(size)
    _gate_up_fp8[(-(-2 * inner // config["ROWS"]), len(blocks))](
        x,
        x_scale,
        x_scale.shape[1],
        addresses,
        blocks,
        order,
        weights,
        z,
        inner,
        width,
        weights.shape[1],
        limit,
        PRMT=x.is_cuda,
        TOKENS=size,
        GROUPS=power_of_two(width // 32),
        **config,
    )


def down(z, z_scale, addresses, blocks, order, y, size: int) -> None:
    """z [pairs in sorted order, inner] codes, z_scale [inner / 128, pairs] -> y [n * k, d] in pair order."""
    inner, width = z.shape[1], y.shape[1]
    config = tile_config(size)
    _down_fp8[(-(-width // config["ROWS"]), len(blocks))](
        z,
        z_scale,
        z_scale.shape[1],
        addresses,
        blocks,
        order,
        y,
        inner,
        width,
        PRMT=z.is_cuda,
        TOKENS=size,
        GROUPS=power_of_two(inner // 32),
        **config,
    )


def takes(dtype: torch.dtype, width: int, inner: int) -> bool:
    """Whether these kernels take experts of such widths and inputs of such a dtype."""
    return dtype is not torch.float32 and width % 128 == 0 and inner % 128 == 0
