"""Matrix products with a weight stored `[out, in]`.

`linear(x [..., in], weight [out, in]) -> [..., out]`: both in one dtype, float32 accumulation.
`packed_linear(x [..., in], weight: PackedWeight, group=None, dtype=None) -> [..., out]`: with a weight kept as stored
    (`packed.py`). With `group` the rows of the weight form groups of that many rows and x is `[..., groups * in]`:
    group g reads columns `g * in ..`. `dtype` is the dtype of the result (default: that of x).
`rounded_linear(x [..., in] | RoundedRows, weight: PackedWeight, dtype=None) -> [..., out]`: `packed_linear` of x
    rounded to FP8 in groups of 128 columns (the released numerics), whose codes may be given.
`decode.gemv(weights, x, out, group=None)`: `packed_linear` with several weights, for the few rows of a decode step.

Tolerance of fast twins: 1e-5 relative to the scale of the result in float32, one rounding of the result in 16 bits.
On FP8 tensor cores (`fp8.py`), products of 128 columns are summed by the hardware, which keeps some 14 bits of the
largest of them; these sums are added in float32. The result differs by at most 2^-10 of the norm of a row.
"""

from birkhoff.kernels.linear.reference import linear, packed_linear, rounded_linear

__all__ = ["linear", "packed_linear", "rounded_linear"]
