"""Weights as GPU kernels read them: matrices with a common input stacked by rows, codes as stored, scales by column
block.

`PackedWeight.fp8` stacks matrices in the release format: E4M3 codes `[out, in]`, with one E8M0 byte per row and 128
inputs, so that matrices of any height can be stacked. `PackedWeight.plain` keeps 16- or 32-bit floats. Other types
stay rows of bytes, as in the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from birkhoff.kernels.packed import PackedMatrix, PackedType, dequantise
from birkhoff.kernels.quant import decode_e8m0

BLOCK = 128


@dataclass(frozen=True)
class PackedWeight:
    """One matrix `[out, in]`: floats, uint8 E4M3 codes with `scale` [in / 128, out], or rows of bytes of a `type` with
    `columns` columns. `tile_scale` are the scales of E4M3 codes as stored, if every 128 rows have common ones:
    [out / 128, in / 128] float32, for products on FP8 tensor cores."""

    weight: torch.Tensor
    scale: torch.Tensor | None = None
    type: PackedType | None = None
    columns: int = 0
    tile_scale: torch.Tensor | None = None

    @property
    def out(self) -> int:
        return self.weight.shape[0]

    @property
    def inner(self) -> int:
        return self.weight.shape[1] if self.type is None else self.columns

    @property
    def is_fp8(self) -> bool:
        return self.type is None and self.scale is not None

    @property
    def is_codes(self) -> bool:
        return self.type is not None or self.scale is not None

    @property
    def kernel_type(self) -> str:
        """What Triton kernels are specialised on: a packed type, "rows of FP8", or "numbers"."""
        return self.type.name if self.type is not None else "rows of FP8" if self.is_fp8 else "numbers"

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def dense(self) -> torch.Tensor:
        """The dequantised matrix [out, in]; float32 if packed."""
        if self.type is not None:
            return dequantise(self.type, self.weight, self.scale)
        if self.scale is None:
            return self.weight
        factor = torch.exp2(self.scale.float() - 127).T.repeat_interleave(BLOCK, 1)[:, : self.inner]
        return self.weight.view(torch.float8_e4m3fn).float() * factor

    @classmethod
    def fp8(cls, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> PackedWeight:
        """Stack (codes [out, in], scale [out / 128, in / 128]) pairs; the codes of a single matrix are not copied."""
        codes = [c.view(torch.uint8) for c, _ in parts]
        scales = [s.view(torch.uint8).repeat_interleave(BLOCK, 0)[: len(c)] for c, s in parts]
        whole = all(len(c) % BLOCK == 0 and c.shape[1] % BLOCK == 0 for c in codes)
        tiles = decode_e8m0(torch.cat([s.view(torch.uint8) for _, s in parts])) if whole else None
        return cls(stack_rows(codes), torch.cat(scales).T.contiguous(), tile_scale=tiles)

    @classmethod
    def of(cls, matrices: Sequence[PackedMatrix]) -> PackedWeight:
        """Matrices with a common input and type, stacked; a single matrix is not copied."""
        first = matrices[0]
        if first.type.name == "FP8":
            return cls.fp8([(m.codes, m.scales) for m in matrices if m.scales is not None])
        if first.type.dtype is not None:
            return cls.plain([m.codes.view(first.type.dtype) for m in matrices])
        scales = [m.scales for m in matrices if m.scales is not None]
        codes = stack_rows([m.codes for m in matrices])
        return cls(codes, stack_rows(scales) if scales else None, first.type, first.columns)

    @classmethod
    def stacked(cls, parts: Sequence[PackedWeight]) -> PackedWeight:
        """Weights of codes with a common input and type as one; a single one is not copied."""
        first = parts[0]
        if len(parts) == 1:
            return first
        scales = [part.scale for part in parts if part.scale is not None]
        scale = torch.cat(scales, dim=1 if first.is_fp8 else 0) if scales else None
        tiles = [part.tile_scale for part in parts if part.tile_scale is not None]
        tile_scale = torch.cat(tiles) if len(tiles) == len(parts) else None
        codes = torch.cat([part.weight for part in parts])
        return cls(codes, scale, first.type, first.columns, tile_scale)

    @classmethod
    def plain(cls, parts: Sequence[torch.Tensor]) -> PackedWeight:
        """Stack floats; float32 in bfloat16 if that is exact (the release stores them in bfloat16)."""
        stacked = stack_rows(parts).detach()
        if stacked.dtype is torch.float16:
            return cls(stacked.contiguous())
        bf16 = stacked.to(torch.bfloat16)
        return cls((bf16 if bool((bf16 == stacked).all()) else stacked).contiguous())


def stack_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Matrices of equal width as one; a view if they already follow each other in memory."""
    first = parts[0]
    address = first.data_ptr()
    for part in parts:
        if part.data_ptr() != address or not part.is_contiguous() or not address:
            return first if len(parts) == 1 else torch.cat(list(parts))
        address += part.nbytes
    rows = sum(len(part) for part in parts)
    return first.as_strided((rows, first.shape[1]), first.stride())
