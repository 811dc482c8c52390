"""Weights as GPU kernels read them: matrices with a common input stacked by rows, codes as stored, scales by column
block.

`PackedWeight.fp8` stacks matrices in the release format: E4M3 codes `[out, in]`, with one E8M0 byte per row and 128
inputs, so that matrices of any height can be stacked. `PackedWeight.plain` keeps 16- or 32-bit floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from birkhoff.kernels.packed import PackedMatrix

BLOCK = 128


@dataclass(frozen=True)
class PackedWeight:
    """One matrix `[out, in]`: floats, or uint8 codes with `scale` [in / 128, out]."""

    weight: torch.Tensor
    scale: torch.Tensor | None = None

    @property
    def out(self) -> int:
        return self.weight.shape[0]

    @property
    def inner(self) -> int:
        return self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def dense(self) -> torch.Tensor:
        """The dequantised matrix [out, in]; float32 if packed."""
        if self.scale is None:
            return self.weight
        factor = torch.exp2(self.scale.float() - 127).T.repeat_interleave(BLOCK, 1)[:, : self.inner]
        return self.weight.view(torch.float8_e4m3fn).float() * factor

    @classmethod
    def fp8(cls, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> PackedWeight:
        """Stack (codes [out, in], scale [out / 128, in / 128]) pairs; the codes of a single matrix are not copied."""
        codes = [c.view(torch.uint8) for c, _ in parts]
        scales = [s.view(torch.uint8).repeat_interleave(BLOCK, 0)[: len(c)] for c, s in parts]
        return cls(stack_rows(codes), torch.cat(scales).T.contiguous())

    @classmethod
    def of(cls, matrices: Sequence[PackedMatrix]) -> PackedWeight:
        """Matrices with a common input and type, FP8 or floats, stacked; a single matrix is not copied."""
        first = matrices[0]
        if first.type.name == "FP8":
            return cls.fp8([(m.codes, m.scales) for m in matrices if m.scales is not None])
        assert first.type.dtype is not None, f"GPU kernels read no {first.type.name}"
        return cls.plain([m.codes.view(first.type.dtype) for m in matrices])

    @classmethod
    def plain(cls, parts: Sequence[torch.Tensor]) -> PackedWeight:
        """Stack floats, in bfloat16 if that is exact (the release stores them in bfloat16)."""
        stacked = stack_rows(parts).detach()
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
