"""Checks of caller-supplied values. Each returns the checked value or raises a typed error that names the field.

`error` is the exception class to raise, `OptionError` by default. Booleans are never accepted as numbers."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from birkhoff.errors import BirkhoffError, OptionError, quoted

Errors = type[BirkhoffError]
FLOAT32_MAX = (2 - 2**-23) * 2.0**127


def as_int(value: object) -> int | None:
    """Return `value` as an int when it is a whole number (also a NumPy one), else None. Booleans give None."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def listed(value: Any) -> Any:
    """A list of one number for a single whole number, where a field takes a list of them; anything else unchanged."""
    number = as_int(value)
    return value if number is None else [number]


def as_float32(value: object) -> float | None:
    """Return `value` as a float when it is a number that float32 holds (no NaN, no infinity), else None.

    Edits are computed in float32: a larger number would become infinite on the way."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer larger than any float
        return None
    return number if -FLOAT32_MAX <= number <= FLOAT32_MAX else None


def check_int(
    name: str, value: object, low: int | None = 1, high: int | None = None, error: Errors = OptionError
) -> int:
    """Return `value` as an int within [low, high]; None leaves a bound open."""
    number = as_int(value)
    if number is None or (low is not None and number < low) or (high is not None and number > high):
        raise error(f"{name} is {quoted(value)}, expected {_range_text(low, high)}.")
    return number


def check_float(name: str, value: object, low: float, high: float, *, exclude_low: bool = False) -> float:
    """Return `value` as a finite float within [low, high], or (low, high] with `exclude_low`."""
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # an integer larger than any float
            number = math.nan
    if not low <= number <= high or (exclude_low and number == low):
        bounds = f"above {low:g} and up to {high:g}" if exclude_low else f"from {low:g} to {high:g}"
        raise OptionError(f"{name} is {quoted(value)}, expected a number {bounds}.")
    return number


def check_bool(name: str, value: object, error: Errors = OptionError) -> bool:
    """Return `value` when it is True or False."""
    if not isinstance(value, bool):
        raise error(f"{name} is {quoted(value)}, expected True or False.")
    return value


def check_choice(name: str, value: object, choices: Sequence[str]) -> str:
    """Return `value` when it is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise OptionError(f"{name} is {quoted(value)}, expected one of {', '.join(map(repr, choices))}.")
    return value


def _range_text(low: int | None, high: int | None) -> str:
    if low == 1 and high is None:
        return "a positive whole number"
    if high is None:
        return "a whole number" if low is None else f"a whole number from {low} up"
    return f"a whole number up to {high}" if low is None else f"a whole number from {low} to {high}"


def is_loopback(host: str) -> bool:
    """Whether `host` is localhost or a literal loopback address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
