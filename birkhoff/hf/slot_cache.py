"""Keys and values of all running requests, for models of Transformers: one row of a tensor per request.

A layer has one tensor of keys and one of values, [slots, heads, capacity, head_dim]; the entry of a token is at its
absolute position. `update` has the signature that attention modules of Transformers call: it writes the entries of the
step and returns those of the requests in the batch. Tokens of padding are not written. What a request may attend to is
decided by the mask alone, so entries of earlier requests in a slot are harmless."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

GROW = 128  # capacity is a multiple of this


@dataclass(frozen=True, eq=False)
class CacheStep:
    """Where the tokens of a step are: for token i, row `batch[i]`, column `column[i]` of the batch, and its position.
    `slots` are the slots of the rows of the batch, `length` the largest position plus one."""

    slots: torch.Tensor
    batch: torch.Tensor
    column: torch.Tensor
    positions: torch.Tensor
    length: int
    in_order: bool  # whether `slots` is 0, 1, 2, ...


class SlotCache:
    """`capacity` grows with the longest request, up to `max_context`."""

    def __init__(self, num_layers: int, slots: int, max_context: int):
        self._slots = slots
        self._max_context = max_context
        self._entries: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]
        self._step: CacheStep | None = None

    def begin(self, step: CacheStep) -> None:
        """Set the step that the next forward pass computes."""
        self._step = step

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always given with the tokens; models ask only where they are not."""
        return 0

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values [batch, heads, columns, head_dim]; return those of positions up to `length`."""
        assert self._step is not None, "a step was begun"
        step = self._step
        if step.length > self._capacity(layer_idx):
            self._grow(layer_idx, key, value, step.length)
        kept = []
        for stored, new in zip(self._entries[layer_idx], (key, value)):
            stored[step.slots[step.batch], :, step.positions] = new[step.batch, :, step.column]
            rows = stored[: len(step.slots)] if step.in_order else stored[step.slots]
            kept.append(rows[:, :, : step.length])
        return kept[0], kept[1]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for layer in self._entries for tensor in layer)

    def _capacity(self, layer: int) -> int:
        return self._entries[layer][0].shape[2] if self._entries[layer] else 0

    def _grow(self, layer: int, key: torch.Tensor, value: torch.Tensor, length: int) -> None:
        old = self._capacity(layer)
        capacity = max(-(-length // GROW) * GROW, min(2 * old, self._max_context))
        grown = []
        for index, like in enumerate((key, value)):
            tensor = like.new_zeros(self._slots, like.shape[1], capacity, like.shape[3])
            if old:
                tensor[:, :, :old] = self._entries[layer][index]
            grown.append(tensor)
        self._entries[layer] = grown
