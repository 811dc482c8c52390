"""Whole sublayers for the few rows of a decoding step on a CPU, compiled.

A decoding step of a small model is a long chain of tiny operations; called one by one they cost more than they compute.
Here a sublayer is one or two loops that read every weight once and the caches where they lie: no gathering, sorting,
padding or masks. float32, plain numerics. The plain twins are the modules themselves: `Attention.forward`,
`MoE.forward`, `Mixer` and `HeadMixer`; `decode/cpu.py` binds their weights to these loops. Tolerance against them: 2e-5
of the result's scale.

`open_attention`    normalised input -> latent, rotated queries, rotated key, rows for the compressors
`carry`             one compressor row into its ring, position bias added to the gates
`finish`            entries of the blocks that these rows complete, onto their pages
`choose`            indexer: which compressed entries each query attends to
`close_attention`   attention over ring and pages, turned back, through both output projections
`read_streams`, `write_streams`, `merge_streams`   mHC around a sublayer and before the head
`join_streams`      what enters the MTP block
`experts`           gate, routing, routed and shared experts
"""

from birkhoff.kernels.cpu_decode.attention import carry, choose, close_attention, finish, open_attention
from birkhoff.kernels.cpu_decode.experts import experts
from birkhoff.kernels.cpu_decode.streams import join_streams, merge_streams, read_streams
from birkhoff.kernels.mhc.cpu import mix_back as write_streams

__all__ = [
    "carry",
    "choose",
    "close_attention",
    "experts",
    "finish",
    "join_streams",
    "merge_streams",
    "open_attention",
    "read_streams",
    "write_streams",
]
