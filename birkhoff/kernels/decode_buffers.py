"""What the kernels of a decode step expect of the buffers and layer weights they are given.

`decode/buffers.py` and `decode/layer_weights.py` implement these protocols; kernels do not import them. n is the number
of rows (tokens), d the hidden size, k the experts per token, E the routed experts, i the expert intermediate size.
"""

from __future__ import annotations

from typing import Protocol

import torch

from birkhoff.kernels.linear.packed import PackedWeight
from birkhoff.kernels.packed import PackedType


def is_fp4(w: ExpertLayerWeights) -> bool:
    """Whether the experts of a layer are FP4, which has kernels of its own."""
    return all(kind.name == "FP4" for kind in w.expert_types)


class StreamBuffers(Protocol):
    """Residual streams of a step and what is read from them.

    `x_fp16` is x in float16, `x_fp4_order` the same permuted to the order in which FP4 codes unpack; both are None
    for backends that do not read float16 inputs. With released numerics both are rounded, and for such backends
    `x_fp16` is the rounded x in its own dtype."""

    streams: torch.Tensor  # [n, 4, d]
    mix_parts: torch.Tensor  # [n, slices, padded] float32: partial mixing products
    pre: torch.Tensor  # [n, 4] float32
    post: torch.Tensor  # [n, 4] float32
    mix: torch.Tensor  # [n, 4, 4] float32
    x: torch.Tensor  # [n, d]
    x_fp16: torch.Tensor | None
    x_fp4_order: torch.Tensor | None


class ExpertBuffers(StreamBuffers, Protocol):
    """Buffers of the expert sublayer."""

    rows: int  # n
    token_ids: torch.Tensor  # [n] int64
    router_gate_up: torch.Tensor  # [n, E + 2i] float32: router logits, then gate and up of the shared expert
    topk_weights: torch.Tensor  # [n, k] float32
    pair_order: torch.Tensor  # [2, n * k] int32; row 1: (token, choice) pairs grouped by expert
    expert_slots: torch.Tensor  # [min(E, n * k), 16] int32: the routing plan
    blocks_done: torch.Tensor  # [1] int32, zero between launches
    expert_hidden: torch.Tensor  # [n * k, i]
    shared_hidden: torch.Tensor  # [n, i]
    x_digits: (
        torch.Tensor | None
    )  # [n, 4 d] uint8: x in digits (cuda/digits.cuh); None where they are not read
    hidden_digits: torch.Tensor | None  # [n * k, 4 i] uint8, instead of expert_hidden
    expert_out: torch.Tensor  # [n, k + 1, d] float32; the last is the shared expert's


class ExpertLayerWeights(Protocol):
    """Weights of one layer's expert sublayer."""

    router: PackedWeight
    router_bias: torch.Tensor | None
    hash_table: torch.Tensor | None  # [vocab, k]: expert ids by token id, in hash-routed layers
    shared_gate_up: PackedWeight
    shared_down: PackedWeight
    expert_addresses: torch.Tensor  # [E, 4] int64: gate and up, their scales, down, its scales
    expert_types: tuple[PackedType, PackedType]  # of gate and up, and of down
    scale_offsets: list[int | None]  # of gate and up, and of down; see `cuda.backend.scale_offset`
    host_range: tuple[int, int] | None  # addresses of experts in host memory, if any may be there
