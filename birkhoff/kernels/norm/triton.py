"""RMSNorm on a GPU: each row is read once, several short rows to a program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from birkhoff.kernels.gpu import power_of_two

TILE = 4096  # numbers of a program


@triton.jit
def _rms_norm(
    x, weight, out, rows, width, eps, WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    d = tl.arange(0, BLOCK)
    tile = (r < rows)[:, None] & (d < width)[None, :]
    at = r[:, None] * width + d[None, :]
    wide = tl.load(x + at, mask=tile, other=0.0).to(tl.float32)
    wide = wide * (1.0 / tl.sqrt(tl.sum(wide * wide, axis=1) / width + eps))[:, None]
    if WEIGHT:
        wide = wide * tl.load(weight + d, mask=d < width, other=0.0)[None, :]
    tl.store(out + at, wide.to(out.dtype.element_ty), mask=tile)


@triton.jit
def _norm_into(
    u, weight, x, half, mixed, width, eps, HALF: tl.constexpr, MIXED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < width
    wide = tl.load(u + row * width + d, mask=inside, other=0.0).to(tl.float32)
    rho = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / width + eps)
    out = (wide * rho * tl.load(weight + d, mask=inside, other=0.0)).to(x.dtype.element_ty)
    tl.store(x + row * width + d, out, mask=inside)
    if HALF:
        tl.store(half + row * width + d, out.to(tl.float16), mask=inside)
    if MIXED:  # the order in which FP4 codes leave their 32-bit words: 0 2 4 6 1 3 5 7
        place = (d // 8) * 8 + (d % 8) // 2 + 4 * (d % 2)
        tl.store(mixed + row * width + place, out.to(tl.float16), mask=inside)


def norm_into(u, weight, eps: float, x, half=None, mixed=None) -> None:
    """u [n, d] -> x [n, d], and in the forms that the products of a decoding step read, where they are wanted."""
    n, width = u.shape
    _norm_into[(n,)](
        u,
        weight,
        x,
        x if half is None else half,
        x if mixed is None else mixed,
        width,
        eps,
        HALF=half is not None,
        MIXED=mixed is not None,
        BLOCK=power_of_two(width),
        num_warps=8 if width >= 2048 else 4,
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    x = x.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    count, block = x.numel() // width, power_of_two(width)
    rows = max(1, TILE // block)
    if count:
        _rms_norm[(-(-count // rows),)](
            x,
            x if weight is None else weight,
            out,
            count,
            width,
            eps,
            WEIGHT=weight is not None,
            ROWS=rows,
            BLOCK=block,
            num_warps=8 if block >= 2048 else 4,
        )
    return out
