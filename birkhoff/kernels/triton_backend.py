"""The parts of a decoding step that also exist in CUDA, from the portable Triton twins: any width, any dtype.

Same calls as `cuda.launch.FastKernels`, which a decoder uses instead where it can.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from birkhoff.kernels.attend import decode as attention
from birkhoff.kernels.experts import decode as experts
from birkhoff.kernels.index import decode as index
from birkhoff.kernels.linear.decode import gemv
from birkhoff.kernels.linear.packed import PackedWeight
from birkhoff.kernels.mhc import decode as mhc


class TritonBackend:
    name = "triton"
    pdl = False
    fp16_inputs = False  # inputs are wanted in the model's dtype only

    def gemv(
        self,
        weights: Sequence[PackedWeight],
        x: tuple[torch.Tensor | None, torch.Tensor],
        out: torch.Tensor,
        group: int | None = None,
    ) -> None:
        gemv(weights, x[1], out, group)

    def write_and_mix(
        self, streams, y, post, mix, fn, parts, mode: int = mhc.KEEP, embed=None, tokens=None
    ) -> None:
        mhc.write_and_mix(streams, y, post, mix, fn, parts, mode, embed, tokens)

    def read_streams(
        self, buffers: Any, base, scale, norm, iters: int, eps: float, rms_eps: float, norm_eps: float
    ):
        given = (iters, eps, rms_eps, norm_eps)
        mhc.read_streams(
            buffers.mix_parts,
            buffers.streams,
            base,
            scale,
            norm,
            *given,
            buffers.x,
            buffers.pre,
            buffers.post,
            buffers.mix,
        )

    def route_and_shared(self, w: Any, buffers: Any, ids: torch.Tensor, limit: float, factor: float) -> None:
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

    def gate_up(self, w: Any, buffers: Any, limit: float) -> None:
        experts.gate_up(
            buffers.x,
            w.expert_addresses,
            buffers.expert_slots,
            buffers.pair_order,
            buffers.topk_weights,
            buffers.expert_hidden,
            limit,
        )

    def down(self, w: Any, buffers: Any) -> None:
        experts.down(
            buffers.expert_hidden,
            w.expert_addresses,
            buffers.expert_slots,
            buffers.pair_order,
            buffers.expert_out,
        )
        gemv([w.shared_down], buffers.shared_hidden, buffers.expert_out[:, -1])

    def topk(self, scores: torch.Tensor, positions: torch.Tensor, chosen: torch.Tensor) -> None:
        index.topk_entries(scores, positions, chosen)

    def attend(self, *given: Any) -> None:
        attention.attend(*given)
