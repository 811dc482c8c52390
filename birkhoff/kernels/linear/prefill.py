"""The product of many rows with a weight kept as stored, on a GPU: sums in float32.

`packed_linear(x [n, in], rows, group=None, dtype=None) -> [n, out]` is the twin of the one in `reference.py`. From `MANY`
rows on, bfloat16 inputs are left to the vendor's product: FP8 codes are unpacked for as long as it takes (`unpack`;
bfloat16 holds them exactly), which is less than a tenth of the product's time for thousands of rows. For fewer rows and
other dtypes a kernel unpacks codes in registers. They meet inputs of 16 bits without their scales: E4M3 is exact in
float16 and bfloat16, and a scale holds for 128 columns of a row, so it multiplies the float32 sum of those columns.
Inputs in bfloat16 go through float16, where one instruction unpacks two codes: what enters an FP8 layer is normalised
or gated, so it stays far below 65,504, and float16 keeps three more bits of it. float32 inputs are multiplied as
float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from birkhoff.kernels.gpu import power_of_two
from birkhoff.kernels.linear.decode import decode_e4m3, decode_e8m0
from birkhoff.kernels.linear.packed import PackedWeight

MANY = 256  # rows from which unpacking a weight pays
TOGETHER = 8  # tiles of tokens that take turns over the rows of a weight, so that both stay in L2


@triton.jit
def _packed_linear(
    x,
    weight,
    scale,
    out,
    n,
    rows,
    inner,
    x_stride,
    out_stride,
    group,
    row_tiles,
    token_tiles,
    FP8: tl.constexpr,
    WIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    program = tl.program_id(0)
    lap = program // (TOGETHER * row_tiles)
    abreast = tl.minimum(token_tiles - lap * TOGETHER, TOGETHER)
    within = program % (TOGETHER * row_tiles)
    first = (within // abreast) * ROWS
    r = first + tl.arange(0, ROWS)
    t = (lap * TOGETHER + within % abreast) * TOKENS + tl.arange(0, TOKENS)
    x += (first // group).to(tl.int64) * inner
    kept: tl.constexpr = x.dtype.element_ty
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in range(0, inner, INNER):
        k = start + tl.arange(0, INNER)
        at = x + t.to(tl.int64)[None, :] * x_stride + k[:, None]
        entering = tl.load(at, mask=(t < n)[None, :] & (k < inner)[:, None], other=0.0)
        tile = (r < rows)[:, None] & (k < inner)[None, :]
        w = tl.load(weight + r.to(tl.int64)[:, None] * inner + k[None, :], mask=tile, other=0.0)
        if FP8:
            if kept == tl.float16:
                w = w.to(tl.float8e4nv, bitcast=True).to(tl.float16)
            else:
                w = decode_e4m3(w).to(kept)
            factor = decode_e8m0(tl.load(scale + (start // 128) * rows + r, mask=r < rows, other=127))
            if WIDE:
                total += tl.dot(w, entering, input_precision="ieee") * factor[:, None]
            else:
                total += tl.dot(w, entering) * factor[:, None]
        elif WIDE:
            total = tl.dot(w.to(tl.float32), entering.to(tl.float32), total, input_precision="ieee")
        else:
            total = tl.dot(w, entering, total)
    into = out + t.to(tl.int64)[None, :] * out_stride + r[:, None]
    tl.store(into, total.to(out.dtype.element_ty), mask=(t < n)[None, :] & (r < rows)[:, None])


@triton.jit
def _unpack(codes, scale, out, rows, inner, ROWS: tl.constexpr, INNER: tl.constexpr):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(1) * INNER
    k = start + tl.arange(0, INNER)
    tile = (r < rows)[:, None] & (k < inner)[None, :]
    at = r.to(tl.int64)[:, None] * inner + k[None, :]
    factor = decode_e8m0(tl.load(scale + (start // 128) * rows + r, mask=r < rows, other=127))
    value = decode_e4m3(tl.load(codes + at, mask=tile, other=0)) * factor[:, None]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=tile)


def unpack(rows: PackedWeight) -> torch.Tensor:
    """The numbers of FP8 rows [out, in] in bfloat16, which holds them exactly."""
    assert rows.scale is not None
    out = torch.empty(rows.weight.shape, dtype=torch.bfloat16, device=rows.weight.device)
    _unpack[(-(-rows.out // 64), -(-rows.inner // 128))](
        rows.weight, rows.scale, out, rows.out, rows.inner, ROWS=64, INNER=128, num_warps=4
    )
    return out


def shape_of(n: int, tall: int, wide: bool) -> dict[str, int]:
    """Tiles for n tokens and a weight (or a group of its rows) of `tall` rows; INNER divides a scale's 128 columns."""
    if wide:
        return {
            "TOKENS": min(32, power_of_two(n, 16)),
            "ROWS": min(64, power_of_two(tall, 16)),
            "INNER": 64,
            "num_warps": 4,
            "num_stages": 2,
        }
    tokens = min(128, power_of_two(n, 16))
    rows = min(128, power_of_two(tall, 16))
    return {
        "TOKENS": tokens,
        "ROWS": rows,
        "INNER": 128,
        "num_warps": 8 if tokens * rows > 8192 else 4,
        "num_stages": 3,
    }


def packed_linear(
    x: torch.Tensor,
    rows: PackedWeight,
    group: int | None = None,
    dtype: torch.dtype | None = None,
    shape: dict[str, int] | None = None,
) -> torch.Tensor:
    dtype = dtype or x.dtype
    flat = x.reshape(-1, x.shape[-1])
    coded = rows.scale is not None
    if shape is None and len(flat) >= MANY and flat.dtype is torch.bfloat16 and (coded or _short(rows)):
        return _at_once(flat, unpack(rows) if coded else rows.weight, group, dtype).view(
            *x.shape[:-1], rows.out
        )
    wide = flat.dtype is torch.float32 or rows.weight.dtype is torch.float32
    if not wide and coded and flat.dtype is torch.bfloat16:
        flat = flat.half()
    elif not wide and not coded and flat.dtype is not rows.weight.dtype:
        wide = True
    n = len(flat)
    out = torch.empty(n, rows.out, dtype=dtype, device=x.device)
    shape = shape or shape_of(n, group or rows.out, wide)
    assert group is None or group % shape["ROWS"] == 0, f"groups of {group} rows"
    row_tiles = -(-rows.out // shape["ROWS"])
    token_tiles = -(-n // shape["TOKENS"])
    if n:
        _packed_linear[(row_tiles * token_tiles,)](
            flat,
            rows.weight,
            rows.weight if rows.scale is None else rows.scale,
            out,
            n,
            rows.out,
            rows.inner,
            flat.stride(0),
            out.stride(0),
            group or rows.out,
            row_tiles,
            token_tiles,
            FP8=coded,
            WIDE=wide,
            TOGETHER=TOGETHER,
            **shape,
        )
    return out.view(*x.shape[:-1], rows.out)


def _short(rows: PackedWeight) -> bool:
    return rows.weight.dtype is torch.bfloat16


def _at_once(x: torch.Tensor, weight: torch.Tensor, group: int | None, dtype: torch.dtype) -> torch.Tensor:
    """x [n, groups * in] with numbers [out, in] -> [n, out], both in bfloat16."""
    if group is None:
        if dtype is x.dtype:
            return torch.nn.functional.linear(x, weight)
        if x.is_cuda:
            return torch.mm(x, weight.T, out_dtype=dtype)
        return torch.mm(x.to(dtype), weight.T.to(dtype))  # other devices have no product with longer results
    groups = len(weight) // group
    out = torch.empty(len(x), groups, group, dtype=x.dtype, device=x.device)
    parts = weight.view(groups, group, -1).transpose(1, 2)
    torch.bmm(x.view(len(x), groups, -1).transpose(0, 1), parts, out=out.transpose(0, 1))
    return out.flatten(1).to(dtype)
