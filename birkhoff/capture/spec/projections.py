"""Named matrices that captured rows can be multiplied with: `engine.projections["probe"] = matrix`.

A capture with `project="probe"` stores `row @ matrix`, such as probe scores, instead of rows. A matrix is
[width, columns], where width is that of a hook's row or of a subset of its streams; any other width is refused on
registration. Matrices are copied, kept as float32, and identified by a digest of their values: two captures are equal
only if their matrices are. Replacing a matrix does not affect running requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from birkhoff.capture.spec.estimate import has_streams
from birkhoff.errors import OptionError, quoted
from birkhoff.hooks.schema import Schema

_LONGEST_NAME = 256


@dataclass(frozen=True, eq=False)
class Projection:
    """`matrix` [width, columns] as float32 on the host; `digest` is 128 bits of its shape and values, in hex."""

    matrix: torch.Tensor
    digest: str


class Projections(MutableMapping[str, torch.Tensor]):
    """The matrices of one model, by name."""

    def __init__(self, schema: Schema):
        self._widths = _widths(schema)
        self._projections: dict[str, Projection] = {}

    def __setitem__(self, name: str, matrix: Any) -> None:
        if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
            raise OptionError(
                f"the name of a projection is {quoted(name)}, expected 1 to {_LONGEST_NAME} characters."
            )
        self._projections[name] = self._checked(name, matrix)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.find(name).matrix.clone()

    def __delitem__(self, name: str) -> None:
        self.find(name)
        del self._projections[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._projections)

    def __len__(self) -> int:
        return len(self._projections)

    def __contains__(self, name: object) -> bool:
        return name in self._projections

    def __repr__(self) -> str:
        return f"Projections({', '.join(f'{name}: {shape}' for name, shape in self.shapes.items())})"

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """(width, columns) by name, for the checks of a capture."""
        return {
            name: (projection.matrix.shape[0], projection.matrix.shape[1])
            for name, projection in self._projections.items()
        }

    def find(self, name: str) -> Projection:
        if name not in self._projections:
            known = ", ".join(sorted(self._projections)) or "none"
            raise OptionError(f"no projection is called {quoted(name)}. Registered: {known}.")
        return self._projections[name]

    def _checked(self, name: str, matrix: Any) -> Projection:
        what = f"projection {quoted(name)}"
        try:
            source = matrix.detach() if isinstance(matrix, torch.Tensor) else torch.as_tensor(matrix)
            values = (
                (source.real if source.is_complex() else source)
                .to("cpu", torch.float32, copy=True)
                .contiguous()
            )
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise OptionError(
                f"{what} is not a matrix of numbers ({quoted(error)}). Pass a tensor."
            ) from None
        if source.is_complex() or values.dim() != 2 or 0 in values.shape:
            raise OptionError(
                f"{what} has shape {tuple(values.shape)} of {source.dtype}, expected real numbers [width, columns]. "
                "A single direction is a matrix of one column: direction[:, None]."
            )
        if values.shape[0] not in self._widths:
            known = ", ".join(map(str, sorted(self._widths)))
            raise OptionError(
                f"{what} takes rows of {values.shape[0]} numbers, and no hook of this model has such rows. Widths: "
                f"{known}. Is it transposed?"
            )
        if not values.isfinite().all():
            raise OptionError(
                f"{what} holds a number that is not finite as float32. Every score would be lost."
            )
        shape = f"{values.shape[0]} {values.shape[1]} ".encode()
        return Projection(values, hashlib.sha256(shape + values.numpy().tobytes()).hexdigest()[:32])


def _widths(schema: Schema) -> set[int]:
    """All widths that rows of a hook can have, subsets of streams included."""
    widths = set()
    for hook in schema.values():
        widths.add(hook.width)
        if has_streams(hook):
            streams = hook.logical_shape[0]
            widths |= {count * hook.width // streams for count in range(1, streams)}
    return widths
