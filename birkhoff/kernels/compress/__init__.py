"""Pooling of consecutive tokens into one compressed entry (spec 6.4).

`pool(values [..., items, dc], gates [..., items, dc]) -> [..., dc]`: per channel, a softmax over the items' gates
weighs the items' values; float32. An item whose gate is minus infinity is absent.
"""

from birkhoff.kernels.compress.reference import pool

__all__ = ["pool"]
