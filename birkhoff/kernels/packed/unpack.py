"""Tiles of packed matrices decoded on a GPU, in Triton: the only part of those kernels that depends on the type.

`unpack(codes, scales, grid, r, valid, start, inner, TYPE, INNER)` returns columns `start .. start + INNER` of the rows
`r` as float32 [rows, INNER]; `start` and `INNER` are multiples of 32. Blocks are read where the file has them: a code
is one byte load and a bit field, and what several columns share (scales, indices of lattice points, signs) is loaded
once for them and spread. Columns behind `inner` and rows that are not `valid` are zero. `grid` is the table of a type
with one (`lookup_table`).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from birkhoff.kernels.packed.grids import grid
from birkhoff.kernels.packed.reference import IQ4_LEVELS


@cache
def lookup_table(name: str, device: torch.device) -> torch.Tensor | None:
    """The table that `unpack` takes for a type, uint8 on the device; None if it needs none."""
    if name == "IQ4_XS":
        return torch.tensor(IQ4_LEVELS, dtype=torch.int8, device=device).view(torch.uint8)
    if name in ("IQ2_XXS", "IQ2_XS", "IQ3_XXS"):
        return grid(name).flatten().to(device)
    return None


@triton.jit
def decode_e4m3(codes):
    """uint8 codes to float32: the bits shifted into float32 position are the value times 2^-120."""
    bits = codes.to(tl.int32)
    bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def decode_e8m0(codes):
    """uint8 scales to float32; 2^-127 (subnormal in float32) is not used by any checkpoint."""
    return (codes.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def decode_e2m1(codes):
    """Four-bit codes in an int32 to float32: the shifted bits are the value times 2^-126."""
    bits = ((codes & 8) << 28) | ((codes & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def row_bytes(inner, TYPE: tl.constexpr):
    """Bytes of a row of `inner` columns, without separate scales."""
    if TYPE == "F32":
        return inner * 4
    elif TYPE == "F16" or TYPE == "BF16":
        return inner * 2
    elif TYPE == "FP8":
        return inner
    elif TYPE == "FP4":
        return inner // 2
    elif TYPE == "Q8_0" or TYPE == "Q8_ROWS":
        return inner // 32 * 34
    elif TYPE == "MXFP4":
        return inner // 32 * 17
    elif TYPE == "Q2_K":
        return inner // 256 * 84
    elif TYPE == "Q3_K":
        return inner // 256 * 110
    elif TYPE == "Q4_K":
        return inner // 256 * 144
    elif TYPE == "Q5_K":
        return inner // 256 * 176
    elif TYPE == "Q6_K":
        return inner // 256 * 210
    elif TYPE == "IQ2_XXS":
        return inner // 256 * 66
    elif TYPE == "IQ2_XS":
        return inner // 256 * 74
    elif TYPE == "IQ3_XXS":
        return inner // 256 * 98
    else:
        tl.static_assert(TYPE == "IQ4_XS")
        return inner // 256 * 136


@triton.jit
def scale_bytes(rows, inner, TYPE: tl.constexpr):
    """Bytes of the separate scales of a matrix."""
    if TYPE == "FP8":
        return (rows + 127) // 128 * ((inner + 127) // 128)
    elif TYPE == "FP4":
        return rows * (inner // 32)
    else:
        return 0


@triton.jit
def _spread(x, ROWS: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Every column WIDTH times: [ROWS, COUNT] -> [ROWS, COUNT * WIDTH]."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], [ROWS, COUNT, WIDTH]), [ROWS, COUNT * WIDTH])


@triton.jit
def _byte(codes, at, mask):
    return tl.load(codes + at, mask=mask, other=0).to(tl.int32)


@triton.jit
def _word(codes, at, mask):
    """Two bytes as an unsigned number; `at` is even."""
    words = codes.to(tl.pointer_type(tl.uint16), bitcast=True)
    return tl.load(words + (at >> 1), mask=mask, other=0).to(tl.int32)


@triton.jit
def _half(codes, at, mask):
    """Two bytes as a float16 number, in float32; `at` is even."""
    halves = codes.to(tl.pointer_type(tl.float16), bitcast=True)
    return tl.load(halves + (at >> 1), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _with_parity(signs):
    """Seven sign bits and an eighth that makes their sum even."""
    parity = signs ^ (signs >> 4)
    parity ^= parity >> 2
    parity ^= parity >> 1
    return signs | ((parity & 1) << 7)


@triton.jit
def _float_tile(codes, row, k, tile, inner, TYPE: tl.constexpr):
    if TYPE == "F32":
        numbers = codes.to(tl.pointer_type(tl.float32), bitcast=True)
    elif TYPE == "F16":
        numbers = codes.to(tl.pointer_type(tl.float16), bitcast=True)
    else:
        numbers = codes.to(tl.pointer_type(tl.bfloat16), bitcast=True)
    return tl.load(numbers + row * inner + k[None, :], mask=tile, other=0.0).to(tl.float32)


@triton.jit
def _released_tile(
    codes, scales, r, row, valid, k, tile, start, inner, TYPE: tl.constexpr, INNER: tl.constexpr
):
    """FP8 and FP4: scales of 128 x 128 tiles, or of 32 columns of a row."""
    ROWS: tl.constexpr = r.shape[0]
    GROUPS: tl.constexpr = INNER // 32
    g = start // 32 + tl.arange(0, GROUPS)
    mask = valid[:, None] & (g * 32 < inner)[None, :]
    if TYPE == "FP8":
        value = decode_e4m3(tl.load(codes + row * inner + k[None, :], mask=tile, other=0))
        at = (r // 128)[:, None] * ((inner + 127) // 128) + (g // 4)[None, :]
    else:
        byte = _byte(codes, row * (inner // 2) + (k // 2)[None, :], tile)
        value = decode_e2m1((byte >> ((k % 2) * 4)[None, :]) & 15)
        at = row * (inner // 32) + g[None, :]
    factor = decode_e8m0(tl.load(scales + at, mask=mask, other=127))
    return value * _spread(factor, ROWS, GROUPS, 32)


@triton.jit
def _simple_tile(codes, row, valid, k, tile, start, inner, TYPE: tl.constexpr, INNER: tl.constexpr):
    """Q8_0, Q8_ROWS and MXFP4: one scale for 32 columns."""
    ROWS: tl.constexpr = valid.shape[0]
    GROUPS: tl.constexpr = INNER // 32
    g = start // 32 + tl.arange(0, GROUPS)
    mask = valid[:, None] & (g * 32 < inner)[None, :]
    row = row * row_bytes(inner, TYPE)
    l = k % 32
    if TYPE == "Q8_0":
        code = tl.load(codes + row + (k // 32 * 34 + 2 + l)[None, :], mask=tile, other=0)
        value = code.to(tl.int8, bitcast=True).to(tl.float32)
        factor = _half(codes, row + (g * 34)[None, :], mask)
    elif TYPE == "Q8_ROWS":
        at = k // 64 * 64 + l // 8 * 16 + k // 32 % 2 * 8 + l % 8
        value = (_byte(codes, row + at[None, :], tile) - 128).to(tl.float32)
        factor = _half(codes, row + inner + (g * 2)[None, :], mask)
    else:
        byte = _byte(codes, row + (k // 32 * 17 + 1 + l % 16)[None, :], tile)
        value = decode_e2m1((byte >> (l // 16 * 4)[None, :]) & 15)
        factor = decode_e8m0(tl.load(codes + row + (g * 17)[None, :], mask=mask, other=127))
    return value * _spread(factor, ROWS, GROUPS, 32)


@triton.jit
def _k_codes(codes, at, s, l, tile, TYPE: tl.constexpr):
    """The codes of a K type: `at` is the first byte of the block of a column, `s` its group of 32, `l` its place."""
    if TYPE == "Q2_K":
        byte = _byte(codes, at + (16 + s // 4 * 32 + l)[None, :], tile)
        return (byte >> (s % 4 * 2)[None, :]) & 3
    elif TYPE == "Q3_K":
        byte = _byte(codes, at + (32 + s // 4 * 32 + l)[None, :], tile)
        top = _byte(codes, at + l[None, :], tile)
        return ((byte >> (s % 4 * 2)[None, :]) & 3) + 4 * ((top >> s[None, :]) & 1) - 4
    elif TYPE == "Q4_K":
        byte = _byte(codes, at + (16 + s // 2 * 32 + l)[None, :], tile)
        return (byte >> (s % 2 * 4)[None, :]) & 15
    elif TYPE == "Q5_K":
        byte = _byte(codes, at + (48 + s // 2 * 32 + l)[None, :], tile)
        top = _byte(codes, at + (16 + l)[None, :], tile)
        return ((byte >> (s % 2 * 4)[None, :]) & 15) | (((top >> s[None, :]) & 1) << 4)
    else:
        tl.static_assert(TYPE == "Q6_K")
        q = s % 4
        low = _byte(codes, at + (s // 4 * 64 + q % 2 * 32 + l)[None, :], tile)
        top = _byte(codes, at + (128 + s // 4 * 32 + l)[None, :], tile)
        return (((low >> (q // 2 * 4)[None, :]) & 15) | (((top >> (q * 2)[None, :]) & 3) << 4)) - 32


@triton.jit
def _k_steps(codes, at, j, mask, TYPE: tl.constexpr):
    """Step and minimum of group j of a block: 16 columns, or 32 of Q4_K and Q5_K."""
    if TYPE == "Q2_K":
        scale = _byte(codes, at + j[None, :], mask)
        step = _half(codes, at + 80, mask) * (scale & 15).to(tl.float32)
        return step, _half(codes, at + 82, mask) * (scale >> 4).to(tl.float32)
    elif TYPE == "Q3_K":
        low = (_byte(codes, at + (96 + j % 8)[None, :], mask) >> (j // 8 * 4)[None, :]) & 15
        high = (_byte(codes, at + (104 + j % 4)[None, :], mask) >> (j // 4 * 2)[None, :]) & 3
        step = _half(codes, at + 108, mask) * ((low | (high << 4)) - 32).to(tl.float32)
        return step, step * 0.0
    elif TYPE == "Q6_K":
        scale = tl.load(codes + at + (192 + j)[None, :], mask=mask, other=0).to(tl.int8, bitcast=True)
        step = _half(codes, at + 208, mask) * scale.to(tl.float32)
        return step, step * 0.0
    else:
        tl.static_assert(TYPE == "Q4_K" or TYPE == "Q5_K")
        first = _byte(codes, at + (4 + j % 4)[None, :], mask)
        second = _byte(codes, at + (8 + j % 4)[None, :], mask)
        third = _byte(codes, at + (12 + j % 4)[None, :], mask)
        is_low = (j < 4)[None, :]
        scale = tl.where(is_low, first & 63, (third & 15) | ((first >> 2) & 48))
        least = tl.where(is_low, second & 63, (third >> 4) | ((second >> 2) & 48))
        step = _half(codes, at, mask) * scale.to(tl.float32)
        return step, _half(codes, at + 2, mask) * least.to(tl.float32)


@triton.jit
def _k_tile(codes, row, valid, k, tile, start, inner, TYPE: tl.constexpr, INNER: tl.constexpr):
    """Q2_K to Q6_K: blocks of 256 columns in groups with a step, some with a minimum."""
    ROWS: tl.constexpr = valid.shape[0]
    WIDTH: tl.constexpr = 32 if TYPE == "Q4_K" or TYPE == "Q5_K" else 16
    GROUPS: tl.constexpr = INNER // WIDTH
    BLOCK = row_bytes(256, TYPE)
    row = row * row_bytes(inner, TYPE)
    code = _k_codes(codes, row + (k // 256 * BLOCK)[None, :], k % 256 // 32, k % 32, tile, TYPE)
    g = start // WIDTH + tl.arange(0, GROUPS)
    mask = valid[:, None] & (g * WIDTH < inner)[None, :]
    at = row + (g // (256 // WIDTH) * BLOCK)[None, :]
    step, least = _k_steps(codes, at, g % (256 // WIDTH), mask, TYPE)
    value = code.to(tl.float32) * _spread(step, ROWS, GROUPS, WIDTH)
    if TYPE == "Q3_K" or TYPE == "Q6_K":
        return value
    return value - _spread(least, ROWS, GROUPS, WIDTH)


@triton.jit
def _lattice_steps(codes, at, within, mask, TYPE: tl.constexpr):
    """Of eight columns of an IQ2 or IQ3 block: the signs as eight bits, and the step."""
    j = within % 32 // 8
    if TYPE == "IQ2_XS":
        word = _word(codes, at + (2 + within // 4)[None, :], mask)
        scale = (
            _byte(codes, at + (66 + within // 32)[None, :], mask) >> (within // 16 % 2 * 4)[None, :]
        ) & 15
        signs = word >> 9
    else:
        FIRST: tl.constexpr = 6 if TYPE == "IQ2_XXS" else 66
        STRIDE: tl.constexpr = 8 if TYPE == "IQ2_XXS" else 4
        low = _word(codes, at + (FIRST + within // 32 * STRIDE)[None, :], mask)
        high = _word(codes, at + (FIRST + 2 + within // 32 * STRIDE)[None, :], mask)
        scale = high >> 12
        signs = ((low | (high << 16)) >> (7 * j)[None, :]) & 127
    FACTOR: tl.constexpr = 0.5 if TYPE == "IQ3_XXS" else 0.25
    step = _half(codes, at, mask) * (0.5 + scale.to(tl.float32)) * FACTOR
    return _with_parity(signs), step


@triton.jit
def _lattice_tile(codes, grid, row, valid, k, tile, start, inner, TYPE: tl.constexpr, INNER: tl.constexpr):
    """IQ2_XXS, IQ2_XS, IQ3_XXS: points of a lattice by index, signs by bits."""
    ROWS: tl.constexpr = valid.shape[0]
    GROUPS: tl.constexpr = INNER // 8
    BLOCK = row_bytes(256, TYPE)
    row = row * row_bytes(inner, TYPE)
    g = start // 8 + tl.arange(0, GROUPS)
    within = g % 32 * 8
    mask = valid[:, None] & (g * 8 < inner)[None, :]
    at = row + (g // 32 * BLOCK)[None, :]
    signs, step = _lattice_steps(codes, at, within, mask, TYPE)
    if TYPE == "IQ3_XXS":
        h = start // 4 + tl.arange(0, INNER // 4)
        place = row + (h // 64 * BLOCK + 2 + h % 64)[None, :]
        point = _byte(codes, place, valid[:, None] & (h * 4 < inner)[None, :])
        offset = _spread(point, ROWS, INNER // 4, 4) * 4 + (k % 4)[None, :]
    else:
        if TYPE == "IQ2_XXS":
            point = _byte(codes, at + (2 + within // 32 * 8 + within % 32 // 8)[None, :], mask)
        else:
            point = _word(codes, at + (2 + within // 4)[None, :], mask) & 511
        offset = _spread(point, ROWS, GROUPS, 8) * 8 + (k % 8)[None, :]
    size = tl.load(grid + offset, mask=tile, other=0).to(tl.float32)
    minus = (_spread(signs, ROWS, GROUPS, 8) >> (k % 8)[None, :]) & 1
    return tl.where(minus == 1, -size, size) * _spread(step, ROWS, GROUPS, 8)


@triton.jit
def _iq4_tile(codes, grid, row, valid, k, tile, start, inner, INNER: tl.constexpr):
    """IQ4_XS: sixteen levels, a six-bit scale for 32 columns."""
    ROWS: tl.constexpr = valid.shape[0]
    GROUPS: tl.constexpr = INNER // 32
    row = row * row_bytes(inner, "IQ4_XS")
    l = k % 32
    place = row + (k // 256 * 136 + 8 + k % 256 // 32 * 16 + l % 16)[None, :]
    code = (_byte(codes, place, tile) >> (l // 16 * 4)[None, :]) & 15
    level = tl.load(grid + code, mask=tile, other=0).to(tl.int8, bitcast=True).to(tl.float32)
    g = start // 32 + tl.arange(0, GROUPS)
    mask = valid[:, None] & (g * 32 < inner)[None, :]
    at = row + (g // 8 * 136)[None, :]
    s = g % 8
    high = (_word(codes, at + 2, mask) >> (s * 2)[None, :]) & 3
    low = (_byte(codes, at + (4 + s // 2)[None, :], mask) >> (s % 2 * 4)[None, :]) & 15
    step = _half(codes, at, mask) * ((low | (high << 4)) - 32).to(tl.float32)
    return level * _spread(step, ROWS, GROUPS, 32)


@triton.jit
def unpack(codes, scales, grid, r, valid, start, inner, TYPE: tl.constexpr, INNER: tl.constexpr):
    k = start + tl.arange(0, INNER)
    row = r.to(tl.int64)[:, None]
    tile = valid[:, None] & (k < inner)[None, :]
    if TYPE == "F32" or TYPE == "F16" or TYPE == "BF16":
        return _float_tile(codes, row, k, tile, inner, TYPE)
    elif TYPE == "FP8" or TYPE == "FP4":
        return _released_tile(codes, scales, r, row, valid, k, tile, start, inner, TYPE, INNER)
    elif TYPE == "Q8_0" or TYPE == "Q8_ROWS" or TYPE == "MXFP4":
        return _simple_tile(codes, row, valid, k, tile, start, inner, TYPE, INNER)
    elif TYPE == "IQ4_XS":
        return _iq4_tile(codes, grid, row, valid, k, tile, start, inner, INNER)
    elif TYPE == "IQ2_XXS" or TYPE == "IQ2_XS" or TYPE == "IQ3_XXS":
        return _lattice_tile(codes, grid, row, valid, k, tile, start, inner, TYPE, INNER)
    else:
        return _k_tile(codes, row, valid, k, tile, start, inner, TYPE, INNER)
