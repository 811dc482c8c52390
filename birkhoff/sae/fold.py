"""Folds what trainers do around a dictionary into its weights, so that the formulas of `Sae` apply.

The weights start as the trainer stores them; each method returns weights that give the same features and
reconstructions without that step. Computed in float64 and rounded once at the end, by `Sae`. Order matters: steps
closest to the weights are undone first (decoder norms, then the bias on the input, then the scale of the input, then
the removal of its mean).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch


@dataclass(frozen=True, eq=False)
class SaeWeights:
    """`gate_bias` is None except for gated dictionaries, where `encoder_bias` is the bias of the magnitude."""

    encoder: torch.Tensor  # [F, d]
    encoder_bias: torch.Tensor  # [F]
    decoder: torch.Tensor  # [F, d]
    decoder_bias: torch.Tensor  # [d]
    threshold: torch.Tensor | None = None  # [F]
    gate_bias: torch.Tensor | None = None  # [F]
    scale: torch.Tensor | None = None  # [F], the magnitude's encoder rows are `scale` times the gate's

    def double(self) -> Self:
        return replace(
            self, **{name: value.double() for name, value in vars(self).items() if value is not None}
        )

    def decoder_norms(self, threshold_too: bool) -> Self:
        """Fold in: features multiplied by the norm of their decoder row after encoding and divided before decoding."""
        norms = self.decoder.norm(dim=1)
        norms = torch.where(norms > 0, norms, 1.0)
        changed = {
            "encoder": self.encoder * norms[:, None],
            "decoder": self.decoder / norms[:, None],
            "encoder_bias": self.encoder_bias * norms,
        }
        if threshold_too and self.threshold is not None:
            changed["threshold"] = self.threshold * norms
        if self.gate_bias is not None:
            changed["gate_bias"] = self.gate_bias * norms
        return replace(self, **changed)

    def bias_on_input(self) -> Self:
        """Fold in: the decoder's bias subtracted from a row before encoding."""
        shift = self.encoder @ self.decoder_bias
        changed = {"encoder_bias": self.encoder_bias - (shift if self.scale is None else shift * self.scale)}
        if self.gate_bias is not None:
            changed["gate_bias"] = self.gate_bias - shift
        return replace(self, **changed)

    def input_scale(self, factor: float) -> Self:
        """Fold in: rows multiplied by `factor` before encoding, and reconstructions divided by it."""
        return replace(
            self,
            encoder=self.encoder * factor,
            decoder=self.decoder / factor,
            decoder_bias=self.decoder_bias / factor,
        )

    def centered(self) -> Self:
        """Fold in: the mean of a row's numbers subtracted from it before encoding."""
        return replace(self, encoder=self.encoder - self.encoder.mean(dim=1, keepdim=True))

    def arguments(self) -> dict[str, torch.Tensor]:
        """Arguments of `Sae`, whose encoder bias is that of the gate and whose magnitude is computed from the gate."""
        plain = {"encoder": self.encoder, "decoder": self.decoder, "decoder_bias": self.decoder_bias}
        if self.gate_bias is not None:
            assert self.scale is not None
            shift = self.encoder_bias - self.scale * self.gate_bias
            return plain | {"encoder_bias": self.gate_bias, "scale": self.scale, "shift": shift}
        plain["encoder_bias"] = self.encoder_bias
        # Trainers rectify before they compare, so a threshold below zero acts like zero.
        return plain if self.threshold is None else plain | {"threshold": self.threshold.clamp(min=0)}
