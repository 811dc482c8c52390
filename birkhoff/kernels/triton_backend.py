"""The decode kernels that also exist in CUDA, from their Triton twins: any width, any dtype.

`TritonBackend` has the methods of `cuda.backend.CudaBackend`, which a decoder prefers where it applies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from birkhoff.kernels.attend import decode as attention
from birkhoff.kernels.decode_buffers import ExpertBuffers, ExpertLayerWeights, StreamBuffers
from birkhoff.kernels.experts import decode as experts
from birkhoff.kernels.index import decode as index
from birkhoff.kernels.linear.decode import gemv
from birkhoff.kernels.linear.packed import PackedWeight
from birkhoff.kernels.mhc import decode as mhc


class TritonBackend:
    name = "triton"
    pdl = False
    fp16_inputs = False  # inputs are read in the model's dtype only
    attend = staticmethod(attention.attend)
    topk = staticmethod(index.topk_entries)
    write_and_mix = staticmethod(mhc.write_and_mix)
    route = staticmethod(experts.route)

    def gemv(
        self,
        weights: Sequence[PackedWeight],
        x: tuple[torch.Tensor | None, torch.Tensor],
        out: torch.Tensor,
        group: int | None = None,
    ) -> None:
        gemv(weights, x[1], out, group)

    def read_streams(
        self,
        buffers: StreamBuffers,
        base: torch.Tensor,
        scale: torch.Tensor,
        norm: torch.Tensor,
        iters: int,
        eps: float,
        rms_eps: float,
        norm_eps: float,
    ) -> None:
        mhc.read_streams(
            buffers.mix_parts,
            buffers.streams,
            base,
            scale,
            norm,
            iters,
            eps,
            rms_eps,
            norm_eps,
            buffers.x,
            buffers.pre,
            buffers.post,
            buffers.mix,
        )

    def route_and_shared(
        self, w: ExpertLayerWeights, buffers: ExpertBuffers, ids: torch.Tensor, limit: float, factor: float
    ) -> None:
        count = w.router.out
        gemv([w.router, w.shared_gate_up], buffers.x, buffers.router_gate_up)
        experts.swiglu(buffers.router_gate_up[:, count:], buffers.shared_hidden, limit)
        experts.route(
            buffers.router_gate_up[:, :count],
            w.router_bias,
            w.hash_table,
            buffers.token_ids,
            w.expert_addresses,
            ids,
            buffers.topk_weights,
            buffers.pair_order,
            buffers.expert_slots,
            factor,
        )

    def gate_up(self, w: ExpertLayerWeights, buffers: ExpertBuffers, limit: float) -> None:
        experts.gate_up(
            buffers.x,
            w.expert_addresses,
            buffers.expert_slots,
            buffers.pair_order,
            buffers.topk_weights,
            buffers.expert_hidden,
            limit,
        )

    def down(self, w: ExpertLayerWeights, buffers: ExpertBuffers) -> None:
        experts.down(
            buffers.expert_hidden,
            w.expert_addresses,
            buffers.expert_slots,
            buffers.pair_order,
            buffers.expert_out,
        )
        gemv([w.shared_down], buffers.shared_hidden, buffers.expert_out[:, -1])
