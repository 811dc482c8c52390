"""Number formats in which a matrix is stored and read by kernels, without being expanded first.

A row of a matrix is a sequence of blocks of `block` columns in `block_bytes` bytes. Types of the release have their
scales in a second tensor: one E8M0 byte per tile of `tile` rows and columns. In ggml's types the scales are part of
the block. MXFP4 and FP4 hold the same codes and scales in a different order, as do Q8_0 and Q8_ROWS.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from birkhoff.errors import TensorShape


@dataclass(frozen=True)
class PackedType:
    """`id` is the type's number in the native kernels."""

    name: str
    id: int
    block: int
    block_bytes: int
    tile: tuple[int, int] | None = None
    dtype: torch.dtype | None = None  # of plain numbers

    @property
    def bits(self) -> float:
        """Bits per weight, scales included."""
        extra = 8 / (self.tile[0] * self.tile[1]) if self.tile else 0.0
        return 8 * self.block_bytes / self.block + extra

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row, without separate scales."""
        if columns % self.block:
            raise TensorShape(
                f"a {self.name} matrix has {columns} columns, expected a multiple of {self.block}. Store it as BF16."
            )
        return columns // self.block * self.block_bytes

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int] | None:
        """Shape of the separate scales; None if the type has none."""
        return None if self.tile is None else (-(-rows // self.tile[0]), -(-columns // self.tile[1]))

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix, scales included."""
        scale = self.scale_shape(rows, columns)
        return rows * self.row_bytes(columns) + (scale[0] * scale[1] if scale else 0)


_ALL = (
    PackedType("F32", 0, 1, 4, dtype=torch.float32),
    PackedType("F16", 1, 1, 2, dtype=torch.float16),
    PackedType("BF16", 2, 1, 2, dtype=torch.bfloat16),
    PackedType("FP8", 3, 1, 1, tile=(128, 128)),
    PackedType("FP4", 4, 2, 1, tile=(1, 32)),
    PackedType("Q8_0", 5, 32, 34),
    PackedType("MXFP4", 6, 32, 17),
    PackedType("Q2_K", 7, 256, 84),
    PackedType("Q3_K", 8, 256, 110),
    PackedType("Q4_K", 9, 256, 144),
    PackedType("Q5_K", 10, 256, 176),
    PackedType("Q6_K", 11, 256, 210),
    PackedType("IQ2_XXS", 12, 256, 66),
    PackedType("IQ2_XS", 13, 256, 74),
    PackedType("IQ3_XXS", 14, 256, 98),
    PackedType("IQ4_XS", 15, 256, 136),
)
TYPES = {each.name: each for each in _ALL}

# Q8_0 as GPU kernels read projections, in the same bytes per row: all codes of a row, then all its scales. Codes are
# unsigned, 128 more than those of Q8_0. Of every 64 columns, eight of the first 32 are followed by eight of the last
# 32: a lane's sixteen bytes belong to both scales, so that the four lanes of a row multiply codes of one at a time.
Q8_ROWS = PackedType("Q8_ROWS", 16, 32, 34)
Q8_ROWS_COLUMNS = 256  # whose bytes are a multiple of sixteen


def stored_type(kind: PackedType) -> PackedType:
    """The type of the blocks in a file from which a matrix of type `kind` is loaded."""
    return TYPES["Q8_0"] if kind == Q8_ROWS else kind


def gpu_type(kind: PackedType, columns: int) -> PackedType:
    """The type in which a GPU holds a projection whose blocks are of type `kind`."""
    return Q8_ROWS if kind == TYPES["Q8_0"] and columns % Q8_ROWS_COLUMNS == 0 else kind


FLOAT_TYPES = {each.dtype: each for each in _ALL if each.dtype is not None}
