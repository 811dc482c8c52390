"""What an engine and the analyses need of any model that they run: our own, or one of another library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from birkhoff.config import ModelConfig
from birkhoff.hooks.schema import HookSchema
from birkhoff.hooks.tap import Tap


class LanguageModel(Protocol):
    @property
    def config(self) -> ModelConfig: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def schema(self) -> dict[str, HookSchema]:
        """The hooks it has."""
        ...

    @property
    def settings(self) -> dict[str, Any]:
        """What besides weights, text, device and dtype determines the bits of an activation row."""
        ...

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]: ...

    def __call__(self, token_ids: torch.Tensor, tap: Tap = ...) -> torch.Tensor:
        """Next-token logits at every position of one text [T], float32 [T, vocab]."""
        ...

    def run_texts(
        self, texts: Sequence[Sequence[int]], tap: Callable[[Sequence[int]], Tap]
    ) -> list[torch.Tensor]:
        """Several whole texts in one pass -> normed residuals [T, d] of each; `tap` is called with the row of each
        text's first token."""
        ...

    def merge_streams(self, streams: torch.Tensor) -> torch.Tensor:
        """What the head makes of residual streams [..., m, d], for a model that has several."""
        ...

    def norm(self, residual: torch.Tensor) -> torch.Tensor:
        """The final norm of residuals [..., d]."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normed residuals [..., d] to float32 logits."""
        ...
