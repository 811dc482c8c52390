"""Layer selectors of requests, as plain data.

    "all"    3    [3, 10, -1]    {"layers": [...], "ranges": [[a, b], ...]}    {"every": 4, "from": 0}

Ranges include both ends; negative layers count from the end; the result is sorted without duplicates. Parsing
checks what does not depend on the model; `check` and `expand` check the rest against the number of layers. Errors
are `SelectorError`s of kind "form" (not a selector), "layer" (not a layer of the model) or "empty" (selects
nothing)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from birkhoff.errors import SelectorError, quoted
from birkhoff.option_checks import as_int, listed

_FORMS = (
    '"all", a list of layers, {"layers": [...], "ranges": [[first, last], ...]} or {"every": k, "from": j}'
)


@dataclass(frozen=True)
class LayerSelector:
    """The union of `layers` and `ranges`; or every k-th layer from `start`, where k is 1 for "all"."""

    layers: tuple[int, ...] = ()
    ranges: tuple[tuple[int, int], ...] = ()
    every: int | None = None
    start: int = 0

    def to_json(self) -> Any:
        if self.every is not None:
            return "all" if (self.every, self.start) == (1, 0) else {"every": self.every, "from": self.start}
        if not self.ranges:
            return list(self.layers)
        out: dict[str, Any] = {"layers": list(self.layers)} if self.layers else {}
        return out | {"ranges": [list(pair) for pair in self.ranges]}

    def check(self, num_layers: int, path: str = "layers") -> None:
        """Refuse layers that a model with `num_layers` layers does not have, and ranges whose start is after their
        end."""

        def known(layer: int, where: str) -> int:
            if -num_layers <= layer < num_layers:
                return layer % num_layers
            raise SelectorError(
                f"layer {quoted(layer)} does not exist: this model has layers 0..{num_layers - 1} "
                f"(or -{num_layers}..-1 from the end).",
                where,
                "layer",
            )

        for layer in self.layers:
            known(layer, path)
        for first, last in self.ranges:
            if known(first, f"{path}.ranges") > known(last, f"{path}.ranges"):
                raise _backwards(first, last, f"{path}.ranges")
        if self.every is not None:
            known(self.start, f"{path}.from")

    def check_not_empty(self, path: str = "layers") -> None:
        if self.every is None and not self.layers and not self.ranges:
            raise SelectorError(
                f'selects no layer. Name at least one, or write "all": {_FORMS}.', path, "empty"
            )

    def expand(self, num_layers: int, path: str = "layers") -> tuple[int, ...]:
        """The selected layers of a model with `num_layers` layers, ascending."""
        self.check(num_layers, path)
        self.check_not_empty(path)
        if self.every is not None:
            return tuple(range(self.start % num_layers, num_layers, self.every))
        chosen = {layer % num_layers for layer in self.layers}
        for first, last in self.ranges:
            chosen.update(range(first % num_layers, last % num_layers + 1))
        return tuple(sorted(chosen))


ALL_LAYERS = LayerSelector(every=1)


def parse_layers(value: Any, path: str = "layers") -> LayerSelector:
    """Parse a selector; one layer stands for a list of it. Checks that need the number of layers are made by `check`
    and `expand`."""
    value = listed(value)
    check_layers_form(value, path)
    if isinstance(value, LayerSelector):
        return value
    if isinstance(value, str):
        return ALL_LAYERS
    if not isinstance(value, Mapping):
        return LayerSelector(layers=_numbers(value, path))
    if "every" in value:
        every = _number(value["every"], f"{path}.every")
        start = _number(value.get("from", 0), f"{path}.from")
        if every < 1:
            raise SelectorError(f"is {every}, expected 1 or more.", f"{path}.every", "layer")
        return LayerSelector(every=every, start=start)
    layers = _numbers(value.get("layers", ()), f"{path}.layers")
    return LayerSelector(layers=layers, ranges=_pairs(value.get("ranges", ()), f"{path}.ranges"))


def check_layers_form(value: Any, path: str = "layers") -> None:
    """Refuse values that do not have the form of a selector on the wire, without checking their numbers. A bare number
    has not: `capture` of a request names layers in a list."""
    if isinstance(value, str):
        if value != "all":
            raise SelectorError(f"is {quoted(value)}, expected {_FORMS}.", path, "form")
    elif isinstance(value, Mapping):
        unknown = [key for key in value if key not in ("layers", "ranges", "every", "from")]
        if unknown:
            raise SelectorError(f"has the unknown key {quoted(unknown[0])}, expected {_FORMS}.", path, "form")
        if "every" in value or "from" in value:
            if "every" not in value or "layers" in value or "ranges" in value:
                raise SelectorError(f"mixes forms or lacks 'every', expected {_FORMS}.", path, "form")
        elif not value:
            raise SelectorError(f"is an empty object, expected {_FORMS}.", path, "form")
    elif not isinstance(value, LayerSelector) and not is_list(value):
        raise SelectorError(f"is {quoted(value)}, expected {_FORMS}.", path, "form")


def is_list(value: Any) -> bool:
    """Whether the value is a JSON array or its Python equivalent."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _number(value: Any, path: str) -> int:
    parsed = as_int(value)
    if parsed is None:
        raise SelectorError(f"is {quoted(value)}, expected a whole number.", path, "layer")
    return parsed


def _numbers(value: Any, path: str) -> tuple[int, ...]:
    if not is_list(value):
        raise SelectorError(f"is {quoted(value)}, expected a list of layers.", path, "layer")
    return tuple(sorted({_number(item, f"{path}[{index}]") for index, item in enumerate(value)}))


def _pairs(value: Any, path: str) -> tuple[tuple[int, int], ...]:
    if not is_list(value):
        raise SelectorError(f"is {quoted(value)}, expected a list of [first, last] pairs.", path, "layer")
    pairs = set()
    for index, item in enumerate(value):
        where = f"{path}[{index}]"
        if not is_list(item) or len(item) != 2:
            raise SelectorError(
                f"is {quoted(item)}, expected a pair [first, last], both included.", where, "layer"
            )
        first = _number(item[0], f"{where}[0]")
        last = _number(item[1], f"{where}[1]")
        if (first < 0) == (last < 0) and first > last:
            raise _backwards(first, last, where)
        pairs.add((first, last))
    return tuple(sorted(pairs))


def _backwards(first: int, last: int, path: str) -> SelectorError:
    return SelectorError(f"range [{first}, {last}] starts after its end. Swap the two.", path, "layer")
