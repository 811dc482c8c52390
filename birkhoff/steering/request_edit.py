"""The base of all edits of a request: frozen plain data with a JSON form, checked on construction and again against a
model by `resolve`, which returns what a plan carries.

Each kind of edit has a name (`op`) and reads the entry of `interventions` with that name (`steering_fields.OPS`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from birkhoff.errors import SteeringError, quoted
from birkhoff.hooks.layers import parse_layers
from birkhoff.hooks.phases import PHASES
from birkhoff.hooks.positions import parse_positions
from birkhoff.hooks.resolved_edit import ResolvedEdit
from birkhoff.hooks.schema import Schema
from birkhoff.hooks.selector import PositionSelector, bind
from birkhoff.option_checks import listed

Modules = Mapping[str, Any]  # named vectors
# Token ids of a prompt, their number, or None if there is no prompt yet.
PromptIds = Sequence[int] | int | None


@dataclass(frozen=True)
class RequestEdit:
    """One edit, for the Python API; subclasses add their fields."""

    op: ClassVar[str] = ""

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from their defaults; `from_json` is the inverse."""
        out: dict[str, Any] = {"op": self.op}
        for f in fields(self):
            value = getattr(self, f.name)
            if value != f.default:
                plain = value.to_json() if hasattr(value, "to_json") else value
                out[f.name] = list(plain) if isinstance(plain, tuple) else plain
        return out

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        values = dict(raw)
        if values.pop("op", cls.op) != cls.op:
            raise SteeringError(f"op is {quoted(raw['op'])}, expected {cls.op!r}.")
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise SteeringError(
                f"{quoted(unknown[0])} is no field of {cls.__name__}, expected {', '.join(sorted(known))}."
            )
        return cls(**values)

    def resolve(
        self, schema: Schema, num_layers: int, modules: Modules, prompt: PromptIds, max_tokens: int
    ) -> ResolvedEdit:
        """Resolve against one model and one prompt. All errors are raised here; without a prompt, all except those
        about positions."""
        raise AssertionError("implemented by every kind of edit")


def parse_fields(edit: Any, **choices: Sequence[str]) -> None:
    """Parse `layers` and `where` of an edit and check fields that are one of a few words: `phase` and `choices`."""
    values = vars(edit)
    if values.get("layers") is not None:
        object.__setattr__(edit, "layers", parse_layers(values["layers"]))
    if values.get("where") is not None:
        object.__setattr__(edit, "where", parse_positions(listed(values["where"]), "where"))
    for name, allowed in {"phase": PHASES, **choices}.items():
        if values[name] not in allowed:
            raise SteeringError(f"{name} is {quoted(values[name])}, expected one of {', '.join(allowed)}.")


def bound(where: Any, prompt: PromptIds, max_tokens: int) -> PositionSelector | None:
    """The selector of an edit's `where` for a prompt; None if there is neither."""
    return None if where is None or prompt is None else bind(where, prompt, max_tokens, "where")
