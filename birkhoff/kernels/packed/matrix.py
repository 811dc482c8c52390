"""One matrix `[rows, columns]` as it is stored: the form that loaders fill and kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from birkhoff.errors import TensorShape
from birkhoff.kernels.packed.reference import dequantise
from birkhoff.kernels.packed.types import FLOAT_TYPES, TYPES, PackedType


@dataclass(frozen=True)
class PackedMatrix:
    """`codes` [rows, bytes of a row] uint8 in the blocks of `type`; `scales` uint8 for types that store them apart.

    The tensors may be views of a larger buffer or of a mapped file; rows are contiguous."""

    type: PackedType
    columns: int
    codes: torch.Tensor
    scales: torch.Tensor | None = None

    def __post_init__(self) -> None:
        expected = self.type.row_bytes(self.columns)
        if self.codes.dim() != 2 or self.codes.dtype is not torch.uint8 or self.codes.shape[1] != expected:
            raise TensorShape(
                f"the codes of a {self.type.name} matrix of {self.columns} columns are {self.codes.dtype} "
                f"{tuple(self.codes.shape)}, expected uint8 rows of {expected} bytes."
            )
        scale_shape = self.type.scale_shape(self.rows, self.columns)
        seen = None if self.scales is None else tuple(self.scales.shape)
        if seen != scale_shape:
            raise TensorShape(f"the scales of a {self.type.name} matrix are {seen}, expected {scale_shape}.")

    @property
    def rows(self) -> int:
        return self.codes.shape[0]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def dense(self) -> torch.Tensor:
        """The values, float32 [rows, columns], by the plain twin."""
        return dequantise(self.type, self.codes, self.scales)

    @classmethod
    def fp8(cls, codes: torch.Tensor, scale: torch.Tensor) -> PackedMatrix:
        """E4M3 codes [out, in] with E8M0 scales of 128 x 128 tiles."""
        return cls(TYPES["FP8"], codes.shape[1], codes.view(torch.uint8), scale.view(torch.uint8))

    @classmethod
    def fp4(cls, codes: torch.Tensor, scale: torch.Tensor) -> PackedMatrix:
        """E2M1 pairs [out, in / 2] with E8M0 scales [out, in / 32]."""
        return cls(TYPES["FP4"], 2 * codes.shape[1], codes.view(torch.uint8), scale.view(torch.uint8))

    @classmethod
    def floats(cls, values: torch.Tensor) -> PackedMatrix:
        """A contiguous matrix of 16- or 32-bit numbers, without a copy."""
        return cls(FLOAT_TYPES[values.dtype], values.shape[1], values.detach().view(torch.uint8))
