"""The layout of one packed expert as one block of bytes: codes and scales of gate and up, then of down.

A block moves in one copy and may begin at any address a kernel can read, so one address locates an expert and its four
parts. Parts begin at multiples of 256 bytes; the CUDA kernels load sixteen bytes at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from birkhoff.config import V4Config

PARTS = ("gate_up", "gate_up_scale", "down", "down_scale")  # in the order of a kernel's table of addresses
DTYPES = (torch.int8, torch.uint8, torch.int8, torch.uint8)
ALIGNMENT = 256


@dataclass(frozen=True)
class PackedExpertLayout:
    """Shapes and offsets of the four parts, and the size of the whole block."""

    shapes: tuple[tuple[int, int], ...]
    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, config: V4Config) -> PackedExpertLayout:
        hidden = config.hidden_size
        inner = config.moe_intermediate_size
        shapes = (
            (2 * inner, hidden // 2),
            (2 * inner, hidden // 32),
            (hidden, inner // 2),
            (hidden, inner // 32),
        )
        offsets, total = [], 0
        for rows, columns in shapes:
            offsets.append(total)
            total += -(-rows * columns // ALIGNMENT) * ALIGNMENT
        return cls(shapes, tuple(offsets), total)

    def parts(self, block: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The four matrices in a block of bytes [nbytes], as views."""
        return tuple(
            block[first : first + rows * columns].view(dtype).view(rows, columns)
            for first, (rows, columns), dtype in zip(self.offsets, self.shapes, DTYPES)
        )
