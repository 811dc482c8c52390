"""Interfaces of compiled replacements for sublayers.

A module with an attribute `compiled` calls that object instead of its own operations for every input the object
accepts. The attribute is None until something attaches a replacement, as `birkhoff.decode.cpu` does. A replacement
computes the same function; it accepts only inputs for which no gradient is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from birkhoff.hooks.tap import Tap
from birkhoff.kernels.rope import Phases
from birkhoff.model.batch import Batch
from birkhoff.model.rope import StepPhases
from birkhoff.model.state import Fresh, LayerState


class CompiledMixer(Protocol):
    """Replaces `Mixer.read` and `Mixer.write`."""

    def accepts(self, streams: torch.Tensor) -> bool: ...

    def read(
        self, streams: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]: ...

    def write(
        self, streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
    ) -> torch.Tensor: ...


class CompiledHeadMixer(Protocol):
    """Replaces `HeadMixer.forward`."""

    def accepts(self, streams: torch.Tensor) -> bool: ...

    def __call__(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


class CompiledAttention(Protocol):
    """Replaces `Attention.forward`."""

    def accepts(self, batch: Batch, state: LayerState | Fresh) -> bool: ...

    def __call__(
        self, x: torch.Tensor, batch: Batch, phases: Phases, state: LayerState | Fresh, tap: Tap
    ) -> torch.Tensor: ...


class CompiledMoE(Protocol):
    """Replaces `MoE.forward`."""

    def accepts(self, x: torch.Tensor) -> bool: ...

    def __call__(self, x: torch.Tensor, batch: Batch, tap: Tap) -> torch.Tensor: ...


class CompiledMTPInput(Protocol):
    """Replaces the projections that join streams and embedding in front of the MTP block."""

    def accepts(self, streams: torch.Tensor) -> bool: ...

    def __call__(self, streams: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor: ...


class CompiledLayers(Protocol):
    """Replaces whole layers in which nothing is captured or edited."""

    def accepts(self, batch: Batch, state: object) -> bool: ...

    def __call__(
        self,
        streams: torch.Tensor,
        first: int,
        stop: int,
        batch: Batch,
        phases: StepPhases,
        states: Sequence[LayerState],
    ) -> torch.Tensor:
        """Streams [n, m, d] before layer `first` -> after layer `stop - 1`; `states` are those of all layers."""
        ...
