"""The parts of a decoding step that also exist in CUDA, from the portable Triton twins: any width, any dtype.

Same calls as `cuda.launch.FastKernels`, which a decoder uses instead where it can.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from birkhoff.kernels.attend import triton as attention
from birkhoff.kernels.experts import triton as experts
from birkhoff.kernels.index import triton as index
from birkhoff.kernels.linear.rows import Rows
from birkhoff.kernels.linear.triton import product
from birkhoff.kernels.mhc import triton as mhc


class PortableKernels:
    name = "triton"
    early = False
    halves = False  # inputs are wanted in the model's dtype only

    def product(
        self,
        weights: Sequence[Rows],
        x: tuple[torch.Tensor | None, torch.Tensor],
        out: torch.Tensor,
        group: int | None = None,
    ) -> None:
        product(weights, x[1], out, group)

    def write_and_mix(self, streams, y, post, mix, fn, parts, mode: int = mhc.KEEP, embed=None, tokens=None) -> None:
        mhc.write_and_mix(streams, y, post, mix, fn, parts, mode, embed, tokens)

    def read_streams(self, desk: Any, base, scale, norm, iters: int, eps: float, rms_eps: float, norm_eps: float):
        given = (iters, eps, rms_eps, norm_eps)
        mhc.read_streams(desk.parts, desk.streams, base, scale, norm, *given, desk.x, desk.pre, desk.post, desk.mix)

    def enter_experts(self, w: Any, desk: Any, ids: torch.Tensor, limit: float, factor: float) -> None:
        count = w.gate.out
        product([w.gate, w.shared_open], desk.x, desk.opened)
        experts.swiglu(desk.opened[:, count:], desk.z_shared, limit)
        experts.route(desk.opened[:, :count], w.bias, w.hashed, desk.token_ids, w.experts, ids, desk.weights,
                      desk.order, desk.slot_list, factor)  # fmt: skip

    def open_experts(self, w: Any, desk: Any, limit: float) -> None:
        experts.open_experts(desk.x, w.experts, desk.slot_list, desk.order, desk.weights, desk.z, limit)

    def close_experts(self, w: Any, desk: Any) -> None:
        experts.close_experts(desk.z, w.experts, desk.slot_list, desk.order, desk.y)
        product([w.shared_close], desk.z_shared, desk.y[:, -1])

    def choose(self, scores: torch.Tensor, positions: torch.Tensor, chosen: torch.Tensor) -> None:
        index.choose(scores, positions, chosen)

    def attend(self, *given: Any) -> None:
        attention.attend(*given)
