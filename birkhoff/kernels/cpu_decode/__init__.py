"""Whole sublayers for the few rows of a decode step on a CPU, compiled.

A decode step of a small model is a long chain of tiny operations whose call overhead exceeds their computation. Here a
sublayer is one or two loops that read every weight once and the cache in place, without gathering, sorting, padding or
masks. float32, plain numerics. The reference twins are the modules: `Attention.forward`, `MoE.forward`, `Mixer` and
`HeadMixer`; `decode/cpu.py` binds their weights to these loops. Tolerance against them: 2e-5 of the scale of a result.

`qkv_proj`                normalised input -> latent, rotated queries, rotated key, rows for the compressors
`store_compressor_rows`   one compressor row into its ring, with the position bias of the gates
`pool_entries`            entries of the blocks that these rows complete, onto their pages
`topk_entries`            indexer: the compressed entries that each query attends to
`attend_and_project`      attention over ring and pages, inverse rotation, both output projections
`read_streams`, `write_streams`, `merge_streams`   mHC around a sublayer and before the head
`mtp_input`               input of the MTP block
`experts`                 router, routed and shared experts
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
from birkhoff.kernels.mhc.cpu import mix_streams as write_streams

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
