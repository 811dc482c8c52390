"""Root-mean-square normalisation over the last axis.

`rms_norm(x, weight, eps) -> like x`: `weight * x * (mean(x^2) + eps)^-1/2`, computed in float32 and rounded once to the
dtype of `x`. `weight=None` omits the factor (V4's per-head query norm).
`decode.norm_into(u, weight, eps, x, ...)`: the same into the input buffers of a decode step.

Tolerance of fast twins: 2e-6 relative to the largest value in float32, one rounding in 16 bits.
"""

from birkhoff.kernels.norm.reference import rms_norm

__all__ = ["rms_norm"]
