"""Where the rows of a step belong: several sequences in one row dimension, each with consecutive positions.

Kernels that take a `RowIndex` process the chunks of all sequences in one launch. The row of position `p` of the same
chunk is `row - (position - p)` while `p >= start`; earlier positions are in the caches of the row's slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch


@dataclass(frozen=True, eq=False)
class RowIndex:
    """Per row, int64 [n]: the slot of its sequence, its position, and the first position of its chunk and the one after
    the last."""

    slots: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor
    stops: torch.Tensor

    @classmethod
    def of(cls, chunks: Sequence[tuple[int, int, int]], device: torch.device | str) -> RowIndex:
        """From (slot, start, stop) of each chunk in row order, with one copy to the device."""
        table = np.array(chunks, np.int64).reshape(-1, 3)
        lengths = table[:, 2] - table[:, 1]
        slots, starts, stops = (np.repeat(column, lengths) for column in table.T)
        first_rows = np.repeat(np.cumsum(lengths) - lengths, lengths)
        positions = starts + np.arange(len(starts)) - first_rows
        count = len(slots)
        index = np.zeros((4, count + count % 2), np.int64)  # rows at multiples of 16 bytes
        index[:, :count] = slots, positions, starts, stops
        return cls(*to_device(index, device)[:, :count])

    @cached_property
    def bases(self) -> torch.Tensor:
        """[n]: the row of position p of the same chunk is `base + p`."""
        return torch.arange(len(self.positions), device=self.positions.device) - self.positions


def to_device(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """Copy an array to `device`; to a GPU through pinned memory, without waiting for the work queued there."""
    tensor = torch.from_numpy(array)
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
