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

    def write_and_mix(self, streams, y, post, mix, fn, parts, mode: int = mhc.KEEP, embed=None, tokens=None) -> None:
        mhc.write_and_mix(streams, y, post, mix, fn, parts, mode, embed, tokens)

    def read_streams(self, desk: Any, base, scale, norm, iters: int, eps: float, rms_eps: float, norm_eps: float):
        given = (iters, eps, rms_eps, norm_eps)
        mhc.read_streams(desk.parts, desk.streams, base, scale, norm, *given, desk.x, desk.pre, desk.post, desk.mix)

    def route_and_shared(self, w: Any, desk: Any, ids: torch.Tensor, limit: float, factor: float) -> None:
        count = w.gate.out
        product([w.gate, w.shared_open], desk.x, desk.opened)
        experts.swiglu(desk.opened[:, count:], desk.z_shared, limit)
        experts.route(desk.opened[:, :count], w.bias, w.hashed, desk.token_ids, w.experts, ids, desk.weights,
                      desk.order, desk.slot_list, factor)  # fmt: skip

    def gate_up(self, w: Any, desk: Any, limit: float) -> None:
        experts.gate_up(desk.x, w.experts, desk.slot_list, desk.order, desk.weights, desk.z, limit)

    def down(self, w: Any, desk: Any) -> None:
        experts.down(desk.z, w.experts, desk.slot_list, desk.order, desk.y)
        product([w.shared_close], desk.z_shared, desk.y[:, -1])

    def choose(self, scores: torch.Tensor, positions: torch.Tensor, chosen: torch.Tensor) -> None:
        index.choose(scores, positions, chosen)

    def attend(self, *given: Any) -> None:
        attention.attend(*given)
