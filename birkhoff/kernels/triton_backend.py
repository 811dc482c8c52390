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
from birkhoff.kernels.linear.decode import product
from birkhoff.kernels.linear.packed import PackedWeight
from birkhoff.kernels.mhc import decode as mhc


class TritonBackend:
    name = "triton"
    early = False
    halves = False  # inputs are wanted in the model's dtype only

    def product(
        self,
        weights: Sequence[PackedWeight],
        x: tuple[torch.Tensor | None, torch.Tensor],
        out: torch.Tensor,
        group: int | None = None,
    ) -> None:
        product(weights, x[1], out, group)

    def write_and_mix(
        self, streams, y, post, mix, fn, parts, mode: int = mhc.KEEP, embed=None, tokens=None
    ) -> None:
        mhc.write_and_mix(streams, y, post, mix, fn, parts, mode, embed, tokens)

    def read_streams(
        self, buffers: Any, base, scale, norm, iters: int, eps: float, rms_eps: float, norm_eps: float
    ):
        given = (iters, eps, rms_eps, norm_eps)
        mhc.read_streams(
            buffers.parts,
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
        count = w.gate.out
        product([w.gate, w.shared_open], buffers.x, buffers.opened)
        experts.swiglu(buffers.opened[:, count:], buffers.z_shared, limit)
        experts.route(
            buffers.opened[:, :count],
            w.bias,
            w.hashed,
            buffers.token_ids,
            w.experts,
            ids,
            buffers.weights,
            buffers.order,
            buffers.slot_list,
            factor,
        )

    def gate_up(self, w: Any, buffers: Any, limit: float) -> None:
        experts.gate_up(
            buffers.x, w.experts, buffers.slot_list, buffers.order, buffers.weights, buffers.z, limit
        )

    def down(self, w: Any, buffers: Any) -> None:
        experts.down(buffers.z, w.experts, buffers.slot_list, buffers.order, buffers.y)
        product([w.shared_close], buffers.z_shared, buffers.y[:, -1])

    def choose(self, scores: torch.Tensor, positions: torch.Tensor, chosen: torch.Tensor) -> None:
        index.choose(scores, positions, chosen)

    def attend(self, *given: Any) -> None:
        attention.attend(*given)
