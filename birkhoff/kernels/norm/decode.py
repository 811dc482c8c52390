"""RMSNorm of a sublayer input of a decode step, in every form that the decode kernels read."""

from __future__ import annotations

import triton
import triton.language as tl

from birkhoff.kernels.gpu import power_of_two


@triton.jit
def _norm_into(
    u,
    weight,
    x,
    x_fp16,
    x_fp4_order,
    width,
    eps,
    FP16: tl.constexpr,
    FP4_ORDER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    in_range = d < width
    fp32 = tl.load(u + row * width + d, mask=in_range, other=0.0).to(tl.float32)
    rho = 1.0 / tl.sqrt(tl.sum(fp32 * fp32, axis=0) / width + eps)
    out = (fp32 * rho * tl.load(weight + d, mask=in_range, other=0.0)).to(x.dtype.element_ty)
    tl.store(x + row * width + d, out, mask=in_range)
    if FP16:
        tl.store(x_fp16 + row * width + d, out.to(tl.float16), mask=in_range)
    if FP4_ORDER:  # the order in which FP4 codes unpack from 32-bit words: 0 2 4 6 1 3 5 7
        permuted = (d // 8) * 8 + (d % 8) // 2 + 4 * (d % 2)
        tl.store(x_fp4_order + row * width + permuted, out.to(tl.float16), mask=in_range)


def norm_into(u, weight, eps: float, x, x_fp16=None, x_fp4_order=None) -> None:
    """u [n, d] -> x [n, d]; also in float16 and in FP4 order if those buffers are given."""
    n, width = u.shape
    _norm_into[(n,)](
        u,
        weight,
        x,
        x if x_fp16 is None else x_fp16,
        x if x_fp4_order is None else x_fp4_order,
        width,
        eps,
        FP16=x_fp16 is not None,
        FP4_ORDER=x_fp4_order is not None,
        BLOCK=power_of_two(width),
        num_warps=8 if width >= 2048 else 4,
    )
