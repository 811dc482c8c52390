"""Experts for the many rows of a prompt on a GPU: every expert's tokens in blocks, codes unpacked in registers.

`routing.py` says which tokens make a block. `_open` multiplies a block with gate and up, clamps, gates and weighs it;
`_close` takes it down and puts each pair's row in its own place, so that nobody adds to what another wrote: the sum
over a token's places has one order (`_gather`). Experts are found through the table of addresses that decoding uses
(`[E, 4]`).

Codes decode exactly to the dtype of x, sums are float32. Even and odd columns, which lie in the low and high halves of
a byte, are multiplied apart: inputs come with their even columns before their odd ones (`planes`). Rows of gate and up
make one tile, half of it each, so that a tile of inputs serves both.

Four warps a program leave room for two programs on a multiprocessor: while one unpacks, the other multiplies. Unpacking
is what a block of a hundred tokens cannot hide, so on GPUs that multiply pairs of bfloat16 eight codes are made of four
bytes by 24 instructions (`FOUR_BYTES`), where plain arithmetic takes twice as many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from birkhoff.kernels.experts import reference
from birkhoff.kernels.experts.decode import _e2m1, _step, _swiglu
from birkhoff.kernels.experts.reference import Stack
from birkhoff.kernels.experts.routing import plan
from birkhoff.kernels.gpu import power_of_two
from birkhoff.kernels.linear.decode import decode_e8m0

BLOCKS = (16, 32, 64, 128)  # tokens of a block

# Bytes 0 to 3 of $4, times scales $5 (bytes 0 and 1) and $6: low halves to $0 and $1, high halves to $2 and $3. A
# code's bits in the places of a bfloat16 are its value times 2^-126; that is undone before the scale comes, since one
# factor for both could be too large.
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
    """The block that an average expert's tokens fill, within what the kernels know."""
    return min(max(power_of_two(pairs // max(experts, 1), BLOCKS[0]), BLOCKS[0]), BLOCKS[-1])


@triton.jit
def _planes(x, out, half, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    both = tl.load(x + row * 2 * half + i, mask=i < 2 * half, other=0.0)
    even, odd = tl.split(tl.reshape(both, [BLOCK, 2]))
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + row * 2 * half + h, even, mask=h < half)
    tl.store(out + row * 2 * half + half + h, odd, mask=h < half)


def planes(x: torch.Tensor) -> torch.Tensor:
    """[n, d] with the even columns of a row before its odd ones."""
    x = x.contiguous()
    out, half = torch.empty_like(x), x.shape[1] // 2
    block = min(1024, power_of_two(half))
    if len(x):
        _planes[(len(x), -(-half // block))](x, out, half, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _unpacked(
    codes,
    scales,
    r,
    there,
    start,
    half,
    kept: tl.constexpr,
    PAIRED: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Rows r of a matrix, bytes start.. of each: even and odd columns, [ROWS, HALF] each."""
    GROUPS: tl.constexpr = HALF // 16  # a scale serves 32 columns, 16 of either kind
    h = start + tl.arange(0, HALF)
    g = start // 16 + tl.arange(0, GROUPS)
    wide = r.to(tl.int64)
    at = tl.multiple_of(codes + wide[:, None] * half + h[None, :], [1, 16])
    packed = tl.load(at, mask=there[:, None] & (h < half)[None, :], other=0)
    known = there[:, None] & (g < half // 16)[None, :]
    scale = decode_e8m0(tl.load(scales + wide[:, None] * (half // 16) + g[None, :], mask=known, other=127))
    if PAIRED:
        every = tl.reshape(
            tl.broadcast_to(scale.to(tl.bfloat16)[:, :, None], [ROWS, GROUPS, 16]), [ROWS, HALF]
        )
        return tl.inline_asm_elementwise(
            FOUR_BYTES,
            "=r,=r,=r,=r,r,r,r",
            [packed, every],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    packed = packed.to(tl.int32)
    even = tl.reshape(tl.reshape(_e2m1(packed & 15), [ROWS, GROUPS, 16]) * scale[:, :, None], [ROWS, HALF])
    odd = tl.reshape(tl.reshape(_e2m1(packed >> 4), [ROWS, GROUPS, 16]) * scale[:, :, None], [ROWS, HALF])
    return even.to(kept), odd.to(kept)


@triton.jit
def _open(
    x,
    table,
    blocks,
    order,
    weights,
    z,
    inner,
    width,
    places,
    limit,
    WIDE: tl.constexpr,
    PAIRED: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
):
    block = tl.program_id(1)
    count = tl.load(blocks + block * 4 + 2)
    if count > 0:
        expert = tl.load(blocks + block * 4)
        first = tl.load(blocks + block * 4 + 1)
        codes = tl.load(table + expert * 4).to(tl.pointer_type(tl.uint8))
        scales = tl.load(table + expert * 4 + 1).to(tl.pointer_type(tl.uint8))
        kept: tl.constexpr = x.dtype.element_ty
        half = width // 2
        # Rows of gate, then the same of up; of each even ones first: what is stored below lies side by side.
        SIDE: tl.constexpr = ROWS // 2
        i = tl.arange(0, ROWS)
        j = i % SIDE
        own = tl.program_id(0) * SIDE + 2 * (j % (SIDE // 2)) + j // (SIDE // 2)
        t = tl.arange(0, TOKENS)
        pair = tl.load(order + first + t, mask=t < count, other=0)
        row = (pair // places).to(tl.int64)
        total = tl.zeros([ROWS, TOKENS], tl.float32)
        for start in range(0, half, HALF):
            h = start + tl.arange(0, HALF)
            inside = (t < count)[None, :] & (h < half)[:, None]
            at = x + row[None, :] * width + h[:, None]
            x_even = tl.load(at, mask=inside, other=0.0)
            x_odd = tl.load(at + half, mask=inside, other=0.0)
            even, odd = _unpacked(
                codes, scales, own + (i // SIDE) * inner, own < inner, start, half, kept, PAIRED, ROWS, HALF
            )
            total = _step(total, even, odd, x_even, x_odd, WIDE)
        a, b = tl.split(tl.permute(tl.reshape(total, [2, SIDE, TOKENS]), (1, 2, 0)))
        a = tl.minimum(a, limit)
        b = tl.minimum(tl.maximum(b, -limit), limit)
        gain = tl.load(weights + pair, mask=t < count, other=0.0)
        out = a / (1.0 + tl.exp(-a)) * b * gain[None, :]
        k = tl.arange(0, SIDE)
        r = tl.program_id(0) * SIDE + 2 * (k % (SIDE // 2)) + k // (SIDE // 2)
        into = z + (first + t).to(tl.int64)[None, :] * inner + ((r % 2) * (inner // 2) + r // 2)[:, None]
        tl.store(into, out.to(z.dtype.element_ty), mask=(t < count)[None, :] & (r < inner)[:, None])


@triton.jit
def _close(
    z,
    table,
    blocks,
    order,
    y,
    inner,
    width,
    WIDE: tl.constexpr,
    PAIRED: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
):
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
            even, odd = _unpacked(codes, scales, r, r < width, start, half, kept, PAIRED, ROWS, HALF)
            total = _step(total, even, odd, z_even, z_odd, WIDE)
        into = y + pair[None, :] * width + r[:, None]
        tl.store(into, total.to(y.dtype.element_ty), mask=(t < count)[None, :] & (r < width)[:, None])


def shape_of(size: int, wide: bool, gated: bool) -> dict[str, int]:
    """Tiles for blocks of `size` tokens: weight rows and bytes of a row at a time, warps and stages."""
    if wide:
        return {"ROWS": 32, "HALF": 32, "num_warps": 4, "num_stages": 2}
    return {"ROWS": 128, "HALF": 64 if gated else 32, "num_warps": 4, "num_stages": 3 if gated else 4}


def paired(x: torch.Tensor) -> bool:
    """Whether codes become pairs of bfloat16 by instructions of their own, which NVIDIA GPUs have from 9.0 on."""
    if x.dtype is not torch.bfloat16 or not x.is_cuda or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(x.device) >= (9, 0)


def gate_up(
    x, table, blocks, order, weights, z, limit, size: int, shape: dict[str, int] | None = None
) -> None:
    """x [n, d] in planes -> z [pairs in their order, inner] in planes: gated, clamped, times the routing weight."""
    inner = z.shape[1]
    width = x.shape[1]
    wide = x.dtype is torch.float32
    shape = shape or shape_of(size, wide, gated=True)
    _open[(-(-2 * inner // shape["ROWS"]), len(blocks))](
        x,
        table,
        blocks,
        order,
        weights,
        z,
        inner,
        width,
        weights.shape[1],
        limit,
        WIDE=wide,
        PAIRED=paired(x),
        TOKENS=size,
        **shape,
    )


def down(z, table, blocks, order, y, size: int, shape: dict[str, int] | None = None) -> None:
    """z -> y [n * k, d], every pair in its place."""
    inner = z.shape[1]
    width = y.shape[1]
    wide = z.dtype is torch.float32
    shape = shape or shape_of(size, wide, gated=False)
    _close[(-(-width // shape["ROWS"]), len(blocks))](
        z, table, blocks, order, y, inner, width, WIDE=wide, PAIRED=paired(z), TOKENS=size, **shape
    )


@triton.jit
def _gather(y, beside, out, width, places, BESIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(places):
        total += tl.load(y + (row * places + place) * width + d, mask=d < width, other=0.0).to(tl.float32)
    if BESIDE:
        total += tl.load(beside + row * width + d, mask=d < width, other=0.0).to(tl.float32)
    tl.store(out + row * width + d, total.to(out.dtype.element_ty), mask=d < width)


def gather(y: torch.Tensor, places: int, beside: torch.Tensor | None) -> torch.Tensor:
    """y [n * places, d] -> [n, d] float32: rows of a token added up; with `beside` [n, d] that too, in its dtype."""
    width = y.shape[1]
    n = len(y) // places
    out = torch.empty(n, width, dtype=torch.float32 if beside is None else beside.dtype, device=y.device)
    block = min(1024, power_of_two(width))
    if n:
        _gather[(n, -(-width // block))](
            y,
            y if beside is None else beside.contiguous(),
            out,
            width,
            places,
            BESIDE=beside is not None,
            BLOCK=block,
            num_warps=4,
        )
    return out


def glu(opened: torch.Tensor, limit: float, dtype: torch.dtype) -> torch.Tensor:
    opened = opened.contiguous()
    n, inner = opened.shape[0], opened.shape[1] // 2
    z = torch.empty(n, inner, dtype=dtype, device=opened.device)
    block = min(1024, power_of_two(inner))
    if n:
        _swiglu[(n, -(-inner // block))](opened, z, inner, opened.stride(0), limit, BLOCK=block, num_warps=4)
    return z


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
    beside: torch.Tensor | None = None,
    size: int | None = None,
) -> torch.Tensor:
    """`size` are the tokens of a block, chosen by their number unless given."""
    if stack.turns is None or round_input is not None:
        return reference.experts(x, ids, weights, stack, limit, round_input, beside)
    count, places = ids.shape
    size = size or block_size(count * places, stack.count)
    order, blocks = plan(ids, stack.count, size)
    z = torch.empty(count * places, stack.inner, dtype=x.dtype, device=x.device)
    y = torch.empty(count * places, x.shape[1], dtype=x.dtype, device=x.device)
    entering, weights = planes(x), weights.contiguous()
    for ready, table in stack.turns():
        mine = blocks if ready is None else _of(blocks, ready, stack.count)
        gate_up(entering, table, mine, order, weights, z, limit, size)
        down(z, table, mine, order, y, size)
    return gather(y, places, beside)
