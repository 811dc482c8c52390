"""RMSNorm of many rows on a GPU: each row is read once, several short rows per program.

`norm_input` also rounds the rows to FP8 codes where released numerics multiply codes. `norm_rotate` also rotates the
last channels of queries and keys and rounds keys, with the roundings of the separate operations in between.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from birkhoff.kernels.cuda.prompt_experts import input_order
from birkhoff.kernels.gpu import power_of_two
from birkhoff.kernels.norm.reference import KEY_GROUP
from birkhoff.kernels.quant.device import ORDERS, empty_codes, fp8_groups, rounds_to_codes, store_codes
from birkhoff.kernels.quant.rounded_rows import Input, RoundedRows
from birkhoff.kernels.rope.reference import Phases

TILE = 4096  # elements per program


@triton.jit
def _normalised(x, weight, r, valid, d, stride, heads, width, eps, WEIGHT: tl.constexpr, dtype: tl.constexpr):
    """Row r of x, which is head r % heads of the row at r // heads * stride, normalised and rounded: float32."""
    at = (r // heads * stride + r % heads * width)[:, None] + d[None, :]
    fp32 = tl.load(x + at, mask=valid[:, None] & (d < width)[None, :], other=0.0).to(tl.float32)
    fp32 = fp32 * (1.0 / tl.sqrt(tl.sum(fp32 * fp32, axis=1) / width + eps))[:, None]
    if WEIGHT:
        fp32 = fp32 * tl.load(weight + d, mask=d < width, other=0.0)[None, :]
    return fp32.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "scale_stride"])
def _rms_norm(
    x,
    weight,
    out,
    codes,
    ordered,
    scales,
    scale_stride,
    rows,
    width,
    stride,
    eps,
    WEIGHT: tl.constexpr,
    CODES: tl.constexpr,
    ORDER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    d = tl.arange(0, BLOCK)
    fp32 = _normalised(x, weight, r, r < rows, d, stride, 1, width, eps, WEIGHT, out.dtype.element_ty)
    tile = (r < rows)[:, None] & (d < width)[None, :]
    tl.store(out + r[:, None] * width + d[None, :], fp32.to(out.dtype.element_ty), mask=tile)
    if CODES:
        store_codes(fp32, r, r < rows, codes, ordered, scales, scale_stride, width, ORDER, ROWS, BLOCK)


def _row_stride(x: torch.Tensor) -> int | None:
    """The distance of rows [n, ..., width] whose inner axes are contiguous; None if they are not."""
    return x.stride(0) if x[:1].is_contiguous() else None


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return _norm(x, weight, eps, None)


def norm_input(
    x: torch.Tensor, weight: torch.Tensor, eps: float, released: bool, inner: int | None = None
) -> Input:
    if not released or x.dim() != 2 or not rounds_to_codes(x, x.shape[1]):
        return rms_norm(x, weight, eps)
    rounded = empty_rounded(x, x.shape[1], inner)
    _norm(x, weight, eps, rounded, inner)
    return rounded


def empty_rounded(x: torch.Tensor, width: int, inner: int | None) -> RoundedRows:
    """Memory for rows [n, width] like those of x and their codes; `inner` is that of the experts that read them."""
    rows = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
    codes, scales = empty_codes(len(x), width, x.device)
    return RoundedRows(rows, codes, scales, None if inner is None else torch.empty_like(codes))


def code_order(rounded: RoundedRows, inner: int | None) -> int:
    """The order of the codes for experts, as kernels take it."""
    return 0 if inner is None else ORDERS[input_order(rounded.rows, inner)]


def _norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    rounded: RoundedRows | None,
    inner: int | None = None,
) -> torch.Tensor:
    width = x.shape[-1]
    stride = x.stride(0) if x.dim() == 2 and x.stride(1) == 1 else width
    x = x if stride != width else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if rounded is None else rounded.rows
    count, block = x.numel() // width, power_of_two(width)
    rows = max(1, TILE // block)
    if count:
        _rms_norm[(-(-count // rows),)](
            x,
            x if weight is None else weight,
            out,
            out if rounded is None else rounded.codes,
            out if rounded is None or rounded.ordered is None else rounded.ordered,
            out if rounded is None else rounded.scales,
            0 if rounded is None else rounded.scales.stride(0),
            count,
            width,
            stride,
            eps,
            WEIGHT=weight is not None,
            CODES=rounded is not None,
            ORDER=0 if rounded is None else code_order(rounded, inner),
            ROWS=rows,
            BLOCK=block,
            num_warps=8 if block >= 2048 else 4,
        )
    return out


@triton.jit(do_not_specialize=["rows"])
def _norm_rotate(
    x,
    weight,
    cos,
    sin,
    out,
    rows,
    heads,
    stride,
    eps,
    WEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    KEEP: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    d = tl.arange(0, PADDED)
    dtype: tl.constexpr = out.dtype.element_ty
    fp32 = _normalised(x, weight, r, r < rows, d, stride, heads, WIDTH, eps, WEIGHT, dtype)
    even, odd = tl.split(tl.reshape(fp32, [ROWS, PADDED // 2, 2]))
    i = tl.arange(0, PADDED // 2) - (WIDTH - 2 * PAIRS) // 2
    rotated_pair = (r < rows)[:, None] & (i >= 0)[None, :] & (i < PAIRS)[None, :]
    angle = (r // heads)[:, None] * PAIRS + i[None, :]
    c = tl.load(cos + angle, mask=rotated_pair, other=1.0)
    s = tl.load(sin + angle, mask=rotated_pair, other=0.0)
    rotated = tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), [ROWS, PADDED])
    if KEEP >= 0:
        rotated = rotated.to(dtype).to(tl.float32)
        inside = (d < WIDTH - KEEP)[None, :]
        groups = tl.reshape(tl.where(inside, rotated, 0.0), [ROWS * (PADDED // GROUP), GROUP])
        rotated = tl.where(inside, tl.reshape(fp8_groups(groups), [ROWS, PADDED]), rotated)
    tile = (r < rows)[:, None] & (d < WIDTH)[None, :]
    tl.store(out + r[:, None] * WIDTH + d[None, :], rotated.to(dtype), mask=tile)


def norm_rotate(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, phases: Phases, keep: int | None = None
) -> torch.Tensor:
    width, pairs = x.shape[-1], phases.cos.shape[-1]
    stride = _row_stride(x)
    if stride is None:
        x = x.contiguous()
        stride = x.stride(0)
    count, positions = x.numel() // width, phases.cos.numel() // pairs
    heads, padded = count // max(positions, 1), power_of_two(width, 2)
    assert len(x) == positions or x.is_contiguous(), "one position for each row"
    stride = stride if len(x) == positions else heads * width
    out = x if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = max(1, 2048 // padded)
    if count:
        _norm_rotate[(-(-count // rows),)](
            x,
            x if weight is None else weight,
            phases.cos.contiguous(),
            phases.sin.contiguous(),
            out,
            count,
            heads,
            stride,
            eps,
            WEIGHT=weight is not None,
            WIDTH=width,
            PADDED=padded,
            PAIRS=pairs,
            KEEP=-1 if keep is None else keep,
            GROUP=min(KEY_GROUP, padded),
            ROWS=rows,
            num_warps=4,
        )
    return out
