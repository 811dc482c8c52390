"""Normalisation of every row by itself, for dictionaries that were trained on normalised rows.

    none           the row
    layer_norm     (x - mean) / (std + 1e-5), std with n - 1; reconstructions are multiplied by std and moved by mean
    constant_norm  x sqrt(d) / |x|; reconstructions are divided by that factor

A factor per row is not linear, so unlike everything else that trainers do it cannot be folded into the weights. A
change D of the reconstruction changes the row by `scale` D.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

NORMS = ("none", "layer_norm", "constant_norm")
_EPS = 1e-5


class NormalizedRows(NamedTuple):
    """Rows to encode, and what turns a reconstruction of them back: `rows = (x - shift) / scale`, nearly."""

    rows: torch.Tensor  # [.., d]
    scale: torch.Tensor | None  # [.., 1], None for 1
    shift: torch.Tensor | None  # [.., 1], None for 0

    def restore(self, reconstruction: torch.Tensor) -> torch.Tensor:
        """The row of a reconstruction of the normalised row."""
        out = reconstruction if self.scale is None else reconstruction * self.scale
        return out if self.shift is None else out + self.shift

    def restore_change(self, change: torch.Tensor) -> torch.Tensor:
        """The change of the row of a change of the reconstruction."""
        return change if self.scale is None else change * self.scale


def normalize_rows(x: torch.Tensor, norm: str) -> NormalizedRows:
    """Normalise float rows `[.., d]`."""
    if norm == "none":
        return NormalizedRows(x, None, None)
    if norm == "layer_norm":
        mean = x.mean(-1, keepdim=True)
        centered = x - mean
        std = centered.std(-1, keepdim=True)
        return NormalizedRows(centered / (std + _EPS), std, mean)
    assert norm == "constant_norm", norm
    scale = x.norm(dim=-1, keepdim=True) / x.shape[-1] ** 0.5
    return NormalizedRows(x / scale.clamp(min=1e-30), scale, None)
