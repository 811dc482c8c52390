"""Whole sublayers for the few rows of a decoding step on a CPU, compiled.

A decoding step of a small model is a long chain of tiny operations; called one by one they cost more than they compute.
Here a sublayer is one or two loops that read every weight once and the caches where they lie: no gathering, sorting,
padding or masks. float32, plain numerics. The plain twins are the modules themselves: `Attention.forward`,
`MoE.forward`, `Mixer` and `HeadMixer`; `decode/cpu.py` binds their weights to these loops. Tolerance against them: 2e-5
of the result's scale.

`qkv_proj`    normalised input -> latent, rotated queries, rotated key, rows for the compressors
`store_compressor_rows`             one compressor row into its ring, position bias added to the gates
`pool_entries`            entries of the blocks that these rows complete, onto their pages
`topk_entries`            indexer: which compressed entries each query attends to
`attend_and_project`   attention over ring and pages, turned back, through both output projections
`read_streams`, `write_streams`, `merge_streams`   mHC around a sublayer and before the head
`mtp_input`      what enters the MTP block
`experts`           gate, routing, routed and shared experts
"""

from birkhoff.kernels.cpu_decode.attention import (
    attend_and_project,
    pool_entries,
    qkv_proj,
    store_compressor_rows,
    topk_entries,
)
from birkhoff.kernels.cpu_decode.experts import experts
from birkhoff.kernels.cpu_decode.streams import merge_streams, mtp_input, read_streams
from birkhoff.kernels.mhc.cpu import mix_back as write_streams

__all__ = [
    "store_compressor_rows",
    "topk_entries",
    "attend_and_project",
    "experts",
    "pool_entries",
    "mtp_input",
    "merge_streams",
    "qkv_proj",
    "read_streams",
    "write_streams",
]
