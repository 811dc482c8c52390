"""Launches of the decode kernels for routed experts that are stored in FP8 or in ggml's blocks (blocks.cu), and of
those for FP4 with inputs in digits."""

from __future__ import annotations

import torch

from birkhoff.kernels.cuda.compile import Module, compiled_module
from birkhoff.kernels.cuda.variants import BlockVariant
from birkhoff.kernels.decode_buffers import ExpertBuffers, ExpertLayerWeights
from birkhoff.kernels.linear.packed import PackedWeight

# Digits of digit_experts.cu reach 256 times these: normalised inputs of experts, and SwiGLU of clamped numbers times a
# routing weight. Its shared memory has four stages.
DIGITS_X, DIGITS_Z, DIGITS_MEMORY = 16.0, 1.0, 4 * (64 * 128 + 64 * 8 + 4 * 1024)


class BlockExperts:
    """Part of `CudaBackend`. Sources are compiled per type and variant when first launched."""

    device: torch.device
    processors: int
    pdl: bool
    _digits: Module | None  # digit_experts.cu, where it runs

    def block_gate_up(
        self, w: ExpertLayerWeights, buffers: ExpertBuffers, limit: float, variant: BlockVariant
    ) -> None:
        """`gate_up` of a type of blocks.cu, in one of its variants."""
        slots, inner, width = (
            buffers.expert_slots.shape[0],
            buffers.expert_hidden.shape[1],
            buffers.x.shape[1],
        )
        compiled_module("blocks.cu", self.device, variant.defines).launch(
            "gate_up",
            (variant.thread_blocks(slots * inner // 8, self.processors), 1),
            32 * variant.warps,
            buffers.expert_slots,
            slots,
            buffers.pair_order[1],
            buffers.topk_weights,
            buffers.x_fp4_order,
            buffers.expert_hidden,
            _lookup_table(w.expert_types[0].name, buffers.x.device),
            inner,
            width,
            buffers.topk_weights.shape[1],
            float(limit),
            pdl=self.pdl,
            shared=variant.memory(width, buffers.rows),
        )

    def block_down(
        self,
        w: ExpertLayerWeights,
        buffers: ExpertBuffers,
        variant: BlockVariant,
        shared: PackedWeight | None = None,
    ) -> None:
        """`down` of a type of blocks.cu, in one of its variants; also of the expert `shared` (Q8_0, up to eight
        tokens)."""
        slots, inner, width = (
            buffers.expert_slots.shape[0],
            buffers.expert_hidden.shape[1],
            buffers.x.shape[1],
        )
        tiles, memory = slots * width // 16, variant.memory(inner, buffers.rows)
        shared_blocks, blocks = 0, variant.thread_blocks(tiles, self.processors)
        if shared is not None:
            row_bytes = w.expert_types[1].row_bytes(inner)
            shared_blocks, blocks = variant.split(
                tiles, row_bytes, width // 16, shared.weight.shape[1], self.processors
            )
        compiled_module("blocks.cu", self.device, variant.defines).launch(
            "down",
            (shared_blocks + blocks, 1),
            32 * variant.warps,
            buffers.expert_slots,
            slots,
            buffers.pair_order[1],
            buffers.expert_hidden,
            buffers.expert_out,
            _lookup_table(w.expert_types[1].name, buffers.x.device),
            inner,
            width,
            buffers.topk_weights.shape[1],
            shared_blocks,
            None if shared is None else shared.weight,
            buffers.shared_hidden,
            buffers.rows,
            pdl=self.pdl,
            shared=memory,
        )

    def fp8_gate_up(self, buffers: ExpertBuffers, limit: float) -> None:
        """`gate_up` of experts stored in FP8."""
        slots, inner = buffers.expert_slots.shape[0], buffers.expert_hidden.shape[1]
        compiled_module("fp8_experts.cu", self.device).launch(
            "gate_up",
            (inner // 16, slots),
            128,
            buffers.expert_slots,
            buffers.pair_order[1],
            buffers.topk_weights,
            buffers.x_fp16,
            buffers.expert_hidden,
            inner,
            buffers.x.shape[1],
            buffers.topk_weights.shape[1],
            float(limit),
            pdl=self.pdl,
        )

    def fp8_down(self, buffers: ExpertBuffers) -> None:
        """`down` of experts stored in FP8, without the shared expert."""
        slots, width = buffers.expert_slots.shape[0], buffers.x.shape[1]
        compiled_module("fp8_experts.cu", self.device).launch(
            "down",
            (width // 16, slots),
            128,
            buffers.expert_slots,
            buffers.pair_order[1],
            buffers.expert_hidden,
            buffers.expert_out,
            buffers.expert_hidden.shape[1],
            width,
            buffers.topk_weights.shape[1],
            pdl=self.pdl,
        )

    def digits_gate_up(self, buffers: ExpertBuffers, limit: float) -> None:
        """`gate_up` of FP4 experts with inputs in digits (digit_experts.cu)."""
        inner, width = buffers.expert_hidden.shape[1], buffers.x.shape[1]
        assert self._digits is not None
        self._digits.launch(
            "digits_gate_up",
            (inner // 32, buffers.expert_slots.shape[0]),
            128,
            buffers.expert_slots,
            buffers.pair_order[1],
            buffers.topk_weights,
            buffers.x_digits,
            buffers.hidden_digits,
            inner,
            width,
            buffers.topk_weights.shape[1],
            float(limit),
            64.0 * DIGITS_X,
            1 / DIGITS_Z,
            pdl=self.pdl,
            shared=DIGITS_MEMORY,
        )

    def digits_down(self, w: ExpertLayerWeights, buffers: ExpertBuffers) -> None:
        """`down` of FP4 experts with inputs in digits, and of the shared expert (FP8 or Q8_0)."""
        inner, (n, width) = buffers.expert_hidden.shape[1], buffers.x.shape
        slots = buffers.expert_slots.shape[0]
        assert self._digits is not None
        self._digits.launch(
            "digits_down" if w.shared_down.is_fp8 else "digits_down_q8",
            (width // 64, slots + -(-n // 8)),
            128,
            buffers.expert_slots,
            slots,
            buffers.pair_order[1],
            buffers.hidden_digits,
            buffers.expert_out,
            inner,
            width,
            buffers.topk_weights.shape[1],
            64.0 * DIGITS_Z,
            w.shared_down.weight,
            w.shared_down.scale,
            buffers.shared_hidden,
            n,
            pdl=self.pdl,
            shared=DIGITS_MEMORY,
        )


def _lookup_table(kind: str, device: torch.device) -> torch.Tensor | None:
    from birkhoff.kernels.packed.unpack import lookup_table

    return lookup_table(kind, device)
