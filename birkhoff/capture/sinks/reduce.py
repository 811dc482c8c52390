"""From the rows of a site to what is kept of them: stream subset, projection, reduction, storage cast, in that order.

Rows are tensors [rows, *row_shape] on whatever device they were computed; nothing waits for that device before a
result is asked for. Reductions take rows in any chunking: `last` and `max_norm` pick a row and keep its bits; `mean`
and `sum` add up in float64, so that two chunkings of n rows differ by at most n * 2**-52 times the sum of magnitudes,
far below the float32 the result is given in. A position is counted once, however often it is computed.

Storage casts, as |stored - x|: bf16 <= max(2**-8 |x|, 2**-134); fp16 <= max(2**-11 |x|, 2**-25), infinite from 65520;
fp8_e4m3 <= max(2**-4 |x|, 2**-10 scale) (1 + 2**-20), with one scale per row, its largest finite magnitude / 448 but at
least 2**-126. Finite numbers that become infinite are counted.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from birkhoff.capture.spec.estimate import StoredRow
from birkhoff.errors import OptionError, quoted

_FP8_MAX = 448.0
_SMALLEST_SCALE = 2.0**-126  # below it, float32 division would leave the normal numbers
_BLOCK = 64  # rows
_PLAIN = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def keep_streams(rows: torch.Tensor, streams: Sequence[int]) -> torch.Tensor:
    """[rows, m, ...] -> [rows, len(streams), ...]. No index tensor: making one would wait for the device."""
    return torch.stack([rows[:, stream] for stream in streams], dim=1)


def project(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """[rows, *row_shape] and [width, columns] -> [rows, columns], multiplied and kept as float32.

    One row at a time: a product of many adds up in an order that depends on how many, and a row must not depend on
    what else its step happened to bring."""
    flat, across = rows.flatten(1).float(), matrix.float().T
    return torch.stack([across.mv(row) for row in flat]) if len(flat) else flat.new_empty(0, matrix.shape[1])


@dataclass(frozen=True, eq=False)
class Transform:
    """What becomes of the rows of one hook before they are reduced and stored."""

    streams: tuple[int, ...] | None = None
    matrix: torch.Tensor | None = None  # [width, columns] on the rows' device

    @classmethod
    def of(cls, row: StoredRow, matrix: torch.Tensor | None = None) -> Transform:
        """As a resolved capture stores its rows; `matrix` is the one that its `project` names."""
        return cls(row.streams, matrix)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self.streams is not None:
            rows = keep_streams(rows, self.streams)
        return rows if self.matrix is None else project(rows, self.matrix)


@dataclass(frozen=True, eq=False)
class StoredRows:
    """Rows as they are kept, `values` [rows, *row_shape]; `scale` is one float32 per row of fp8."""

    values: torch.Tensor
    dtype: str
    scale: torch.Tensor | None = None
    overflowed: torch.Tensor | None = (
        None  # bf16, fp16: how many finite numbers became infinite; on the device
    )

    def restore(self) -> torch.Tensor:
        """The values as float32."""
        values = self.values.float()
        return values if self.scale is None else values * self.scale.view(-1, *[1] * (values.dim() - 1))


def store(rows: torch.Tensor, dtype: str) -> StoredRows:
    """Cast [rows, *row_shape] to a dtype of capture files (`StoredRow.dtype`)."""
    if dtype == "fp8_e4m3":
        return _store_fp8(rows)
    if dtype not in _PLAIN:
        known = ", ".join((*_PLAIN, "fp8_e4m3"))
        raise OptionError(f"rows cannot be stored as {quoted(dtype)}, expected one of {known}.")
    values = rows.to(_PLAIN[dtype])
    narrower = values.dtype != rows.dtype and dtype != "float32"
    lost = (values.isinf() & rows.isfinite()).sum() if narrower else None
    return StoredRows(values, dtype, None, lost)


def _store_fp8(rows: torch.Tensor) -> StoredRows:
    """Numbers that are not finite become NaN, the only such number fp8 has, and do not touch their row's scale."""
    flat = rows.flatten(1).float()
    finite = flat.isfinite()
    largest = torch.where(finite, flat, 0.0).abs().amax(dim=1) if flat.shape[1] else flat.new_zeros(len(flat))
    # By a tensor: CUDA multiplies with the reciprocal of a number, and a scale would depend on its device.
    scale = torch.where(
        largest == 0, 1.0, (largest / largest.new_full((), _FP8_MAX)).clamp_min(_SMALLEST_SCALE)
    )
    # The largest quotient may round to just above 448; up to 464 the cast makes that 448.
    values = torch.where(finite, flat / scale.unsqueeze(1), torch.nan).to(torch.float8_e4m3fn)
    return StoredRows(values.view(rows.shape), "fp8_e4m3", scale)


@dataclass(frozen=True, eq=False)
class Reduced:
    """One row for many. `position` and `token_id` say which row was picked; a mean or sum has none."""

    row: torch.Tensor  # [1, *row_shape]
    count: int
    position: int | None = None
    token_id: int | None = None


class Accumulator:
    """Takes rows in ascending positions. Rows at positions it has passed are computed again, and ignored."""

    def __init__(self, kind: _Reduction):
        self._kind = kind
        self._beyond = 0
        self._positions = array("q")
        self._token_ids = array("q")

    def add(self, rows: torch.Tensor, positions: Sequence[int], token_ids: Sequence[int]) -> None:
        skip = sum(position < self._beyond for position in positions)
        if skip < len(positions):
            self._kind.take(rows[skip:], len(self._positions))
            self._beyond = positions[-1] + 1
            self._positions.extend(int(position) for position in positions[skip:])
            self._token_ids.extend(int(token) for token in token_ids[skip:])

    def result(self) -> Reduced | None:
        """What the rows come to so far; None when there was no row."""
        count = len(self._positions)
        if count == 0:
            return None
        row, which = self._kind.result(count)
        if which is None:
            return Reduced(row, count)
        return Reduced(row, count, self._positions[which], self._token_ids[which])


def accumulator(reduce: str) -> Accumulator:
    """A fresh one for a `reduce` field."""
    kinds: dict[str, type[_Reduction]] = {"mean": _Mean, "sum": _Sum, "last": _Last, "max_norm": _MaxNorm}
    if reduce not in kinds:
        raise OptionError(f"reduce is {quoted(reduce)}, expected one of {', '.join(kinds)}.")
    return Accumulator(kinds[reduce]())


class _Reduction(Protocol):
    def take(self, rows: torch.Tensor, before: int) -> None:
        """At least one new row; `before` it, so many were taken."""
        ...

    def result(self, count: int) -> tuple[torch.Tensor, int | None]:
        """The row [1, *row_shape], and the number of the row that was picked."""
        ...


class _Sum:
    def __init__(self) -> None:
        self._total: torch.Tensor | float = 0.0

    def take(self, rows: torch.Tensor, before: int) -> None:
        for block in rows.split(_BLOCK):  # a block at a time is float64, not the whole piece
            self._total = block.sum(dim=0, keepdim=True, dtype=torch.float64) + self._total

    def result(self, count: int) -> tuple[torch.Tensor, int | None]:
        return torch.as_tensor(self._total).float(), None


class _Mean(_Sum):
    def result(self, count: int) -> tuple[torch.Tensor, int | None]:
        return (torch.as_tensor(self._total) / count).float(), None


class _Last:
    def take(self, rows: torch.Tensor, before: int) -> None:
        self._row = rows[-1:].clone()  # not a view: the piece it came from is not kept alive

    def result(self, count: int) -> tuple[torch.Tensor, int | None]:
        return self._row, count - 1


class _MaxNorm:
    """The row of greatest Euclidean norm, the earliest of equals. Norms are summed in float64 and compared as float32,
    so that equal rows tie whatever the shape they were summed in. A row with a NaN counts as infinite."""

    def __init__(self) -> None:
        self._best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # row, norm, number

    def take(self, rows: torch.Tensor, before: int) -> None:
        norms = torch.linalg.vector_norm(rows.flatten(1), dim=1, dtype=torch.float64).float()
        norms = norms.nan_to_num(nan=torch.inf, posinf=torch.inf)
        at = norms.argmax().view(1)  # the first of equals
        row = rows.index_select(0, at)
        norm = norms.index_select(0, at)
        number = at + before
        if self._best is not None:
            old_row, old_norm, old_number = self._best
            better = norm > old_norm
            row = torch.where(better.view(-1, *[1] * (row.dim() - 1)), row, old_row)
            norm = torch.where(better, norm, old_norm)
            number = torch.where(better, number, old_number)
        self._best = row, norm, number

    def result(self, count: int) -> tuple[torch.Tensor, int | None]:
        assert self._best is not None
        return self._best[0], int(self._best[2])
