"""Matrix products with a weight stored `[out, in]`.

`linear(x [..., in], weight [out, in]) -> [..., out]`: both in one dtype, float32 accumulation.
`packed_linear(x [..., in], weight: PackedWeight, group=None, dtype=None) -> [..., out]`: with a weight kept as stored
    (`packed.py`). With `group` the rows of the weight form groups of that many rows and x is `[..., groups * in]`:
    group g reads columns `g * in ..`. `dtype` is the dtype of the result (default: that of x).
`decode.gemv(weights, x, out, group=None)`: `packed_linear` with several weights, for the few rows of a decode step.

Tolerance of fast twins: 1e-5 relative to the scale of the result in float32, one rounding of the result in 16 bits.
"""

from birkhoff.kernels.linear.reference import linear, packed_linear

__all__ = ["linear", "packed_linear"]
