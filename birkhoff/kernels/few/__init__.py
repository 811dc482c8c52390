"""Whole sublayers for the few rows of a decoding step on a CPU, compiled.

A decoding step of a small model is a long chain of tiny operations; called one by one they cost more than they compute.
Here a sublayer is one or two loops that read every weight once and the caches where they lie: no gathering, sorting,
padding or masks. float32, plain numerics. The plain twins are the modules themselves: `Attention.forward` and
`MoE.forward`; `model/few.py` binds their weights to these loops. Tolerance against them: 2e-5 of the result's scale.

`open_attention`    normalised input -> latent, rotated queries, rotated key, rows for the compressors
`carry`             one compressor row into its ring, position bias added to the gates
`choose`            indexer: which compressed entries each query attends to
`close_attention`   attention over ring and pages, turned back, through both output projections
`experts`           gate, routing, routed and shared experts
"""

from birkhoff.kernels.few.attention import carry, choose, close_attention, open_attention
from birkhoff.kernels.few.experts import experts

__all__ = ["carry", "choose", "close_attention", "experts", "open_attention"]
