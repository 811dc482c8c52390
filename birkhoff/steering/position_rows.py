"""Rows by position for patches, such as the rows that another run had at those positions, and their alignment with the
tokens of the text they are patched into."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any

import numpy as np
import torch

from birkhoff.errors import SteeringError, quoted
from birkhoff.hooks.layers import is_list
from birkhoff.option_checks import as_int
from birkhoff.steering.vector import Vector


class PositionRows:
    """One row of numbers for each of some positions. Plain data, checked on construction, compared by content."""

    def __init__(self, rows: Mapping[int, Any]):
        if not isinstance(rows, Mapping) or not rows:
            raise SteeringError(
                f"rows is {quoted(rows)}, expected a row of numbers for at least one position."
            )
        checked: dict[int, Vector] = {}
        for position, row in rows.items():
            index = as_int(position)
            if index is None or index < 0:
                raise SteeringError(
                    f"rows has the position {quoted(position)}, expected whole numbers from 0."
                )
            checked[index] = row if isinstance(row, Vector) else Vector(row, f"the row of position {index}")
        widths = sorted({len(row) for row in checked.values()})
        if len(widths) > 1:
            raise SteeringError(f"the rows have {widths} numbers, expected one width for all positions.")
        self._rows = dict(sorted(checked.items()))

    @classmethod
    def captured(cls, rows: Any) -> PositionRows:
        """From captured rows, `output.acts[hook, layer]`, flattened stream by stream."""
        tensor, positions = rows.tensor, rows.positions
        if len(positions) != len(tensor):
            raise SteeringError(
                f"these {len(tensor)} captured rows have {len(positions)} positions; a reduced row stands at none. "
                "Capture without 'reduce', or patch with one vector."
            )
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise SteeringError(
                f"captured rows of {tensor.dtype} are not numbers as they were. Capture as float32."
            )
        return cls({int(position): row.flatten() for position, row in zip(positions, tensor)})

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(self._rows)

    def __len__(self) -> int:
        """The width of a row."""
        return len(next(iter(self._rows.values())))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PositionRows) and self._rows == other._rows

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"PositionRows({len(self._rows)} positions of {len(self)} numbers)"

    @cached_property
    def digest(self) -> str:
        content = "".join(f"{position} {row.digest}\n" for position, row in self._rows.items())
        return hashlib.sha256(b"birkhoff rows 1" + content.encode()).hexdigest()[:32]

    def at(self, layer: int) -> PositionRows:
        """The rows for a layer: the same for all layers."""
        return self

    def tensor(self) -> torch.Tensor:
        """[positions, width]."""
        return torch.stack([row.tensor() for row in self._rows.values()])

    def to_json(self) -> dict[str, Any]:
        return {"positions": list(self._rows), "rows": [row.to_json() for row in self._rows.values()]}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> PositionRows:
        unknown = sorted(set(raw) - {"positions", "rows"})
        positions: Any = raw.get("positions")
        rows: Any = raw.get("rows")
        if unknown or not is_list(positions) or not is_list(rows) or len(positions) != len(rows):
            fault = (
                f"has the unknown key {quoted(unknown[0])}"
                if unknown
                else "has not as many positions as rows"
            )
            raise SteeringError(
                f"the source {fault}, expected 'positions' and 'rows', one row for each position."
            )
        if any(as_int(position) is None for position in positions) or len(set(positions)) != len(positions):
            raise SteeringError(f"positions is {quoted(list(positions))}, expected whole numbers, each once.")
        return cls(dict(zip(positions, rows)))


class TensorRows:
    """A tensor of two dimensions or more as the source of a patch: one row in the shape of the hook's rows, or one row
    for each position from 0. Which of the two depends on the hook."""

    def __init__(self, values: Any):
        self._tensor = torch.as_tensor(values).detach().float().cpu()
        self._cache: dict[tuple[int, ...], Vector | PositionRows] = {}  # by shape of the row; layers share it

    @staticmethod
    def fits(value: Any) -> bool:
        """Whether a value is such a tensor."""
        return isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim > 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorRows) and self._tensor.equal(other._tensor)

    def __hash__(self) -> int:
        return hash(tuple(self._tensor.shape))

    def __repr__(self) -> str:
        return f"TensorRows({list(self._tensor.shape)})"

    def to_json(self) -> list[float]:
        """The numbers of one row. Rows by position say their positions: `PositionRows`."""
        if self._tensor.dim() != 2 or self._tensor.shape[0] != self._tensor.shape[1]:
            raise SteeringError(
                f"a tensor of shape {tuple(self._tensor.shape)} has no JSON form: it may be one row or several. Patch "
                "with a flat row, or with PositionRows({position: row})."
            )
        numbers: list[float] = self._tensor.flatten().tolist()
        return numbers

    def for_hook(self, hook: str, shape: tuple[int, ...]) -> Vector | PositionRows:
        """The row, or the rows by position, at a hook whose rows have this shape."""
        if shape not in self._cache:
            self._cache[shape] = self._resolve(hook, shape)
        return self._cache[shape]

    def _resolve(self, hook: str, shape: tuple[int, ...]) -> Vector | PositionRows:
        given = tuple(self._tensor.shape)
        if given == shape:
            return Vector(self._tensor.flatten(), "the row")
        if given[1:] in (shape, (math.prod(shape),), shape[-1:]):  # the last: rows of one stream
            return PositionRows({position: row.flatten() for position, row in enumerate(self._tensor)})
        expected = ", ".join(map(str, shape))
        raise SteeringError(
            f"the source has shape {given}, {hook} has rows of shape ({expected}). Give one row, or rows by position: "
            f"[T, {expected}]."
        )


ALIGN = ("position", "tokens")


class RunRows:
    """The rows of another run by (hook, layer), as the source of patches: a `Trace`, or captured rows (`output.acts`).

    Which of them a patch uses depends on the hook and layers of the edit and on the text it is applied to."""

    def __init__(self, rows: Mapping[Any, Any]):
        self._rows = rows
        self._trace_ids = getattr(rows, "token_ids", None)

    def __repr__(self) -> str:
        return f"RunRows({', '.join(f'{hook}[{layer}]' for hook, layer in self._rows)})"

    def to_json(self) -> Any:
        raise SteeringError(
            "a patch from a whole run has no JSON form. Name the run (engine.runs), or patch with the rows of one site."
        )

    def at_site(
        self,
        address: tuple[str, int],
        target: Sequence[int] | int | None,
        align: str,
        only: Collection[int] | None,
    ) -> PositionRows:
        """The rows of one site by position of the target text; `only` selects among those positions."""
        if address not in self._rows:
            known = ", ".join(dict.fromkeys(hook for hook, _ in self._rows)) or "nothing"
            raise SteeringError(
                f"the source of this patch has no rows of {address[0]}[{address[1]}]; it holds {known}. Trace or "
                "capture that hook at these layers."
            )
        rows = self._rows[address]
        if hasattr(rows, "positions"):
            captured = PositionRows.captured(rows)
            source, ids = captured.positions, tuple(rows.token_ids)
            tensor = rows.tensor
        else:
            tensor, source = rows, tuple(range(len(rows)))
            ids = tuple(self._trace_ids or ())
        row_of = {position: row for row, position in enumerate(source)}
        matches = {position: position for position in source}
        if align == "tokens" and target is not None:
            if isinstance(target, int) or len(ids) != len(source) or source != tuple(range(len(source))):
                raise SteeringError(
                    "align='tokens' compares the tokens of two whole texts, but the rows of the source are not those "
                    "of a whole text. Use a trace, or capture all positions."
                )
            matches = align_tokens(ids, target)
        if only is not None:
            missing = sorted(position for position in only if position not in matches)
            if missing and (align == "position" or len(missing) == len(only)):
                raise SteeringError(
                    f"where selects position {missing[0]}, for which the source has no row. Leave it out, or patch "
                    "from a text that has it."
                )
            matches = {position: matches[position] for position in only if position in matches}
        if not matches:
            raise SteeringError(
                "the two texts have no token in common, so nothing is aligned. Use align='position'."
            )
        return PositionRows(
            {position: tensor[row_of[origin]].detach().flatten() for position, origin in matches.items()}
        )


def align_tokens(source: Sequence[int], target: Sequence[int]) -> dict[int, int]:
    """Positions of `target` and the positions of `source` they correspond to.

    Equal tokens in the same order correspond. Where the texts differ, runs of equal length correspond one to one, and
    of runs of different length the last tokens, such as the last token of a name."""
    matches: dict[int, int] = {}
    for kind, a, a_end, b, b_end in SequenceMatcher(None, source, target, autojunk=False).get_opcodes():
        if a_end - a == b_end - b:
            matches |= dict(zip(range(b, b_end), range(a, a_end)))
        elif kind == "replace":
            matches[b_end - 1] = a_end - 1
    return matches
