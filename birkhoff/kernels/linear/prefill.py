"""Products of the many rows of a prompt with a packed weight on a GPU, accumulated in float32.

`packed_linear` is the twin of the one in `reference.py`. From `UNPACK_ROWS` rows on, bfloat16 inputs use the vendor's
GEMM with temporarily dequantised weights (`dequantise`; bfloat16 holds the values exactly), which adds less than a
tenth to the time of the product for thousands of rows. For fewer rows and other dtypes a kernel decodes the codes in
registers and multiplies them with 16-bit inputs before applying the scales: E4M3 is exact in float16 and bfloat16,
and a scale covers 128 columns of a row, so it multiplies the float32 sum over those columns. bfloat16 inputs are
converted to float16, where one instruction decodes two codes: the inputs of FP8 layers are normalised or gated, hence
far below 65,504, and float16 keeps three more bits of them. float32 inputs are multiplied in float32. Codes of ggml's
types are decoded to the dtype of the inputs, which rounds them as dequantised weights of that dtype are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from birkhoff.kernels.gpu import HOPPER_SHARED, interpreted, power_of_two, shared_memory
from birkhoff.kernels.linear.packed import PackedWeight
from birkhoff.kernels.packed.unpack import decode_e4m3, decode_e8m0, lookup_table, unpack

UNPACK_ROWS = 256  # rows from which dequantising the weight first is faster
TILE_GROUP = 8  # token tiles that share a pass over the rows of a weight, so that both stay in L2


@triton.jit(do_not_specialize=["n", "token_tiles"])
def _packed_linear(
    x,
    weight,
    scale,
    grid,
    out,
    n,
    rows,
    inner,
    x_stride,
    out_stride,
    group,
    row_tiles,
    token_tiles,
    TYPE: tl.constexpr,
    FP32: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    TILE_GROUP: tl.constexpr,
):
    program = tl.program_id(0)
    group_index = program // (TILE_GROUP * row_tiles)
    group_tiles = tl.minimum(token_tiles - group_index * TILE_GROUP, TILE_GROUP)
    within = program % (TILE_GROUP * row_tiles)
    first = (within // group_tiles) * ROWS
    r = first + tl.arange(0, ROWS)
    t = (group_index * TILE_GROUP + within % group_tiles) * TOKENS + tl.arange(0, TOKENS)
    x += (first // group).to(tl.int64) * inner
    input_type: tl.constexpr = x.dtype.element_ty
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in range(0, inner, INNER):
        k = start + tl.arange(0, INNER)
        at = x + t.to(tl.int64)[None, :] * x_stride + k[:, None]
        inputs = tl.load(at, mask=(t < n)[None, :] & (k < inner)[:, None], other=0.0)
        if TYPE == "numbers" or TYPE == "rows of FP8":
            tile = (r < rows)[:, None] & (k < inner)[None, :]
            w = tl.load(weight + r.to(tl.int64)[:, None] * inner + k[None, :], mask=tile, other=0.0)
        else:
            w = unpack(weight, scale, grid, r, r < rows, start, inner, TYPE, INNER).to(input_type)
        if TYPE == "rows of FP8":
            if input_type == tl.float16:
                w = w.to(tl.float8e4nv, bitcast=True).to(tl.float16)
            else:
                w = decode_e4m3(w).to(input_type)
            factor = decode_e8m0(tl.load(scale + (start // 128) * rows + r, mask=r < rows, other=127))
            if FP32:
                total += tl.dot(w, inputs, input_precision="ieee") * factor[:, None]
            else:
                total += tl.dot(w, inputs) * factor[:, None]
        elif FP32:
            total = tl.dot(w.to(tl.float32), inputs.to(tl.float32), total, input_precision="ieee")
        else:
            total = tl.dot(w, inputs, total)
    into = out + t.to(tl.int64)[None, :] * out_stride + r[:, None]
    tl.store(into, total.to(out.dtype.element_ty), mask=(t < n)[None, :] & (r < rows)[:, None])


@triton.jit
def _dequantise(
    codes, scale, grid, out, rows, inner, TYPE: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr
):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(1) * INNER
    k = start + tl.arange(0, INNER)
    tile = (r < rows)[:, None] & (k < inner)[None, :]
    at = r.to(tl.int64)[:, None] * inner + k[None, :]
    if TYPE == "rows of FP8":
        factor = decode_e8m0(tl.load(scale + (start // 128) * rows + r, mask=r < rows, other=127))
        value = decode_e4m3(tl.load(codes + at, mask=tile, other=0)) * factor[:, None]
    else:
        value = unpack(codes, scale, grid, r, r < rows, start, inner, TYPE, INNER)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=tile)


def dequantise(weight: PackedWeight, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A weight of codes as numbers [out, in]; bfloat16 holds the values of FP8 and FP4 exactly."""
    out = torch.empty(weight.out, weight.inner, dtype=dtype, device=weight.weight.device)
    codes = weight.weight
    table = None if weight.type is None else lookup_table(weight.type.name, codes.device)
    _dequantise[(-(-weight.out // 64), -(-weight.inner // 128))](
        codes,
        codes if weight.scale is None else weight.scale,
        codes if table is None else table,
        out,
        weight.out,
        weight.inner,
        TYPE=weight.kernel_type,
        ROWS=64,
        INNER=128,
        num_warps=4,
    )
    return out


def tile_config(n: int, height: int, fp32: bool, shared: int = HOPPER_SHARED) -> dict[str, int]:
    """Tile sizes for n tokens and a weight (or a group) of `height` rows; INNER divides the 128 columns of a scale."""
    if fp32:
        return {
            "TOKENS": min(32, power_of_two(n, 16)),
            "ROWS": min(256 if interpreted() else 64, power_of_two(height, 16)),
            "INNER": 128 if interpreted() else 64,
            "num_warps": 4,
            "num_stages": 2,
        }
    tokens = min(128, power_of_two(n, 16))
    rows = min(128, power_of_two(height, 16))
    return {
        "TOKENS": tokens,
        "ROWS": rows,
        "INNER": 128,
        "num_warps": 8 if tokens * rows > 8192 else 4,
        "num_stages": 3 if shared >= 100_000 else 2,
    }


def packed_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    group: int | None = None,
    dtype: torch.dtype | None = None,
    config: dict[str, int] | None = None,
) -> torch.Tensor:
    dtype = dtype or x.dtype
    flat = x.reshape(-1, x.shape[-1])
    packed = weight.is_codes
    if (
        config is None
        and len(flat) >= UNPACK_ROWS
        and flat.dtype is torch.bfloat16
        and (packed or _is_bf16(weight))
    ):
        return _dense_matmul(flat, dequantise(weight) if packed else weight.weight, group, dtype).view(
            *x.shape[:-1], weight.out
        )
    fp32 = flat.dtype is torch.float32 or weight.weight.dtype is torch.float32
    if not fp32 and weight.is_fp8 and flat.dtype is torch.bfloat16:
        flat = flat.half()
    elif not fp32 and not packed and flat.dtype is not weight.weight.dtype:
        fp32 = True
    n = len(flat)
    out = torch.empty(n, weight.out, dtype=dtype, device=x.device)
    config = config or tile_config(n, group or weight.out, fp32, shared_memory(x.device))
    assert group is None or group % config["ROWS"] == 0, f"groups of {group} rows"
    row_tiles = -(-weight.out // config["ROWS"])
    token_tiles = -(-n // config["TOKENS"])
    table = None if weight.type is None else lookup_table(weight.type.name, x.device)
    if n:
        _packed_linear[(row_tiles * token_tiles,)](
            flat,
            weight.weight,
            weight.weight if weight.scale is None else weight.scale,
            weight.weight if table is None else table,
            out,
            n,
            weight.out,
            weight.inner,
            flat.stride(0),
            out.stride(0),
            group or weight.out,
            row_tiles,
            token_tiles,
            TYPE=weight.kernel_type,
            FP32=fp32,
            TILE_GROUP=TILE_GROUP,
            **config,
        )
    return out.view(*x.shape[:-1], weight.out)


def _is_bf16(weight: PackedWeight) -> bool:
    return weight.weight.dtype is torch.bfloat16


def _dense_matmul(
    x: torch.Tensor, weight: torch.Tensor, group: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """x [n, groups * in] times weight [out, in] -> [n, out]; both in bfloat16."""
    if group is None:
        if dtype is x.dtype:
            return torch.nn.functional.linear(x, weight)
        if x.is_cuda:
            return torch.mm(x, weight.T, out_dtype=dtype)
        return torch.mm(x.to(dtype), weight.T.to(dtype))  # only CUDA has a product with a wider result
    groups = len(weight) // group
    out = torch.empty(len(x), groups, group, dtype=x.dtype, device=x.device)
    grouped = weight.view(groups, group, -1).transpose(1, 2)
    torch.bmm(x.view(len(x), groups, -1).transpose(0, 1), grouped, out=out.transpose(0, 1))
    return out.flatten(1).to(dtype)
