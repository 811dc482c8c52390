"""The MTP block as a GPU decode step reads it: weights of its layer, and the launches that form its input.

`Decoder.draft` runs the block through the same layer functions as a trunk layer. What differs is the input: instead of
embedding a token into four equal streams, the normalised streams of a position and the normalised embedding of the
token after it are each multiplied with a matrix and added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from birkhoff.decode.buffers import DecodeBuffers
from birkhoff.decode.layer_weights import LayerWeights, layer_weights
from birkhoff.kernels.linear.packed import PackedWeight
from birkhoff.model.mhc import HeadMixer
from birkhoff.model.mtp import MTP

if TYPE_CHECKING:
    from birkhoff.kernels.cuda.backend import CudaBackend
    from birkhoff.kernels.triton_backend import TritonBackend

PRODUCT_ROWS = 64  # rows of one product launch


@dataclass(eq=False)
class MTPWeights:
    """Weights of the MTP block; embedding and head are the trunk's."""

    layer: LayerWeights
    e_proj: PackedWeight
    h_proj: PackedWeight
    e_norm: torch.Tensor
    h_norm: torch.Tensor
    head: HeadMixer
    norm: torch.Tensor


def mtp_weights(mtp: MTP) -> MTPWeights:
    """The weights of a filled MTP block. Only scales are copied."""
    return MTPWeights(
        layer=layer_weights(mtp.block),
        e_proj=mtp.e_proj.packed_weight(),
        h_proj=mtp.h_proj.packed_weight(),
        e_norm=mtp.enorm.weight,
        h_norm=mtp.hnorm.weight,
        head=mtp.hc_head,
        norm=mtp.norm.weight,
    )


def join_input(
    w: MTPWeights,
    kernels: CudaBackend | TritonBackend,
    embed: torch.Tensor,
    buffers: DecodeBuffers,
    eps: float,
    released: bool,
) -> None:
    """Replace `buffers.streams` [n, 4, d] by the block's input: the streams of positions t and the embeddings of
    `buffers.token_ids`, which are the tokens at t + 1."""
    rows, _, width = buffers.streams.shape
    from_streams = _project(w.h_proj, w.h_norm, kernels, buffers.streams.view(-1, width), eps, released)
    from_token = _project(w.e_proj, w.e_norm, kernels, embed[buffers.token_ids], eps, released)
    torch.add(from_streams.view(rows, -1, width), from_token.unsqueeze(1), out=buffers.streams)


def _project(
    weight: PackedWeight,
    norm: torch.Tensor,
    kernels: CudaBackend | TritonBackend,
    rows: torch.Tensor,
    eps: float,
    released: bool,
) -> torch.Tensor:
    """RMS norm and product of rows [n, d], rounded to their dtype as in the reference."""
    from birkhoff.kernels.norm.decode import norm_into

    x, out = torch.empty_like(rows), torch.empty_like(rows)
    x_fp16 = torch.empty_like(rows, dtype=torch.float16) if kernels.fp16_inputs else None
    norm_into(rows, norm, eps, x, x_fp16)
    if released:
        from birkhoff.kernels.quant.device import round_input

        x_fp16 = torch.empty_like(x) if x_fp16 is None else x_fp16
        round_input(x, x_fp16, rows.dtype)
    for first in range(0, len(rows), PRODUCT_ROWS):
        part = slice(first, first + PRODUCT_ROWS)
        kernels.gemv([weight], (None if x_fp16 is None else x_fp16[part], x[part]), out[part])
    return out
