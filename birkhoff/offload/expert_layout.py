"""The layout of one packed expert as one block of bytes: codes and scales of gate and up, then of down. Types whose
scales are part of their codes have no separate ones.

A block moves in one copy and may begin at any address a kernel can read, so one address locates an expert and its four
parts. Parts begin at multiples of 256 bytes; the CUDA kernels load sixteen bytes at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from birkhoff.config import V4Config
from birkhoff.kernels.packed import TYPES, PackedMatrix, PackedType

PARTS = ("gate_up", "gate_up_scale", "down", "down_scale")  # in the order of a kernel's table of addresses
ALIGNMENT = 256
ExpertId = tuple[int, int]  # layer, index in the layer
_CODE_DTYPES = {"FP4": torch.int8, "FP8": torch.float8_e4m3fn}  # of other types: uint8


def code_dtype(kind: PackedType) -> torch.dtype:
    """The dtype of the tensors that hold the codes of a type."""
    return _CODE_DTYPES.get(kind.name, torch.uint8)


@dataclass(frozen=True)
class PackedExpertLayout:
    """Shapes in bytes, offsets and dtypes of the four parts, and the size of the whole block."""

    shapes: tuple[tuple[int, int], ...]  # no rows: no such part
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(
        cls, config: V4Config, types: tuple[PackedType, PackedType] = (TYPES["FP4"], TYPES["FP4"])
    ) -> PackedExpertLayout:
        """The layout of experts whose gate and up, and whose down, have the given types."""
        hidden = config.hidden_size
        inner = config.moe_intermediate_size
        shapes: list[tuple[int, int]] = []
        dtypes: list[torch.dtype] = []
        for kind, parts, rows, columns in ((types[0], 2, inner, hidden), (types[1], 1, hidden, inner)):
            scale = kind.scale_shape(rows, columns)
            shapes += [
                (parts * rows, kind.row_bytes(columns)),
                (0, 0) if scale is None else (parts * scale[0], scale[1]),
            ]
            dtypes += [code_dtype(kind), torch.uint8]
        offsets, total = [], 0
        for rows, columns in shapes:
            offsets.append(total)
            total += -(-rows * columns // ALIGNMENT) * ALIGNMENT
        return cls(tuple(shapes), tuple(dtypes), tuple(offsets), total)

    def parts(self, block: torch.Tensor) -> tuple[Any, ...]:
        """The four matrices in a block of at least `nbytes` bytes, as views; None for scales that are not separate."""
        return tuple(
            block[first : first + rows * columns].view(dtype).view(rows, columns) if rows else None
            for first, (rows, columns), dtype in zip(self.offsets, self.shapes, self.dtypes)
        )


def matrices_of(
    parts: Sequence[torch.Tensor | None], types: tuple[PackedType, PackedType], hidden: int, inner: int
) -> tuple[PackedMatrix, PackedMatrix, PackedMatrix]:
    """Gate, up and down in the four parts of an expert, as views."""
    codes, scale, down, down_scale = parts
    assert codes is not None and down is not None
    views = codes.view(torch.uint8).chunk(2)
    scales = (None, None) if scale is None else scale.chunk(2)
    return (
        PackedMatrix(types[0], hidden, views[0], scales[0]),
        PackedMatrix(types[0], hidden, views[1], scales[1]),
        PackedMatrix(types[1], inner, down.view(torch.uint8), down_scale),
    )
