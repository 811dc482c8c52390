"""Position selectors of captures and edits, as plain data.

    "last_prompt"  "all_prompt"  "all_generated"  "all"         words
    [0, 5, -1]                                                  positions in the text; -1 is the last of the prompt
    {"prompt": side, "generated": side, "exclude": side}        each side counted from its own first token
    side:  "all"  [ints]  {"window": [start, stop]}  {"token_ids": [ints]}; an object's keys all have to hold, and
           it may have its own "exclude". A window is half open, null is an open end, and positions of the prompt may
           count from its end. The outer "exclude" counts positions in the whole text, as the list form does.

Positions in a list are required: one that cannot exist is refused, one that was never computed is reported. Windows and
token ids are filters: they may match fewer tokens, and are refused only if nothing could ever match. `Positions` is
hashable plain data; `bind` makes a `PositionSelector` for one prompt (see `selector.py`). Errors are `SelectorError`s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from birkhoff.errors import SelectorError, quoted
from birkhoff.hooks.layers import is_list
from birkhoff.option_checks import as_int

_WORDS = ("last_prompt", "all_prompt", "all_generated", "all")
_SIDES = '"all", a list of places, {"window": [start, stop]} or {"token_ids": [...]}'
_MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True)
class Side:
    """Tokens that satisfy all conditions that are set; all tokens if none is. `indices` excludes other conditions."""

    indices: tuple[int, ...] | None = None
    window: tuple[int | None, int | None] | None = None
    token_ids: tuple[int, ...] | None = None
    exclude: Side | None = None

    def to_json(self) -> Any:
        if self.indices is not None:
            return list(self.indices)
        out: dict[str, Any] = {}
        if self.window is not None:
            out["window"] = list(self.window)
        if self.token_ids is not None:
            out["token_ids"] = list(self.token_ids)
        if self.exclude is not None:
            out["exclude"] = self.exclude.to_json()
        return out or "all"


_ALL = Side()


@dataclass(frozen=True)
class Positions:
    """Either `indices` in the whole text without `exclude`, or a side of the prompt and one of the generated tokens."""

    prompt: Side | None = None
    generated: Side | None = None
    indices: tuple[int, ...] | None = None
    exclude: Side | None = None

    def to_json(self) -> Any:
        if self.indices is not None:
            return list(self.indices)
        for word, meaning in BY_WORD.items():
            if self == meaning:
                return word
        sides = {"prompt": self.prompt, "generated": self.generated, "exclude": self.exclude}
        return {name: side.to_json() for name, side in sides.items() if side is not None}


BY_WORD: Mapping[str, Positions] = {
    "last_prompt": Positions(prompt=Side(indices=(-1,))),
    "all_prompt": Positions(prompt=_ALL),
    "all_generated": Positions(generated=_ALL),
    "all": Positions(prompt=_ALL, generated=_ALL),
}


def parse_positions(value: Any, path: str = "positions") -> Positions:
    """Parse a selector. Checks that need the prompt are made by `bind`."""
    if isinstance(value, Positions):
        return value
    if isinstance(value, str):
        if value not in BY_WORD:
            raise _refuse(f"is {quoted(value)}, expected one of {', '.join(_WORDS)}.", path)
        return BY_WORD[value]
    if is_list(value):
        return Positions(indices=_parse_indices(value, path))
    if not isinstance(value, Mapping):
        raise _refuse(
            f"is {quoted(value)}, expected one of {', '.join(_WORDS)}, a list of positions, or an object with "
            "'prompt' and 'generated'.",
            path,
        )
    unknown = [key for key in value if key not in ("prompt", "generated", "exclude")]
    if unknown:
        raise _refuse(
            f"has the unknown key {quoted(unknown[0])}, expected 'prompt', 'generated' and 'exclude'.", path
        )
    sides = {
        key: (_exclude if key == "exclude" else _side)(side, f"{path}.{key}", negative=key != "generated")
        for key, side in value.items()
        if side is not None
    }
    if "prompt" not in sides and "generated" not in sides:
        raise _refuse(
            "names neither 'prompt' nor 'generated', so nothing is selected. Give at least one side.", path
        )
    return Positions(sides.get("prompt"), sides.get("generated"), exclude=sides.get("exclude"))


def _side(value: Any, path: str, negative: bool) -> Side:
    """`negative`: positions may count back from the end of the prompt."""
    if isinstance(value, str) and value == "all":
        return _ALL
    if is_list(value):
        return Side(indices=_parse_indices(value, path, negative))
    if not isinstance(value, Mapping):
        raise _refuse(f"is {quoted(value)}, expected {_SIDES}.", path)
    unknown = [key for key in value if key not in ("window", "token_ids", "exclude")]
    if unknown or not value:
        seen = f"has the unknown key {quoted(unknown[0])}" if unknown else "is an empty object"
        raise _refuse(f"{seen}, expected {_SIDES}.", path)
    window = token_ids = exclude = None
    if "window" in value:
        window = _window(value["window"], f"{path}.window", negative)
    if "token_ids" in value:
        token_ids = _token_ids(value["token_ids"], f"{path}.token_ids")
    if "exclude" in value:
        exclude = _exclude(value["exclude"], f"{path}.exclude", negative)
    return Side(None, window, token_ids, exclude)


def _exclude(value: Any, path: str, negative: bool) -> Side:
    """Tokens to exclude, counted as in the side they are excluded from; without an "exclude" of their own."""
    side = _side(value, path, negative)
    if side == _ALL or side.exclude is not None:
        raise _refuse(
            "excludes everything, or has an 'exclude' of its own. Name the tokens to leave out.", path
        )
    return side


def _parse_indices(value: Any, path: str, negative: bool = True) -> tuple[int, ...]:
    if not is_list(value):
        raise _refuse(f"is {quoted(value)}, expected a list of positions.", path)
    if not value:
        raise _refuse("is an empty list, which selects nothing. Name at least one position.", path)
    return tuple(sorted({_parse_index(item, f"{path}[{i}]", negative) for i, item in enumerate(value)}))


def _parse_index(value: Any, path: str, negative: bool) -> int:
    index = as_int(value)
    if index is None:
        raise _refuse(f"is {quoted(value)}, expected a whole number.", path)
    if index < 0 and not negative:
        raise _refuse(
            f"is {quoted(index)}; generated tokens are counted from 0, for their end is not known.", path
        )
    return index


def _window(value: Any, path: str, negative: bool) -> tuple[int | None, int | None] | None:
    if not is_list(value) or len(value) != 2:
        raise _refuse(
            f"is {quoted(value)}, expected [start, stop], stop excluded; null is an open end.", path
        )
    start, stop = (
        None if end is None else _parse_index(end, f"{path}[{i}]", negative) for i, end in enumerate(value)
    )
    # With different signs the order depends on the prompt's length and is checked by `bind`.
    if start is not None and stop is not None and (start < 0) == (stop < 0) and start >= stop:
        raise _refuse(f"[{quoted(start)}, {quoted(stop)}) holds nothing: stop is excluded.", path)
    return None if start is None and stop is None else (start, stop)


def _token_ids(value: Any, path: str) -> tuple[int, ...]:
    if not is_list(value) or not value:
        raise _refuse(f"is {quoted(value)}, expected a non-empty list of token ids.", path)
    for i, item in enumerate(value):
        token = as_int(item)
        if token is None or not 0 <= token <= _MAX_TOKEN_ID:
            raise _refuse(f"is {quoted(item)}, expected a token id, 0 or more.", f"{path}[{i}]")
    return tuple(sorted({int(item) for item in value}))


def _refuse(message: str, path: str) -> SelectorError:
    return SelectorError(message, path, "position")
