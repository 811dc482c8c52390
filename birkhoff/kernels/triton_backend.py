"""The decode kernels that also exist in CUDA, from their Triton twins: any width, any dtype.

`TritonBackend` has the methods of `cuda.backend.CudaBackend`, which a decoder prefers where it applies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from birkhoff.kernels.attend import decode as attention
from birkhoff.kernels.decode_buffers import ExpertBuffers, ExpertLayerWeights, StreamBuffers, is_fp4
from birkhoff.kernels.experts import block_types
from birkhoff.kernels.experts import decode as experts
from birkhoff.kernels.index import decode as index
from birkhoff.kernels.linear.decode import gemv
from birkhoff.kernels.linear.packed import PackedWeight
from birkhoff.kernels.mhc import decode as mhc


def block_gate_up(w: ExpertLayerWeights, buffers: ExpertBuffers, limit: float) -> None:
    """Gate and up of routed experts of any type: x -> expert_hidden, times the routing weight."""
    block_types.gate_up(
        w.expert_types[0],
        buffers.x,
        w.expert_addresses,
        buffers.expert_slots,
        buffers.pair_order[1],
        buffers.topk_weights,
        buffers.expert_hidden,
        limit,
        block_types.tile_config(16, buffers.x.dtype is torch.float32, decoding=True),
    )


def block_down(w: ExpertLayerWeights, buffers: ExpertBuffers) -> None:
    """Down of routed experts of any type: expert_hidden -> expert_out, without the shared expert's row."""
    block_types.down(
        w.expert_types[1],
        buffers.expert_hidden,
        w.expert_addresses,
        buffers.expert_slots,
        buffers.pair_order[1],
        buffers.expert_out,
        buffers.topk_weights.shape[1],
        block_types.tile_config(16, buffers.expert_hidden.dtype is torch.float32, decoding=True),
    )


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
        """Multiply x with matrices; results side by side in `out`. `x` is (rounded or None, as it is); matrices of
        codes read the first if there is one."""
        if x[0] is None:
            gemv(weights, x[1], out, group)
            return
        column = 0
        for weight in weights:
            part = out[:, column : column + weight.out]
            gemv([weight], x[0] if weight.is_codes else x[1], part, group)
            column += weight.out

    def project_queries(self, *_: object) -> bool:
        """The norm has a launch of its own."""
        return False

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
        self.gemv([w.router, w.shared_gate_up], (buffers.x_fp16, buffers.x), buffers.router_gate_up)
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
        if not is_fp4(w):
            block_gate_up(w, buffers, limit)
            return
        experts.gate_up(
            buffers.x if buffers.x_fp16 is None else buffers.x_fp16,
            w.expert_addresses,
            buffers.expert_slots,
            buffers.pair_order,
            buffers.topk_weights,
            buffers.expert_hidden,
            limit,
        )

    def down(self, w: ExpertLayerWeights, buffers: ExpertBuffers) -> None:
        if is_fp4(w):
            experts.down(
                buffers.expert_hidden,
                w.expert_addresses,
                buffers.expert_slots,
                buffers.pair_order,
                buffers.expert_out,
            )
        else:
            block_down(w, buffers)
        gemv([w.shared_down], buffers.shared_hidden, buffers.expert_out[:, -1])
