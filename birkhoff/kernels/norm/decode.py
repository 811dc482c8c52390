"""RMSNorm of a sublayer input of a decode step, in every form that the decode kernels read."""

from __future__ import annotations

import triton
import triton.language as tl

from birkhoff.kernels.gpu import power_of_two


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
