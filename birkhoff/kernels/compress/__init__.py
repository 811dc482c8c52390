"""Pooling of consecutive tokens into one compressed entry (spec 6.4).

`pool(values [..., items, dc], gates [..., items, dc]) -> [..., dc]`: per channel, the values weighted by a softmax over
the gates of all items; float32. A gate of minus infinity excludes its item.
`decode.norm_rope_store(...)`: norms, rotations, pooling and cache writes of new tokens, for a decode step.

Tolerance of the decode kernel: one rounding of the stored dtype, 1e-5 relative in float32.
"""

from birkhoff.kernels.compress.reference import pool

__all__ = ["pool"]
