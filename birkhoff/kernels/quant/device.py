"""Rounding of activations on a GPU, as the released numerics do it: one launch each, with the bits of the plain twins.

    fp8_round(x, group, keep=0)    twin of `reference.fp8_round`
    round_input(x, out, dtype)     the same in groups of 128 to another tensor, or in place
    hadamard_fp4(x)                `fp4_round(hadamard(x))`; sums in another order than the plain twin, so that a value
                                   next to a tie may differ by one step
    quantise_fp8(x, order)         E4M3 codes [n, width] and their scales [width / 128, n], for products on FP8 tensor
                                   cores; `order` is the order of the columns within each 128 (`ORDERS`)

Rounding uses integer arithmetic on float32 bits, so it needs no FP8 hardware.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from birkhoff.kernels.gpu import interpreted, power_of_two
from birkhoff.kernels.quant.rounded_rows import Order

GROUP = 128  # columns that share a scale
MIN_ROWS = 64  # rows from which the FP8 product is faster than decoding weights in registers
ROW_MULTIPLE = 16  # cuBLAS takes multiples of this many rows
ORDERS: dict[Order, int] = {
    "natural": 0,
    # Triton kernels decode eight FP4 codes at a time, the first four to one tile and the others to a second one.
    "halves": 1,
    # CUDA kernels decode the operands of matrix instructions in registers: a thread has one scale group of 32 columns.
    "fragments": 2,
}


@triton.jit
def round_e4m3(v):
    """The nearest E4M3 value (ties to even) of float32 |v| <= 448."""
    bits = v.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    subnormal = (v + 24576.0) - 24576.0  # float32 has a step of 2^-9 there
    return tl.where(tl.abs(v) < 0.015625, subnormal, bits.to(tl.float32, bitcast=True))


@triton.jit
def round_e2m1(v):
    """The nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 (ties to even codes) of float32 |v| <= 6."""
    magnitude = tl.abs(v)
    inverse = tl.where(magnitude < 2.0, 2.0, tl.where(magnitude < 4.0, 1.0, 0.5))
    step = tl.where(magnitude < 2.0, 0.5, tl.where(magnitude < 4.0, 1.0, 2.0))
    return ((v * inverse + 12582912.0) - 12582912.0) * step


@triton.jit
def power(exponent):
    """2^exponent as float32, for exponents -126..127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponent_e4m3(amax):
    """ceil(log2(amax / 448)) of the largest magnitude of a group."""
    bits = tl.maximum(amax, 1e-4).to(tl.int32, bitcast=True)
    return (bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)


@triton.jit
def exponent_e2m1(amax):
    """ceil(log2(amax / 6)) of the largest magnitude of a group."""
    bits = tl.maximum(amax, 7.052966104933725e-38).to(tl.int32, bitcast=True)  # 6 * 2^-126
    return (bits >> 23) - 129 + ((bits & 0x7FFFFF) > 0x400000).to(tl.int32)


@triton.jit
def fp8_groups(v):
    """Round float32 [groups, columns] to E4M3 times a power of two per group."""
    exponent = exponent_e4m3(tl.max(tl.abs(v), axis=1))
    return round_e4m3(v * power(-exponent)[:, None]) * power(exponent)[:, None]


@triton.jit
def fp4_groups(v):
    """Round float32 [groups, columns] to E2M1 times a power of two per group."""
    exponent = exponent_e2m1(tl.max(tl.abs(v), axis=1))
    return round_e2m1(v * power(-exponent)[:, None]) * power(exponent)[:, None]


@triton.jit
def round_key(v, WIDTH: tl.constexpr, KEEP: tl.constexpr):
    """A float32 key [WIDTH] with all but its last KEEP channels rounded in groups of 64."""
    if KEEP >= WIDTH:
        return v
    GROUPS: tl.constexpr = (WIDTH + 63) // 64
    SIZE: tl.constexpr = WIDTH // GROUPS
    c = tl.reshape(tl.arange(0, WIDTH), [GROUPS, SIZE])
    grouped = tl.reshape(v, [GROUPS, SIZE])
    rounded = fp8_groups(tl.where(c < WIDTH - KEEP, grouped, 0.0))
    return tl.reshape(tl.where(c < WIDTH - KEEP, rounded, grouped), [WIDTH])


@triton.jit
def round_index(v, WIDTH: tl.constexpr, dtype: tl.constexpr):
    """A float32 row [WIDTH] after the Hadamard transform, rounded to `dtype`, then to FP4 in groups of 32."""
    i = tl.arange(0, WIDTH)
    matrix = hadamard_signs(i[:, None] & i[None, :])
    y = tl.sum(matrix * v[None, :], axis=1) * (WIDTH**-0.5)
    y = y.to(dtype).to(tl.float32)
    SIZE: tl.constexpr = 32 if WIDTH >= 32 else WIDTH
    return tl.reshape(fp4_groups(tl.reshape(y, [WIDTH // SIZE, SIZE])), [WIDTH])


@triton.jit
def hadamard_signs(both):
    """Entries of the Walsh-Hadamard matrix by the common bits of row and column: +1 or -1, float32."""
    both ^= both >> 8
    both ^= both >> 4
    both ^= both >> 2
    both ^= both >> 1
    return 1.0 - 2.0 * (both & 1).to(tl.float32)


@triton.jit(do_not_specialize=["items"])
def _fp8_round(
    x, out, items, groups, width, rounded, dtype: tl.constexpr, GROUP: tl.constexpr, ITEMS: tl.constexpr
):
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    column = (item % groups)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    at = (item // groups).to(tl.int64)[:, None] * width + column
    tile = (item < items)[:, None] & (column < width)
    v = tl.load(x + at, mask=tile, other=0.0).to(dtype).to(tl.float32)
    inside = column < rounded
    v = tl.where(inside, fp8_groups(tl.where(inside, v, 0.0)), v)
    tl.store(out + at, v.to(out.dtype.element_ty), mask=tile)


def fp8_round(x: torch.Tensor, group: int, keep: int = 0) -> torch.Tensor:
    x = x.contiguous()
    width = x.shape[-1]
    if keep >= width or not x.numel():
        return x
    assert group == power_of_two(group), f"groups of {group}"
    out = torch.empty_like(x)
    _launch_rounding(x, out, x.dtype, group, keep)
    return out


def round_input(x: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> None:
    """Write the rows of x, rounded to `dtype` and then to FP8 in groups of 128, to `out`, which may be x: the input of
    FP8 and FP4 products of a decode step. Columns may be in any order within a group."""
    assert x.is_contiguous() and out.is_contiguous() and x.shape == out.shape
    _launch_rounding(x, out, dtype, GROUP, 0)


_TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def _launch_rounding(x: torch.Tensor, out: torch.Tensor, dtype: torch.dtype, group: int, keep: int) -> None:
    width = x.shape[-1]
    groups = -(-width // group)
    items = x.numel() // width * groups
    per_program = max(1, (2048 if items > 4096 else 512) // group)
    _fp8_round[(-(-items // per_program),)](
        x,
        out,
        items,
        groups,
        width,
        width - keep,
        dtype=_TRITON_DTYPES[dtype],
        GROUP=group,
        ITEMS=per_program,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["rows"])
def _hadamard_fp4(x, out, rows, WIDTH: tl.constexpr, FP32: tl.constexpr, ROWS: tl.constexpr):
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    i = tl.arange(0, WIDTH)
    at = r[:, None] * WIDTH + i[None, :]
    v = tl.load(x + at, mask=(r < rows)[:, None], other=0.0)
    matrix = hadamard_signs(i[:, None] & i[None, :])
    if FP32:
        y = tl.dot(v, matrix, input_precision="ieee")
    else:
        y = tl.dot(v, matrix.to(v.dtype))
    y = (y * (WIDTH**-0.5)).to(v.dtype).to(tl.float32)
    SIZE: tl.constexpr = 32 if WIDTH >= 32 else WIDTH
    y = tl.reshape(fp4_groups(tl.reshape(y, [ROWS * (WIDTH // SIZE), SIZE])), [ROWS, WIDTH])
    tl.store(out + at, y.to(out.dtype.element_ty), mask=(r < rows)[:, None])


def hadamard_fp4(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    assert width == power_of_two(width, 16), f"a Hadamard transform of {width} columns"
    rows = x.numel() // width
    if rows:
        _hadamard_fp4[(-(-rows // 64),)](
            x, out, rows, WIDTH=width, FP32=x.dtype is torch.float32, ROWS=64, num_warps=4
        )
    return out


@triton.jit
def _place(c, ORDER: tl.constexpr):
    """Where column c of 128 is stored in an order of `ORDERS`."""
    if ORDER == 1:
        c = ((c // 4) % 2) * 64 + (c // 8) * 4 + c % 4
    elif ORDER == 2:
        c = ((c // 8) % 4) * 32 + ((c // 4) % 2) * 16 + (c // 32) * 4 + c % 4
    return c


@triton.jit(do_not_specialize=["rows", "scale_stride"])
def _quantise(x, codes, scales, rows, scale_stride, width, x_stride, ORDER: tl.constexpr, ROWS: tl.constexpr):
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    block = tl.program_id(1)
    c = tl.arange(0, 128)
    inside = (r < rows)[:, None] & (block * 128 + c < width)[None, :]
    v = tl.load(x + r[:, None] * x_stride + (block * 128 + c)[None, :], mask=inside, other=0.0).to(tl.float32)
    exponent = exponent_e4m3(tl.max(tl.abs(v), axis=1))
    code = round_e4m3(v * power(-exponent)[:, None]).to(tl.float8e4nv)
    tl.store(codes + r[:, None] * width + (block * 128 + _place(c, ORDER))[None, :], code, mask=inside)
    tl.store(scales + block * scale_stride + r, power(exponent), mask=r < rows)


@triton.jit
def store_codes(
    v,
    r,
    valid,
    codes,
    ordered,
    scales,
    scale_stride,
    width,
    ORDER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the codes and scales of rows r, float32 [ROWS, BLOCK]; with an ORDER also the codes in that order."""
    GROUPS: tl.constexpr = BLOCK // 128
    grouped = tl.reshape(v, [ROWS * GROUPS, 128])
    exponent = exponent_e4m3(tl.max(tl.abs(grouped), axis=1))
    code = round_e4m3(grouped * power(-exponent)[:, None]).to(tl.float8e4nv)
    g = tl.arange(0, ROWS * GROUPS)
    row = tl.reshape(tl.broadcast_to(r[:, None], [ROWS, GROUPS]), [ROWS * GROUPS])
    inside = tl.reshape(tl.broadcast_to(valid[:, None], [ROWS, GROUPS]), [ROWS * GROUPS])
    g = g % GROUPS
    inside = inside & (g * 128 < width)
    c = tl.arange(0, 128)
    at = row * width + g * 128
    tl.store(codes + at[:, None] + c[None, :], code, mask=inside[:, None])
    if ORDER > 0:
        tl.store(ordered + at[:, None] + _place(c, ORDER)[None, :], code, mask=inside[:, None])
    tl.store(scales + g * scale_stride + row, power(exponent), mask=inside)


def empty_codes(rows: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the codes and scales of rows, whose number is rounded up to what products take."""
    padded = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
    codes = torch.empty(padded, width, dtype=torch.float8_e4m3fn, device=device)
    return codes, torch.empty(width // GROUP, padded, dtype=torch.float32, device=device)


def rounds_to_codes(x: torch.Tensor, width: int) -> bool:
    """Whether rows of `width` columns, made where x is, are multiplied as codes: enough rows of 16 bits, on a GPU with
    FP8 products."""
    return x.dtype is not torch.float32 and len(x) >= MIN_ROWS and width % GROUP == 0 and has_fp8(x)


def has_fp8(x: torch.Tensor) -> bool:
    """Whether FP8 products run where x is: on NVIDIA GPUs of compute capability 8.9 and higher."""
    if not x.is_cuda:
        return interpreted()
    return torch.version.cuda is not None and torch.cuda.get_device_capability(x.device) >= (8, 9)


def quantise_fp8(
    x: torch.Tensor, order: Order = "natural", multiple: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, width], rows at any distance -> codes [m, width], scales [ceil(width / 128), m] float32, where m is n
    rounded up to a `multiple`; rows from n on are not written. The value of a column is its code times the scale of
    its 128 columns; other orders than the natural one need whole groups."""
    n, width = x.shape
    assert x.stride(1) == 1 and (order == "natural" or width % GROUP == 0)
    blocks, rows = -(-width // GROUP), -(-n // multiple) * multiple
    codes = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(blocks, rows, dtype=torch.float32, device=x.device)
    if n:
        _quantise[(-(-n // 16), blocks)](
            x, codes, scales, n, rows, width, x.stride(0), ORDER=ORDERS[order], ROWS=16, num_warps=4
        )
    return codes, scales
