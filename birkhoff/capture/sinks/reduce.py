"""Operations on captured rows before storage, in this order: stream subset, projection, reduction, storage cast.

Rows are tensors [rows, *row_shape] on the device that computed them; nothing here synchronizes with that device until
a result is read. Reductions accept rows in any chunking: `last` and `max_norm` select a row and keep its bits; `mean`
and `sum` accumulate in float64, so two chunkings of n rows differ by at most n * 2**-52 times the sum of magnitudes,
far below the float32 of the result. A position is counted once, however often it is computed.

Storage casts, as |stored - x|: bf16 <= max(2**-8 |x|, 2**-134); fp16 <= max(2**-11 |x|, 2**-25), infinite from 65520;
fp8_e4m3 <= max(2**-4 |x|, 2**-10 scale) (1 + 2**-20), with one scale per row: its largest finite magnitude / 448, at
least 2**-126.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from birkhoff.errors import OptionError, quoted

_FP8_MAX = 448.0
_SMALLEST_SCALE = 2.0**-126  # below this, a float32 division would give subnormal numbers
_BLOCK = 64  # rows
_PLAIN = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def keep_streams(rows: torch.Tensor, streams: Sequence[int]) -> torch.Tensor:
    """[rows, m, ...] -> [rows, len(streams), ...]. Without an index tensor, whose creation synchronizes the device."""
    return torch.stack([rows[:, stream] for stream in streams], dim=1)


def project(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """[rows, *row_shape] @ [width, columns] -> [rows, columns], in float32.

    Rows are multiplied one at a time: the summation order of a batched product depends on the number of rows, and a
    row must not depend on which other rows are in its step."""
    flat, across = rows.flatten(1).float(), matrix.float().T
    return torch.stack([across.mv(row) for row in flat]) if len(flat) else flat.new_empty(0, matrix.shape[1])


@dataclass(frozen=True, eq=False)
class Transform:
    """Stream subset and projection of the rows of one hook."""

    streams: tuple[int, ...] | None = None
    matrix: torch.Tensor | None = None  # [width, columns]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self.streams is not None:
            rows = keep_streams(rows, self.streams)
        return rows if self.matrix is None else project(rows, self.matrix.to(rows.device, non_blocking=True))


def store(rows: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Cast [rows, *row_shape] to a dtype of capture files (`StoredRow.dtype`). Returns values and, for fp8, scales."""
    if dtype == "fp8_e4m3":
        return _store_fp8(rows)
    if dtype not in _PLAIN:
        known = ", ".join((*_PLAIN, "fp8_e4m3"))
        raise OptionError(f"rows cannot be stored as {quoted(dtype)}, expected one of {known}.")
    return rows.to(_PLAIN[dtype]), None


def _store_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values that are not finite become NaN, since e4m3fn has no infinity, and do not affect the scale of their row."""
    flat = rows.flatten(1).float()
    finite = flat.isfinite()
    largest = torch.where(finite, flat, 0.0).abs().amax(dim=1) if flat.shape[1] else flat.new_zeros(len(flat))
    # Divide by a tensor: CUDA multiplies by the reciprocal of a Python number, and scales would depend on the device.
    scale = torch.where(
        largest == 0, 1.0, (largest / largest.new_full((), _FP8_MAX)).clamp_min(_SMALLEST_SCALE)
    )
    # The largest quotient may round to just above 448; the cast rounds values up to 464 to 448.
    values = torch.where(finite, flat / scale.unsqueeze(1), torch.nan).to(torch.float8_e4m3fn)
    return values.view(rows.shape), scale


@dataclass(frozen=True, eq=False)
class Reduced:
    """The reduced row. `position` and `token_id` identify the selected row; a mean or sum has none."""

    row: torch.Tensor  # [1, *row_shape]
    count: int
    position: int | None = None
    token_id: int | None = None


class Accumulator:
    """Accepts rows in ascending positions. Rows at earlier positions were recomputed and are ignored."""

    def __init__(self, kind: _Reduction):
        self._kind = kind
        self._next_position = 0
        self._positions = array("q")
        self._token_ids = array("q")

    def add(self, rows: torch.Tensor, positions: Sequence[int], token_ids: Sequence[int]) -> None:
        skip = sum(position < self._next_position for position in positions)
        if skip < len(positions):
            self._kind.add(rows[skip:], len(self._positions))
            self._next_position = positions[-1] + 1
            self._positions.extend(int(position) for position in positions[skip:])
            self._token_ids.extend(int(token) for token in token_ids[skip:])

    def result(self) -> Reduced | None:
        """The reduction of the rows so far; None if there was no row."""
        count = len(self._positions)
        if count == 0:
            return None
        row, which = self._kind.result(count)
        if which is None:
            return Reduced(row, count)
        return Reduced(row, count, self._positions[which], self._token_ids[which])


def accumulator(reduce: str) -> Accumulator:
    """A new accumulator for the value of a `reduce` field."""
    kinds: dict[str, type[_Reduction]] = {"mean": _Mean, "sum": _Sum, "last": _Last, "max_norm": _MaxNorm}
    if reduce not in kinds:
        raise OptionError(f"reduce is {quoted(reduce)}, expected one of {', '.join(kinds)}.")
    return Accumulator(kinds[reduce]())


class _Reduction(Protocol):
    def add(self, rows: torch.Tensor, before: int) -> None:
        """Add one or more rows; `before` is the number of rows added earlier."""
        ...

    def result(self, count: int) -> tuple[torch.Tensor, int | None]:
        """The row [1, *row_shape], and the index of the selected row."""
        ...


class _Sum:
    def __init__(self) -> None:
        self._total: torch.Tensor | float = 0.0

    def add(self, rows: torch.Tensor, before: int) -> None:
        for block in rows.split(_BLOCK):  # converts one block to float64 at a time
            self._total = block.sum(dim=0, keepdim=True, dtype=torch.float64) + self._total

    def result(self, count: int) -> tuple[torch.Tensor, int | None]:
        return torch.as_tensor(self._total).float(), None


class _Mean(_Sum):
    def result(self, count: int) -> tuple[torch.Tensor, int | None]:
        return (torch.as_tensor(self._total) / count).float(), None


class _Last:
    def add(self, rows: torch.Tensor, before: int) -> None:
        self._row = rows[-1:].clone()  # a view would keep the whole chunk alive

    def result(self, count: int) -> tuple[torch.Tensor, int | None]:
        return self._row, count - 1


class _MaxNorm:
    """The row of largest Euclidean norm, the earliest if several are equal. Norms are summed in float64 and compared as
    float32, so that equal rows tie in any chunking. A row with a NaN counts as infinite."""

    def __init__(self) -> None:
        self._best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # row, norm, index

    def add(self, rows: torch.Tensor, before: int) -> None:
        norms = torch.linalg.vector_norm(rows.flatten(1), dim=1, dtype=torch.float64).float()
        norms = norms.nan_to_num(nan=torch.inf, posinf=torch.inf)
        at = norms.argmax().view(1)  # the first maximum
        row = rows.index_select(0, at)
        norm = norms.index_select(0, at)
        index = at + before
        if self._best is not None:
            old_row, old_norm, old_index = self._best
            better = norm > old_norm
            row = torch.where(better.view(-1, *[1] * (row.dim() - 1)), row, old_row)
            norm = torch.where(better, norm, old_norm)
            index = torch.where(better, index, old_index)
        self._best = row, norm, index

    def result(self, count: int) -> tuple[torch.Tensor, int | None]:
        assert self._best is not None
        return self._best[0], int(self._best[2])
