"""One packed expert as one run of bytes: codes and scales of gate and up, then of down.

A run moves in one copy and begins anywhere a kernel can read, so an expert's place is a single number and its four
addresses follow from it. Parts begin at multiples of 256 bytes: the fast kernels load sixteen at a time.
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
    """Shapes of the four parts, where each begins, and how many bytes there are in all."""

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

    def parts(self, run: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The four matrices in a run of bytes [nbytes], as views."""
        return tuple(
            run[first : first + rows * columns].view(dtype).view(rows, columns)
            for first, (rows, columns), dtype in zip(self.offsets, self.shapes, DTYPES)
        )
