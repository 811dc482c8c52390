"""Weights as a decoding step on a GPU wants them: rows that read one input, codes as stored, scales by column block.

`PackedWeight.fp8` stacks matrices as the release stores them: E4M3 codes `[out, in]`, and per 128 inputs one E8M0 byte for
every row, so that any number of matrices may be stacked whatever their heights. `PackedWeight.plain` keeps 16- or 32-bit
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

BLOCK = 128


@dataclass(frozen=True)
class PackedWeight:
    """One matrix `[out, in]`: numbers, or uint8 codes with `scale` [in / 128, out]."""

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
        """The numbers [out, in], float32 where they are codes."""
        if self.scale is None:
            return self.weight
        factor = torch.exp2(self.scale.float() - 127).T.repeat_interleave(BLOCK, 1)[:, : self.inner]
        return self.weight.view(torch.float8_e4m3fn).float() * factor

    @classmethod
    def fp8(cls, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> PackedWeight:
        """Stacks (codes [out, in], scale [out / 128, in / 128]); a single matrix is taken where it lies."""
        codes = [c.view(torch.uint8) for c, _ in parts]
        scales = [s.view(torch.uint8).repeat_interleave(BLOCK, 0)[: len(c)] for c, s in parts]
        whole = codes[0] if len(codes) == 1 else torch.cat(codes)
        return cls(whole, torch.cat(scales).T.contiguous())

    @classmethod
    def plain(cls, parts: Sequence[torch.Tensor]) -> PackedWeight:
        """Numbers, in bfloat16 where that loses nothing: the release stores them so."""
        whole = (parts[0] if len(parts) == 1 else torch.cat(list(parts))).detach()
        short = whole.to(torch.bfloat16)
        return cls((short if bool((short == whole).all()) else whole).contiguous())
