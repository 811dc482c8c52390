"""`Gate`: the condition of an edit. `Add(..., when=Gate(...))` applies to the tokens where the gate is open.

    Gate("happy", "mlp_out", 3, above=1.5)                  the row's component along a vector, by name or as numbers
    Gate(module="gg", feature=34, above=0.5)                an attached dictionary's feature
    Gate(tokens=[11, 13]), Gate(tokens="digits")            the token itself: ids, or a class of texts

A vector or feature is read from the row of the same token, before the edits of its site; that site must not come after
the edited one. `resolve` returns a `SiteGate`, or the set of token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from birkhoff.errors import SteeringError, did_you_mean, quoted
from birkhoff.hooks import site_names
from birkhoff.hooks.gating import SiteGate
from birkhoff.hooks.layers import is_list
from birkhoff.hooks.schema import HookSchema, Schema
from birkhoff.option_checks import as_int
from birkhoff.steering.vector import Vector, finite_number
from birkhoff.steering.vector_file import SteeringVector

FeatureGate = Callable[[str, Any, float, int | None], SiteGate]  # module, feature, threshold, stream
TokenTexts = Callable[[], Sequence[str]]  # the text of every token id
TOKEN_CLASSES: Mapping[str, Callable[[str], bool]] = {
    "digits": str.isdigit,
    "letters": str.isalpha,
    "capitalised": str.istitle,
    "punctuation": lambda text: bool(text) and not any(c.isalnum() or c.isspace() for c in text),
    "newlines": lambda text: "\n" in text,
}


@dataclass(frozen=True)
class Gate:
    """One condition. `vector` may be a `SteeringVector`, which brings its hook and first layer; `stream` is the stream
    of a stream hook that a vector of one stream's width reads."""

    vector: Any = None
    hook: str | None = None
    layer: int | None = None
    above: float | None = None
    below: float | None = None
    stream: int | None = None
    module: str | None = None
    feature: Any = None
    tokens: Any = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        given = [name for name in ("vector", "feature", "tokens") if getattr(self, name) is not None]
        if len(given) != 1:
            raise SteeringError(
                f"a gate reads {' and '.join(given) or 'nothing'}, expected one of vector, feature and tokens."
            )
        kind = given[0]
        known = {
            "vector": ("hook", "layer", "above", "below", "stream"),
            "feature": ("module", "above", "stream"),
            "tokens": (),
        }[kind]
        extra = [
            f.name for f in fields(self) if f.name not in (kind, *known) and getattr(self, f.name) is not None
        ]
        if extra:
            raise SteeringError(f"a gate of {kind} has no {extra[0]}. Leave it out.")
        for name in ("above", "below"):
            if getattr(self, name) is not None:
                put(self, name, finite_number(getattr(self, name), name))
        for name in ("layer", "stream"):
            value = getattr(self, name)
            if value is not None and (as_int(value) is None or (name == "stream" and value < 0)):
                raise SteeringError(f"{name} of a gate is {quoted(value)}, expected a whole number.")
        if kind != "tokens" and self.above is None and self.below is None:
            raise SteeringError("a gate has no threshold. Give above= or below=.")
        if kind == "vector":
            put(self, "vector", _vector(self.vector))
        elif kind == "feature" and not isinstance(self.module, str):
            raise SteeringError(
                f"module of a gate is {quoted(self.module)}, expected an attached dictionary."
            )
        elif kind == "tokens":
            put(self, "tokens", _tokens(self.tokens))

    def to_json(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        if isinstance(self.vector, str):
            values["vector"] = f"@{self.vector}"
        elif self.vector is not None:
            values["vector"] = self.vector.to_json()
        if isinstance(self.tokens, tuple):
            values["tokens"] = list(self.tokens)
        return values

    @classmethod
    def parse(cls, value: Any) -> Gate:
        """A gate, or its JSON form."""
        if isinstance(value, Gate):
            return value
        if not isinstance(value, Mapping):
            raise SteeringError(f"when is {quoted(value)}, expected a Gate.")
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(value) - set(known))
        if unknown:
            raise SteeringError(f"{quoted(unknown[0])} is no field of a gate, expected {', '.join(known)}.")
        values = dict(value)
        vector = values.get("vector")
        if isinstance(vector, str):
            if not vector.startswith("@") or len(vector) == 1:
                raise SteeringError(
                    f"vector of a gate is {quoted(vector)}, expected '@' and the name of a module."
                )
            values["vector"] = vector[1:]
        return cls(**values)

    def resolve(
        self,
        schema: Schema,
        num_layers: int,
        modules: Mapping[str, Any],
        features: FeatureGate | None,
        texts: TokenTexts | None,
    ) -> SiteGate | frozenset[int]:
        """Resolve against one model. All errors are raised here."""
        if self.tokens is not None:
            return _token_ids(self.tokens, texts)
        if self.feature is not None:
            if features is None:
                raise SteeringError("dictionaries of features are not served here. Gate by a vector.")
            assert self.module is not None and self.above is not None
            return features(self.module, self.feature, self.above, self.stream)
        vector, hook, layer = self.vector, self.hook, self.layer
        if isinstance(vector, str):
            if vector not in modules:
                raise SteeringError(
                    f"there is no module named {quoted(vector)} for the gate.{did_you_mean(vector, modules)} "
                    "Register it first: engine.modules[name] = vector."
                )
            vector = modules[vector]
        if isinstance(vector, SteeringVector):
            hook, layer = hook or vector.hook, vector.layers[0] if layer is None else layer
        if hook is None or layer is None:
            raise SteeringError(
                f"the gate says no {'hook' if hook is None else 'layer'}, and its vector brings none."
            )
        if not hasattr(vector, "at"):
            raise SteeringError(f"{quoted(self.vector)} has vectors at several hooks. Gate by one vector.")
        key = site_names.resolve(hook, layer, schema, num_layers)
        direction = _direction(vector.at(layer).tensor(), schema[key[0]], key[0], self.stream)
        low = -torch.inf if self.above is None else self.above
        return SiteGate(key, direction, 0.0, low, torch.inf if self.below is None else self.below)


def gate_report(gate: SiteGate | frozenset[int], when: Any) -> dict[str, Any]:
    """What a response says about the gate of an edit."""
    if isinstance(gate, frozenset):
        return {"tokens": len(gate)}
    fields = ("module", "feature", "above", "below")
    given = {name: getattr(when, name, None) for name in fields}
    shown = {name: value for name, value in given.items() if value is not None}
    return {"reads": f"{gate.key[0]}[{gate.key[1]}]", **shown}


def _direction(vector: torch.Tensor, row: HookSchema, hook: str, stream: int | None) -> torch.Tensor:
    """The unit vector along which the rows of a hook are read, [width]."""
    if hook == "moe_topk":
        raise SteeringError("moe_topk is ids and weights, which have no component along a vector.")
    if row.ragged is not None:
        raise SteeringError(f"{hook} has any number of rows for a token, which no gate can read.")
    if len(row.logical_shape) == 2 and stream is not None:
        m, d = row.logical_shape
        if stream >= m:
            raise SteeringError(f"stream of the gate is {stream}, {hook} has 0..{m - 1}.")
        if len(vector) == row.width:
            vector = vector.view(m, d)[stream]
        if len(vector) == d:
            whole = vector.new_zeros(m, d)
            whole[stream] = vector
            vector = whole.flatten()
    elif stream is not None:
        raise SteeringError(f"stream of the gate is {stream}, but {hook} has one stream. Leave it out.")
    if len(vector) != row.width:
        raise SteeringError(f"the gate's vector has {len(vector)} numbers, {hook} has rows of {row.width}.")
    norm = float(vector.norm())
    if norm == 0:
        raise SteeringError("the gate's vector is zero, so nothing lies along it.")
    return vector / norm


def _vector(value: Any) -> Any:
    if isinstance(value, Mapping):
        return SteeringVector.from_json(value)
    return value if isinstance(value, (str, Vector, SteeringVector)) else Vector(value, "the gate's vector")


def _tokens(value: Any) -> Any:
    if isinstance(value, str):
        if value not in TOKEN_CLASSES:
            raise SteeringError(
                f"tokens of a gate is {quoted(value)}, expected token ids or one of {', '.join(TOKEN_CLASSES)}."
            )
        return value
    if not is_list(value) or not value or any(as_int(token) is None or token < 0 for token in value):
        raise SteeringError(f"tokens of a gate is {quoted(value)}, expected token ids.")
    return tuple(sorted(set(value)))


def _token_ids(tokens: Any, texts: TokenTexts | None) -> frozenset[int]:
    if not isinstance(tokens, str):
        return frozenset(tokens)
    if texts is None:
        raise SteeringError(f"there is no tokenizer to say which tokens are {tokens}. Give token ids.")
    belongs = TOKEN_CLASSES[tokens]
    return frozenset(token for token, text in enumerate(texts()) if belongs(text.strip(" ")))
