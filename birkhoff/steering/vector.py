"""A vector as plain data: immutable float32 numbers, compared and hashed by content."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any

import numpy as np
import torch

from birkhoff.errors import SteeringError, quoted
from birkhoff.option_checks import FLOAT32_MAX, as_float32


def finite_number(value: Any, name: str, path: str = "") -> float:
    """The value as a float if it is a number that float32 holds; booleans are refused. `path` is the request field for
    errors."""
    number = as_float32(value)
    if number is None:
        raise SteeringError(
            f"{name} is {quoted(value)}, expected a finite number of at most {FLOAT32_MAX:.3g}.", path
        )
    return number


class Vector:
    """One row of numbers, checked on construction: one-dimensional, finite, not empty.

    With `shaped` it may have the shape of the row, as [streams, d]; its numbers are flat, and `shape` is compared with
    the hook's when it is used."""

    def __init__(self, values: Any, name: str = "vector", shaped: bool = False):
        if isinstance(values, torch.Tensor) and not values.is_complex():
            values = values.detach().float().cpu().numpy()
        try:
            raw = np.asarray(values)
        except (TypeError, ValueError):  # rows of different lengths
            raw = np.asarray(None)
        if raw.dtype.kind not in "fiu":  # no strings, no booleans
            raise SteeringError(f"{name} is {quoted(values)}, expected a tensor or a list of numbers.")
        with np.errstate(over="ignore"):  # infinities are refused below
            array = raw.astype(np.float32)
        self.shape: tuple[int, ...] = array.shape
        if shaped and array.ndim > 1:
            array = array.flatten()
        if array.ndim != 1 or not array.size:
            raise SteeringError(
                f"{name} has shape {self.shape}, expected one row of numbers. Flatten it stream by "
                "stream for a stream hook."
            )
        if not np.isfinite(array).all():
            bad = int(np.flatnonzero(~np.isfinite(array))[0])
            raise SteeringError(
                f"{name}[{bad}] is {array[bad]}, expected finite numbers. Look for a division by zero "
                "where the vector was made."
            )
        array.setflags(write=False)
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vector) and np.array_equal(self._array, other._array)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Vector({len(self)} numbers, norm {np.linalg.norm(self._array):.4g})"

    @cached_property
    def digest(self) -> str:
        """128-bit digest of the content, as hex."""
        return hashlib.sha256(b"birkhoff vector 1" + self._array.tobytes()).hexdigest()[:32]

    def at(self, layer: int) -> Vector:
        """The row for a layer: the same for all layers."""
        return self

    def tensor(self) -> torch.Tensor:
        return torch.from_numpy(self._array.copy())

    def to_json(self) -> list[float]:
        numbers: list[float] = self._array.tolist()
        return numbers
