"""Rows of one hook and layer with their labels, as readers of capture files return them. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from birkhoff.capture.spec.dtypes import Array, to_float32

LABELS = ("positions", "token_ids", "phases", "requests")


@dataclass(slots=True)
class CaptureEntry:
    """`array` [rows, *row_shape]. A label is None if it was not stored or not requested."""

    layer: int
    hook: str
    array: Array
    dtype: str
    positions: list[int] | None = None
    token_ids: list[int] | None = None
    phases: list[str] | None = None  # "prefill" or "decode"
    scale: Array | None = None  # one factor per row, for fp8
    axes: list[str] | None = None
    meta: dict[str, Any] = field(default_factory=dict)  # facts about the request from the sidecar
    requests: list[str] | None = None  # request id of each row, where rows of several requests are mixed

    def values(self) -> Array:
        """The rows as float32, fp8 scales applied."""
        return to_float32(self.array, self.dtype, self.scale)

    def take(self, rows: Sequence[int] | Array) -> CaptureEntry:
        """A copy of these rows with their labels."""
        return self._labelled(self.array[rows], rows)

    def with_rows(self, array: Array, start: int) -> CaptureEntry:
        """This entry with other rows, which have the labels from index `start` on."""
        return self._labelled(array, range(start, start + len(array)))

    def _labelled(self, array: Array, rows: Sequence[int] | Array) -> CaptureEntry:
        labels: dict[str, Any] = {
            name: [values[row] for row in rows]
            for name in LABELS
            if (values := getattr(self, name)) is not None
        }
        scale = None if self.scale is None else self.scale[rows]
        return replace(self, array=array, scale=scale, **labels)

    def __len__(self) -> int:
        return len(self.array)


def concatenate(entries: Sequence[CaptureEntry]) -> CaptureEntry:
    """The rows of several entries of one site. A label that one entry lacks is None: it would label wrong rows."""
    first = entries[0]
    if len(entries) == 1:
        return first
    labels: dict[str, Any] = {}
    for name in LABELS:
        parts = [getattr(entry, name) for entry in entries]
        labels[name] = None if None in parts else [label for part in parts for label in part]
    scales = [entry.scale for entry in entries if entry.scale is not None]
    return replace(
        first,
        array=np.concatenate([entry.array for entry in entries]),
        scale=np.concatenate(scales) if len(scales) == len(entries) else None,
        **labels,
    )
