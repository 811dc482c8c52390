"""Sublayers for the few rows of a decode step on a CPU, compiled: everything between the matrix products.

A decode step of a small model is a long chain of tiny operations whose call overhead exceeds their computation. Here a
sublayer is a few loops that read every weight once and the cache in place, without gathering, sorting, padding or
masks. float32, plain numerics. The reference twins are the modules: `Attention.forward`, `MoE.forward`, `Mixer` and
`HeadMixer`; `decode/cpu.py` binds their weights to these loops. Tolerance against them: 2e-5 of the scale of a result.

`norm_qkv`                projections of the input -> latent, and rotated keys in their ring
`store_compressor_rows`   one compressor row into its ring, with the position bias of the gates
`pool_entries`            entries of the blocks that these rows complete, onto their pages
`topk_entries`            indexer: the compressed entries that each query attends to
`attend`                  norm and rotation of queries, attention over ring and pages, inverse rotation
`read_streams`, `write_streams`, `merge_streams`   mHC around a sublayer and before the head
`norm_mtp_input`          norms at the input of the MTP block
`route_rows`              router, and the gate of the shared expert
`add_experts`             routed experts held as numbers; packed ones are `kernels.packed.native.ExpertProducts`
"""

from birkhoff.kernels.cpu_decode.attention import (
    attend,
    norm_qkv,
    pool_entries,
    store_compressor_rows,
    topk_entries,
)
from birkhoff.kernels.cpu_decode.experts import add_experts, route_rows
from birkhoff.kernels.cpu_decode.streams import merge_streams, norm_mtp_input, read_streams
from birkhoff.kernels.mhc.cpu import mix_streams as write_streams

__all__ = [
    "add_experts",
    "attend",
    "merge_streams",
    "norm_mtp_input",
    "norm_qkv",
    "pool_entries",
    "read_streams",
    "route_rows",
    "store_compressor_rows",
    "topk_entries",
    "write_streams",
]
