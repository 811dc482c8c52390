"""Pooling of consecutive tokens into one compressed entry (spec 6.4).

`pool(values [..., items, dc], gates [..., items, dc]) -> [..., dc]`: per channel, the values weighted by a softmax over
the gates of all items; float32. A gate of minus infinity excludes its item.

Prefill, for chunks of several sequences at once (`rows: RowIndex`); a ring keeps row `position mod size` of each slot,
raw rows are values beside gates, and the gates in a ring include their position bias `ape [ratio, ...]`:
`compress_blocks([RawRows(raw [n, w], ape, norm [c], ring [slots, R, w], pages [P, entries per page, c], rounding)],
        table [slots, pages], rows, cos, sin [n, r/2], eps)`: for up to two compressors of one ratio, pools, normalises
and rotates the block that ends at a row and writes its page; cos and sin are those of the first position of the row's
block. `rounding` is that of the released numerics: "key" (FP8 in groups of 64, except the rotated channels), "index"
(Hadamard transform, then FP4) or "none".
`store_rows([RingRows(values [n, w], ring, ape | None)], rows)`: writes the last rows of every chunk to up to
three rings.
`gather_rows(values, ring, slots, positions, sources, ape | None) -> [k, w]`: rows as the ring keeps them, from row
`sources[i]` of the step or, where that is -1, from the ring.

`decode.norm_rope_store(...)`: norms, rotations, pooling and cache writes of new tokens, for a decode step.

Tolerances in float32, absolute for values of order one: 2e-6 for `pool` against float64; 1e-5 for the cache rows that
the decode kernel writes, against those of the reference model.
"""

from birkhoff.kernels.compress.reference import (
    RawRows,
    RingRows,
    Rounding,
    compress_blocks,
    gather_rows,
    pool,
    store_rows,
)

__all__ = ["RawRows", "RingRows", "Rounding", "compress_blocks", "gather_rows", "pool", "store_rows"]
