"""Products of rounded inputs with FP8 weights on FP8 tensor cores, for the many rows of a prompt.

`rounded_linear` is the twin of the one in `reference.py`. Inputs are quantised once (`quant.device.quantise_fp8`); a
product multiplies codes with codes, 128 columns at a time, and adds each of these sums to a float32 total, multiplied
by the scale of the inputs (one per row and 128 columns) and of the weight (one per 128 rows and columns). 128 columns
are also as much as Hopper's FP8 instructions may sum by themselves without losing digits that matter.

Where cuBLAS has this product (Hopper), it is used: 850 to 1,080 TFLOP/s on an H200 for the large projections, where the
Triton kernel reaches 500 to 760. Few rows, float32 inputs, weights of other types or heights, and GPUs without FP8
instructions take the rounded inputs as numbers (`prefill.packed_linear`), with the same result up to the order of sums.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from birkhoff.kernels.gpu import power_of_two
from birkhoff.kernels.linear.packed import BLOCK, PackedWeight
from birkhoff.kernels.linear.prefill import packed_linear
from birkhoff.kernels.quant.device import ROW_MULTIPLE, fp8_round, quantise_fp8, rounds_to_codes
from birkhoff.kernels.quant.rounded_rows import Input, RoundedRows, rows_of

TILE_GROUP = 8  # token tiles that share a pass over the rows of a weight, so that both stay in L2


@triton.jit(do_not_specialize=["n", "token_tiles", "scale_stride"])
def _fp8_product(
    x,
    x_scale,
    scale_stride,
    weight,
    w_scale,
    out,
    n,
    rows,
    inner,
    row_tiles,
    token_tiles,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_GROUP: tl.constexpr,
):
    program = tl.program_id(0)
    group_index = program // (TILE_GROUP * row_tiles)
    group_tiles = tl.minimum(token_tiles - group_index * TILE_GROUP, TILE_GROUP)
    within = program % (TILE_GROUP * row_tiles)
    first = (within // group_tiles) * ROWS
    r = first + tl.arange(0, ROWS)
    t = (group_index * TILE_GROUP + within % group_tiles) * TOKENS + tl.arange(0, TOKENS)
    k = tl.arange(0, 128)
    in_range = (t < n)[:, None]
    at_x = x + t.to(tl.int64)[:, None] * inner + k[None, :]
    at_w = weight + r.to(tl.int64)[None, :] * inner + k[:, None]
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    for block in range(inner // 128):
        inputs = tl.load(at_x, mask=in_range, other=0.0)
        w = tl.load(at_w)
        factor = tl.load(x_scale + block * scale_stride + t, mask=t < n, other=0.0)
        factor *= tl.load(w_scale + (first // 128) * (inner // 128) + block)
        total += tl.dot(inputs, w) * factor[:, None]
        at_x += 128
        at_w += 128
    into = out + t.to(tl.int64)[:, None] * rows + r[None, :]
    tl.store(into, total.to(out.dtype.element_ty), mask=in_range)


def tile_config(n: int) -> dict[str, int]:
    """Tile sizes for n tokens; ROWS divides the 128 rows of a scale."""
    tokens = min(128, power_of_two(n, 16))
    return {"TOKENS": tokens, "ROWS": 128, "num_warps": 8 if tokens == 128 else 4, "num_stages": 3}


def fp8_product(
    codes: torch.Tensor, scales: torch.Tensor, weight: PackedWeight, dtype: torch.dtype
) -> torch.Tensor:
    """codes [n, in] in their natural order, scales [in / 128, n or more] -> [n, out]."""
    assert weight.tile_scale is not None
    n, inner = codes.shape
    out = torch.empty(n, weight.out, dtype=dtype, device=codes.device)
    config = tile_config(n)
    row_tiles, token_tiles = weight.out // config["ROWS"], -(-n // config["TOKENS"])
    _fp8_product[(row_tiles * token_tiles,)](
        codes,
        scales,
        scales.stride(0),
        weight.weight.view(torch.float8_e4m3fn),
        weight.tile_scale,
        out,
        n,
        weight.out,
        inner,
        row_tiles,
        token_tiles,
        TILE_GROUP=TILE_GROUP,
        **config,
    )
    return out


def vendor_product(
    codes: torch.Tensor, scales: torch.Tensor, weight: PackedWeight, dtype: torch.dtype
) -> torch.Tensor:
    """The same by cuBLAS, which has products with such scales on Hopper: a multiple of 16 rows, `dtype` bfloat16."""
    assert weight.tile_scale is not None
    return torch._scaled_mm(
        codes,
        weight.weight.view(torch.float8_e4m3fn).T,
        scale_a=scales.T,
        scale_b=weight.tile_scale.T,
        out_dtype=dtype,
    )


@cache
def _has_vendor_product(device: torch.device) -> bool:
    """Whether cuBLAS multiplies with scales per 128 columns, and per 128 rows and columns: tried once per device."""
    if (
        device.type != "cuda"
        or torch.version.cuda is None
        or torch.cuda.get_device_capability(device) != (9, 0)
    ):
        return False
    size = 4 * BLOCK
    codes = torch.ones(size, size, device=device).to(torch.float8_e4m3fn)
    scales = torch.ones(size // BLOCK, size, device=device)
    weight = PackedWeight(codes.view(torch.uint8), tile_scale=torch.ones(4, 4, device=device))
    try:
        y = vendor_product(codes, scales, weight, torch.bfloat16)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    return bool((y == size).all())


def rounded_linear(x: Input, weight: PackedWeight, dtype: torch.dtype | None = None) -> torch.Tensor:
    rows = rows_of(x)
    dtype = dtype or rows.dtype
    flat = rows.reshape(-1, rows.shape[-1])
    if weight.tile_scale is None or not rounds_to_codes(flat, weight.inner) or flat.stride(1) != 1:
        return packed_linear(fp8_round(rows, BLOCK), weight, None, dtype)
    vendor = dtype is torch.bfloat16 and weight.inner % (4 * BLOCK) == 0 and _has_vendor_product(flat.device)
    codes, scales = (
        (x.codes, x.scales) if isinstance(x, RoundedRows) else quantise_fp8(flat, multiple=ROW_MULTIPLE)
    )
    if vendor:
        y = vendor_product(codes, scales, weight, dtype)[: len(flat)]
    else:
        y = fp8_product(codes[: len(flat)], scales, weight, dtype)
    return y.view(*rows.shape[:-1], weight.out)
