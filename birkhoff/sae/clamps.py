"""Clamps of features: five kinds, as plain data and as tensors.

    0 none       f
    1 absolute   v
    2 additive   f + v
    3 multiply   f * v
    4 bound      f limited to a minimum and a maximum, either of which may be missing

A value is a number, or `{"x_max": 2.0}`: a multiple of the largest recorded activation of that feature.
`only_if_active` leaves a feature unchanged if it is inactive in the row: at most zero, or zero under top-k. The
codes are part of the request format and do not change; new kinds are appended. `feature_change` is the arithmetic.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from birkhoff.errors import SaeError, quoted
from birkhoff.option_checks import FLOAT32_MAX, as_float32
from birkhoff.sae.dictionary import Sae

NONE, ABSOLUTE, ADDITIVE, MULTIPLY, BOUND = range(5)
CODES = {"none": NONE, "absolute": ABSOLUTE, "additive": ADDITIVE, "multiply": MULTIPLY, "bound": BOUND}
KINDS = ("absolute", "additive", "multiply", "min", "max", "bound")  # in requests; min and max are bounds


@dataclass(frozen=True)
class XMax:
    """A multiple of the feature's largest recorded activation."""

    times: float

    def to_json(self) -> dict[str, float]:
        return {"x_max": self.times}


Amount = float | XMax


@dataclass(frozen=True)
class FeatureClamp:
    """One clamp of one feature. `low` is the value of every kind except a bound, which uses `low` and `high`."""

    feature: int | str
    kind: str
    low: Amount | None
    high: Amount | None = None
    only_if_active: bool = False

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"kind": self.kind}
        if self.kind == "bound":
            ends = {"min": self.low, "max": self.high}
            out["value"] = {name: _amount_json(end) for name, end in ends.items() if end is not None}
        else:
            out["value"] = _amount_json(self.low)
        return out | ({"only_if_active": True} if self.only_if_active else {})


def parse_clamp(feature: Any, value: Any, kind: Any, only_if_active: Any, path: str) -> FeatureClamp:
    """Parse a clamp; `value` may be an object with `kind`, `value` and `only_if_active`."""
    if isinstance(feature, str) and feature.isdecimal() and len(feature) < 20:
        feature = int(feature)  # keys of JSON objects are strings
    if isinstance(feature, bool) or not isinstance(feature, (int, str)) or not _is_name(feature):
        raise SaeError(f"{path}: feature {quoted(feature)}, expected a number from 0 or a label.")
    if isinstance(value, Mapping) and "value" in value:
        unknown = sorted(set(value) - {"kind", "value", "only_if_active"})
        if unknown:
            raise SaeError(
                f"{path}: {quoted(unknown[0])} is no field of a clamp: kind, value, only_if_active."
            )
        kind = value.get("kind", kind)
        only_if_active = value.get("only_if_active", only_if_active)
        value = value["value"]
    if kind not in KINDS:
        raise SaeError(f"{path}: kind is {quoted(kind)}, expected one of {', '.join(KINDS)}.")
    if type(only_if_active) is not bool:
        raise SaeError(f"{path}: only_if_active is {quoted(only_if_active)}, expected true or false.")
    if kind == "bound":
        if not isinstance(value, Mapping) or not value or not set(value) <= {"min", "max"}:
            raise SaeError(
                f"{path}: a bound is {quoted(value)}, expected {{'min': ..., 'max': ...}} or one of them."
            )
        ends = [_amount(value[end], path) if end in value else None for end in ("min", "max")]
    else:
        amount = _amount(value, path)
        ends = [None, amount] if kind == "max" else [amount, None]
    low, high = ends
    if isinstance(low, float) and isinstance(high, float) and low > high:
        raise SaeError(f"{path}: the minimum {low} is above the maximum {high}. Swap them.")
    if kind == "multiply" and isinstance(low, XMax):
        raise SaeError(f"{path}: multiply takes a plain factor, not a share of x_max.")
    return FeatureClamp(feature, "bound" if kind in ("min", "max") else kind, low, high, only_if_active)


def _is_name(feature: int | str) -> bool:
    return feature != "" if isinstance(feature, str) else feature >= 0


def _amount(value: Any, path: str) -> Amount:
    relative = isinstance(value, Mapping) and set(value) == {"x_max"}
    inner = value["x_max"] if relative else value.times if isinstance(value, XMax) else value
    number = as_float32(inner)
    if number is None:
        raise SaeError(
            f"{path}: value is {quoted(value)}, expected a finite number of at most {FLOAT32_MAX:.3g}, or "
            "{'x_max': number}."
        )
    return XMax(number) if relative or isinstance(value, XMax) else number


def _amount_json(amount: Amount | None) -> Any:
    return amount.to_json() if isinstance(amount, XMax) else amount


@dataclass(frozen=True, eq=False)
class ClampRow:
    """The resolved clamps of one use of a dictionary, ascending by feature. Equal `content` means an equal effect."""

    features: tuple[int, ...]
    kinds: tuple[int, ...]
    lows: tuple[float, ...]
    highs: tuple[float, ...]
    gates: tuple[bool, ...]

    @cached_property
    def content(self) -> bytes:
        rows = zip(self.features, self.kinds, self.lows, self.highs, self.gates)
        return b"".join(
            struct.pack("<qbff?", feature, kind, low + 0.0, high + 0.0, gate)
            for feature, kind, low, high, gate in rows
        )

    @property
    def only_adds(self) -> bool:
        """Whether the change is the same for every row, so that nothing has to be encoded."""
        return all(kind == ADDITIVE for kind in self.kinds) and not any(self.gates)


def resolve_clamps(clamps: Sequence[FeatureClamp], sae: Sae, allowed: frozenset[int] | None) -> ClampRow:
    """Resolve labels and multiples of x_max with one dictionary; `allowed` are the features that can be clamped."""
    entries: dict[int, tuple[int, float, float, bool]] = {}
    for clamp in clamps:
        feature = sae.feature(clamp.feature)
        if allowed is not None and feature not in allowed:
            numbers = sorted(sae.feature_id(row) for row in allowed)
            some = ", ".join(map(str, numbers[:8])) + (", ..." if len(allowed) > 8 else "")
            raise SaeError(
                f"feature {sae.feature_id(feature)} cannot be clamped: this module was attached with features "
                f"[{some}]. Attach it with that feature too."
            )
        if feature in entries:
            raise SaeError(f"feature {sae.feature_id(feature)} is given twice. Give each feature once.")
        low = _number(clamp.low, sae, feature, -math.inf)
        high = _number(clamp.high, sae, feature, math.inf)
        if clamp.kind == "bound" and low > high:
            raise SaeError(f"feature {feature}: the minimum {low} is above the maximum {high}. Swap them.")
        entries[feature] = (
            CODES[clamp.kind],
            low,
            high if clamp.kind == "bound" else 0.0,
            clamp.only_if_active,
        )
    ordered = sorted(entries.items())
    columns = list(zip(*(entry for _, entry in ordered))) or [(), (), (), ()]
    return ClampRow(tuple(feature for feature, _ in ordered), *columns)


def _number(amount: Amount | None, sae: Sae, feature: int, missing: float) -> float:
    if amount is None:
        return missing
    if not isinstance(amount, XMax):
        return amount
    if sae.x_max is None:
        raise SaeError(
            f"feature {feature} is set to {amount.times} times its largest activation, and this dictionary has none "
            "recorded. Give a number, or a dictionary with x_max (birkhoff sae features records it)."
        )
    number = as_float32(amount.times * float(sae.x_max[feature]))
    if number is None:
        raise SaeError(
            f"feature {feature}: {amount.times} times its largest activation {float(sae.x_max[feature])} is more than "
            f"{FLOAT32_MAX:.3g}. Give a smaller factor."
        )
    return number


class ClampParameters(NamedTuple):
    """Clamps `[n, C]` of C features of n rows as parameters of one formula, see `feature_change`."""

    scale: torch.Tensor
    shift: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    gate: torch.Tensor

    def rows(self, index: torch.Tensor) -> ClampParameters:
        return ClampParameters(*(parameter.index_select(0, index) for parameter in self))


def clamp_parameters(
    groups: Sequence[Sequence[ClampRow]], features: Sequence[int], room: int
) -> ClampParameters:
    """Parameters `[groups, room]` on the host, one line for each group of clamps of different features. Columns are
    `features` in order; columns without a feature, and features that a group does not clamp, change nothing."""
    column = {feature: index for index, feature in enumerate(features)}
    scale = torch.zeros(len(groups), room)
    shift = torch.zeros(len(groups), room)
    low = torch.full((len(groups), room), -torch.inf)
    high = torch.full((len(groups), room), torch.inf)
    gate = torch.full((len(groups), room), torch.nan)
    for line, group in enumerate(groups):
        for row in group:
            for feature, kind, value, most, gated in zip(
                row.features, row.kinds, row.lows, row.highs, row.gates
            ):
                at = (line, column[feature])
                if kind == BOUND:
                    low[at], high[at] = value, most
                elif kind == MULTIPLY:
                    scale[at] = torch.tensor(value) - 1
                elif kind in (ABSOLUTE, ADDITIVE):
                    scale[at] = -1.0 if kind == ABSOLUTE else 0.0
                    shift[at] = value
                if gated:
                    gate[at] = 0.0
    return ClampParameters(scale, shift, low, high, gate)


def feature_change(
    f: torch.Tensor, clamps: ClampParameters, signed: bool, bounded: bool = True, gated: bool = True
) -> torch.Tensor:
    """f' - f of features `[n, C]` under their clamps, the only implementation of what a clamp does:

        f' - f = scale f + shift, limited to low - f .. high - f

    and 0 where f is inactive and gated (`gate` 0, else NaN): at most zero, or equal to zero for `signed`
    activations. Without any bound (`bounded` False) or gate (`gated` False) those operations would change nothing and
    are left out."""
    scale, shift, low, high, gate = clamps
    change = torch.addcmul(shift, scale, f)
    if bounded:
        change = torch.clamp(change, low - f, high - f)
    if gated:
        change.masked_fill_(f == gate if signed else f <= gate, 0.0)
    return change
