"""What is done to single features: five kinds of clamp, as plain data and as tensors.

    0 none       f
    1 absolute   v
    2 additive   f + v
    3 multiply   f * v
    4 bound      f held between a minimum and a maximum, either of which may be missing

A value is a number, or `{"x_max": 2.0}`: so many times the largest activation recorded of that feature.
`only_if_active` leaves a feature alone that is not live in the row: above zero, or not zero under top-k. The codes are
those of the wire and keep their meaning; new kinds append.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from birkhoff.errors import SaeError, quoted
from birkhoff.sae.dictionary import Sae

NONE, ABSOLUTE, ADDITIVE, MULTIPLY, BOUND = range(5)
CODES = {"none": NONE, "absolute": ABSOLUTE, "additive": ADDITIVE, "multiply": MULTIPLY, "bound": BOUND}
KINDS = (
    "absolute",
    "additive",
    "multiply",
    "min",
    "max",
    "bound",
)  # as callers say them; min and max are bounds


@dataclass(frozen=True)
class XMax:
    """So many times the feature's largest recorded activation."""

    times: float

    def to_json(self) -> dict[str, float]:
        return {"x_max": self.times}


Amount = float | XMax


@dataclass(frozen=True)
class FeatureClamp:
    """One clamp of one feature. `low` is the value of every kind but a bound, which uses `low` and `high`."""

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
    """A clamp from what a caller wrote; `value` may itself say `kind`, `value` and `only_if_active`."""
    if isinstance(feature, str) and feature.isdecimal():
        feature = int(feature)  # keys of JSON objects are texts
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
    if isinstance(inner, bool) or not isinstance(inner, (int, float)) or not math.isfinite(inner):
        raise SaeError(f"{path}: value is {quoted(value)}, expected a finite number or {{'x_max': number}}.")
    return XMax(float(inner)) if relative or isinstance(value, XMax) else float(inner)


def _amount_json(amount: Amount | None) -> Any:
    return amount.to_json() if isinstance(amount, XMax) else amount


@dataclass(frozen=True, eq=False)
class ClampRow:
    """Clamps of one use of a dictionary, ascending by feature, numbers only; equal `content`, equal effect."""

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
        """The same is added whatever the row holds, so nothing has to be encoded."""
        return all(kind == ADDITIVE for kind in self.kinds) and not any(self.gates)


def resolve_clamps(clamps: Sequence[FeatureClamp], sae: Sae, allowed: frozenset[int] | None) -> ClampRow:
    """Labels and shares of x_max against one dictionary; `allowed` are the features whose rows are held."""
    found: dict[int, tuple[int, float, float, bool]] = {}
    for clamp in clamps:
        feature = sae.feature(clamp.feature)
        if allowed is not None and feature not in allowed:
            some = ", ".join(map(str, sorted(allowed)[:8])) + (", ..." if len(allowed) > 8 else "")
            raise SaeError(
                f"feature {feature} cannot be clamped: this module was attached with features [{some}]. "
                "Attach it with that feature too."
            )
        if feature in found:
            raise SaeError(f"feature {feature} is given twice. Give each feature once.")
        low = _number(clamp.low, sae, feature, -math.inf)
        high = _number(clamp.high, sae, feature, math.inf)
        if clamp.kind == "bound" and low > high:
            raise SaeError(f"feature {feature}: the minimum {low} is above the maximum {high}. Swap them.")
        found[feature] = (
            CODES[clamp.kind],
            low,
            high if clamp.kind == "bound" else 0.0,
            clamp.only_if_active,
        )
    ordered = sorted(found.items())
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
    return amount.times * float(sae.x_max[feature])


@dataclass(frozen=True, eq=False)
class ClampTable:
    """Clamps of several uses over the union of their features: `[uses, C]` each; code 0 where a use has none."""

    features: torch.Tensor  # [C]
    kind: torch.Tensor  # int8
    low: torch.Tensor
    high: torch.Tensor
    gate: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[Sequence[ClampRow]], device: torch.device) -> ClampTable:
        """One line for each group of rows, whose features are disjoint."""
        union = sorted({feature for group in rows for row in group for feature in row.features})
        place = {feature: column for column, feature in enumerate(union)}
        shape = (len(rows), len(union))
        kind = torch.zeros(shape, dtype=torch.int8)
        gate = torch.zeros(shape, dtype=torch.bool)
        low, high = torch.zeros(shape), torch.zeros(shape)
        for line, group in enumerate(rows):
            for row in group:
                columns = [place[feature] for feature in row.features]
                kind[line, columns] = torch.tensor(row.kinds, dtype=torch.int8)
                low[line, columns] = torch.tensor(row.lows)
                high[line, columns] = torch.tensor(row.highs)
                gate[line, columns] = torch.tensor(row.gates, dtype=torch.bool)
        made = (torch.tensor(union, dtype=torch.long), kind, low, high, gate)
        return cls(*(tensor.to(device) for tensor in made))

    def at(self, lines: torch.Tensor) -> LaidClamps:
        """The clamps of rows, each by its line."""
        kind, low, high, gate = (
            t.index_select(0, lines) for t in (self.kind, self.low, self.high, self.gate)
        )
        return LaidClamps(
            kind, low, high, gate, frozenset(self.kind.unique().tolist()), bool(self.gate.any())
        )


@dataclass(frozen=True, eq=False)
class LaidClamps:
    """Clamps `[n, C]` of rows. `kinds` are all codes among them, so that a step does only what somebody asked for."""

    kind: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    gate: torch.Tensor
    kinds: frozenset[int]
    gated: bool

    def apply(self, f: torch.Tensor, signed: bool) -> torch.Tensor:
        """f' of features `[n, C]`; `signed` activations are live wherever they are not zero."""
        out = f
        if ABSOLUTE in self.kinds:
            out = self.low if len(self.kinds) == 1 else torch.where(self.kind == ABSOLUTE, self.low, out)
        if ADDITIVE in self.kinds:
            out = torch.where(self.kind == ADDITIVE, f + self.low, out)
        if MULTIPLY in self.kinds:
            out = torch.where(self.kind == MULTIPLY, f * self.low, out)
        if BOUND in self.kinds:
            out = torch.where(self.kind == BOUND, torch.minimum(torch.maximum(f, self.low), self.high), out)
        if not self.gated:
            return out
        live = f != 0 if signed else f > 0
        return torch.where(self.gate & ~live, f, out)
