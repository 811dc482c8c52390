"""Pooling of consecutive tokens into one compressed entry (spec 6.4).

`pool(values [..., items, dc], gates [..., items, dc]) -> [..., dc]`: per channel, the values weighted by a softmax over
the gates of all items; float32. A gate of minus infinity excludes its item.
`decode.norm_rope_store(...)`: norms, rotations, pooling and cache writes of new tokens, for a decode step.

Tolerances in float32, absolute for values of order one: 2e-6 for `pool` against float64; 1e-5 for the cache rows that
the decode kernel writes, against those of the reference model.
"""

from birkhoff.kernels.compress.reference import pool

__all__ = ["pool"]
