"""A matrix product with a weight stored `[out, in]`.

`linear(x [..., in], weight [out, in]) -> [..., out]`, both in one dtype, float32 accumulation.
`packed_linear(x [..., in], rows: Rows, group=None, dtype=None) -> [..., out]`: with a weight kept as stored (`rows.py`).
    With `group` the weight's rows fall into groups of that many and x is `[..., groups * in]`: group g reads columns
    `g * in ..`. `dtype` is that of the result, that of x unless given.
Tolerance of any fast twin: 1e-5 relative to the product's own scale in float32, one rounding of the result in 16 bits.
"""

from birkhoff.kernels.linear.reference import linear, packed_linear

__all__ = ["linear", "packed_linear"]
