"""A matrix product with a weight stored `[out, in]`.

`linear(x [..., in], weight [out, in]) -> [..., out]`, both in one dtype, float32 accumulation.
Tolerance of any fast twin: 1e-5 relative to the product's own scale in float32.
"""

from birkhoff.kernels.linear.reference import linear

__all__ = ["linear"]
