"""RMSNorm of many rows on a GPU: each row is read once, several short rows per program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from birkhoff.kernels.gpu import power_of_two

TILE = 4096  # elements per program


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x, weight, out, rows, width, eps, WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    d = tl.arange(0, BLOCK)
    tile = (r < rows)[:, None] & (d < width)[None, :]
    at = r[:, None] * width + d[None, :]
    fp32 = tl.load(x + at, mask=tile, other=0.0).to(tl.float32)
    fp32 = fp32 * (1.0 / tl.sqrt(tl.sum(fp32 * fp32, axis=1) / width + eps))[:, None]
    if WEIGHT:
        fp32 = fp32 * tl.load(weight + d, mask=d < width, other=0.0)[None, :]
    tl.store(out + at, fp32.to(out.dtype.element_ty), mask=tile)


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
