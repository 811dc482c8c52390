"""A matrix product with a weight stored `[out, in]`.

`linear(x [..., in], weight [out, in]) -> [..., out]`, both in one dtype, float32 accumulation.
`cpu` hands large products to oneDNN, which reads a weight with all cores even for a single row, where the BLAS that
PyTorch links uses one. Tolerance: 1e-5 relative to the product's own scale in float32.
"""

from birkhoff.kernels.linear.reference import linear

__all__ = ["linear"]
