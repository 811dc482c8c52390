"""Root-mean-square normalisation over the last axis.

`rms_norm(x, weight, eps) -> like x`: `weight * x * (mean(x^2) + eps)^-1/2`, computed in float32 and rounded once to the
dtype of `x`. `weight=None` omits the factor (V4's per-head query norm).
`norm_input(x [n, d], weight, eps, released, inner=None) -> [n, d] | RoundedRows`: `rms_norm` for products; on a GPU
with released numerics together with its FP8 codes, also in the order of experts of `inner` rows.
`norm_rotate(x, weight, eps, phases, keep=None) -> like x`: `rms_norm`, then the rotation of `rope`; with `keep`
(released numerics) then rounded to FP8 in groups of 64 columns, except the last `keep`. x may be overwritten.
`decode.norm_into(u, weight, eps, x, ...)`: the same into the input buffers of a decode step.

Tolerance of fast twins: 2e-6 relative to the largest value in float32, one rounding in 16 bits.
"""

from birkhoff.kernels.norm.reference import norm_input, norm_rotate, rms_norm

__all__ = ["norm_input", "norm_rotate", "rms_norm"]
