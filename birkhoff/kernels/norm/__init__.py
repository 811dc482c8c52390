"""Root-mean-square normalisation over the last axis.

`rms_norm(x, weight, eps) -> like x`: `weight * x * (mean(x^2) + eps)^-1/2`, evaluated in float32 and rounded once to
the dtype of `x`. `weight=None` leaves the factor out (V4's per-head query norm).
"""

from birkhoff.kernels.norm.reference import rms_norm

__all__ = ["rms_norm"]
