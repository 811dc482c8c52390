"""Upper bound of the cost of a capture, known before it runs: rows, and bytes as stored.

A stored row is the hook's row after stream subset, projection and storage cast, in that order; fp8 adds one float32
scale per row. A computed row (projected, or the mean or sum of several) is stored as float32 unless a dtype is given; a
row that was only selected keeps the dtype of the hook and thus its bits. Bytes are payload: file headers, labels and
JSON are not counted. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from birkhoff.hooks.schema import ITEM_BYTES, HookSchema
from birkhoff.hooks.selector import PositionSelector
from birkhoff.hooks.site_names import Address

DTYPES: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8_e4m3": "fp8_e4m3"}
REDUCTIONS = ("mean", "sum", "last", "max_norm")
_SCALE_BYTES = 4


@dataclass(frozen=True)
class StoredRow:
    """One row as stored: its shape, the name of its dtype in files, and the streams it was reduced to."""

    shape: tuple[int, ...]
    dtype: str
    streams: tuple[int, ...] | None = None

    @property
    def width(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.width + _SCALE_BYTES if self.dtype == "fp8_e4m3" else self.width * ITEM_BYTES[self.dtype]


def stored_row(
    hook: HookSchema,
    streams: Sequence[int] | None = None,
    columns: int | None = None,
    reduce: str | None = None,
    dtype: str | None = None,
) -> StoredRow:
    """How a row of `hook` is stored; `columns` is the width of the projection, `dtype` the wire name of the cast."""
    shape, kept = hook.logical_shape, None
    if streams is not None and has_streams(hook):
        kept = tuple(streams)
        shape = (len(kept), *shape[1:])
    if columns is not None:
        shape = (columns,)
    computed = columns is not None or reduce in ("mean", "sum")
    return StoredRow(
        shape, DTYPES[dtype] if dtype is not None else "float32" if computed else hook.dtype, kept
    )


def has_streams(hook: HookSchema) -> bool:
    """Whether the first axis of a row is the streams, so that a subset of them can be selected."""
    return hook.axes[:1] == ("stream",)


@dataclass(frozen=True)
class Estimate:
    """Upper bound of what a capture stores. `exact`: reached if the request runs to `max_tokens`."""

    sites: int
    prompt_rows: int  # per site, before any reduction
    generated_rows: int
    rows: int  # over all sites, as stored
    bytes: int
    exact: bool
    lowest_prompt_position: int | None  # a cached prefix can be used below it; None: any prefix
    bytes_by_hook: tuple[tuple[str, int], ...]

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "bytes_by_hook": dict(self.bytes_by_hook)}


def estimate(
    rows: Mapping[str, StoredRow],
    addresses: Sequence[Address],
    selector: PositionSelector,
    reduce: str | None = None,
    ragged_rows: Callable[[Address, int], int | None] = lambda address, tokens: None,
) -> Estimate:
    """Cost of storing `rows[hook]` at each address for the selected tokens. `ragged_rows` gives an upper bound for a
    number of tokens at a ragged hook, None for hooks with one row for each token."""
    early, late = selector.max_rows()
    each = early + late if reduce is None else min(early + late, 1)
    by_hook: dict[str, int] = {}
    total = 0
    exact = selector.exact
    for hook, layer in addresses:
        bound = ragged_rows((hook, layer), each)
        exact &= bound is None
        count = each if bound is None else bound
        total += count
        by_hook[hook] = by_hook.get(hook, 0) + count * rows[hook].nbytes
    return Estimate(
        sites=len(addresses),
        prompt_rows=early,
        generated_rows=late,
        rows=total,
        bytes=sum(by_hook.values()),
        exact=exact,
        lowest_prompt_position=selector.lowest_prompt_position(),
        bytes_by_hook=tuple(sorted(by_hook.items())),
    )
