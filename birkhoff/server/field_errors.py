"""What is wrong with a field of a request body, in one sentence: its path, what was seen and what was expected.

pydantic reports every branch of a union. A field that takes a string or an array, and gets an array that is too long,
has two errors: it is no string, and it has too many items. The message is about the branch whose type fits; if none
fits, it names the types of all branches."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from birkhoff.errors import did_you_mean, quoted

# What a field may be, by the error that says it is not.
_TYPES = {
    "string_type": "a string",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
_LENGTHS = {
    "too_short": ("min_length", "at least", "items"),
    "too_long": ("max_length", "at most", "items"),
    "string_too_short": ("min_length", "at least", "characters"),
    "string_too_long": ("max_length", "at most", "characters"),
}
MAX_LISTED_FIELDS = 16  # completion calls have many more
MAX_WORD = 24
FIELD_INVALID = "field-invalid"
FIELD_UNKNOWN = "field-unknown"
_BRANCHES = {"str", "int", "float", "bool", "constrained-str", "constrained-int", "constrained-float"}
Problem = Any  # pydantic's ErrorDetails


def explain(problems: Sequence[Problem], fields: Collection[str]) -> tuple[str, str, str]:
    """The path of the first invalid field, a sentence about it and the code of the error. `fields` are the names that
    the body has."""
    root = field_path(problems[0]["loc"][:1])
    same = [problem for problem in problems if field_path(problem["loc"][:1]) == root]
    chosen = max(same, key=_fit)
    if chosen["type"] == "extra_forbidden":
        name, owner = str(chosen["loc"][-1]), field_path(chosen["loc"][:-1])  # any key, also one like `str`
        shown = f"{owner}.{name[:64]}" if owner else name[:64]
        return shown, unknown_field(shown, name, () if owner else fields), FIELD_UNKNOWN
    return *_invalid_field(chosen, same), FIELD_INVALID


def _invalid_field(chosen: Problem, same: Sequence[Problem]) -> tuple[str, str]:
    """The path of the field that `chosen` is about, and a sentence; `same` are all problems of its top-level field."""
    path = field_path(chosen["loc"])
    kind, context, value = chosen["type"], chosen.get("ctx", {}), chosen["input"]
    where = path or "the body"
    if kind == "missing":
        return path, f"{where} is missing. Add it."
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return path, f"{where} is {seen(value)}, expected {words} {_number(context[name])}."
    if kind in _LENGTHS:
        name, words, unit = _LENGTHS[kind]
        return path, f"{where} has {len(value)} {unit}, expected {words} {context[name]}."
    if kind == "string_pattern_mismatch":
        return path, f"{where} is {seen(value)}, expected a string that matches {context['pattern']}."
    if kind in _TYPES or kind == "literal_error":
        at_path = [problem for problem in same if field_path(problem["loc"]) == path]
        types = [_TYPES.get(problem["type"]) or problem["ctx"]["expected"] for problem in at_path]
        return path, f"{where} is {seen(value)}, expected {' or '.join(dict.fromkeys(types))}."
    message = chosen["msg"].removeprefix("Value error, ")
    return path, f"{where}: {message[0].lower() + message[1:]}."


def unknown_field(path: str, name: str, fields: Collection[str]) -> str:
    """The sentence about a field that a call does not have, with the nearest name or, if these are few, all of them."""
    listed = f" It has: {', '.join(sorted(fields))}." if 0 < len(fields) <= MAX_LISTED_FIELDS else ""
    return f"{path!a} is no field of this call.{did_you_mean(name[:64], fields) or listed or ' Remove it.'}"


def _number(bound: float) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def _fit(problem: Problem) -> tuple[int, bool]:
    """How well the branch of a union fits that has this error: by its depth, then whether the type is right."""
    parts = [part for part in problem["loc"] if isinstance(part, int) or _is_field(part)]
    return len(parts), problem["type"] not in _TYPES and problem["type"] != "literal_error"


def seen(value: object) -> str:
    """A value of a body for a message, as JSON writes it; of an array or an object only what it is. Of strings only a
    single short word is shown: a longer one may be a prompt or a key, which no message holds."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, str) and (len(value) > MAX_WORD or any(map(str.isspace, value))):
        return f"a string of {len(value)} characters"
    return "an object" if isinstance(value, dict) else quoted(value)


def field_path(location: tuple[int | str, ...]) -> str:
    """pydantic's error location as `a.b[0]`, without the union branches it also lists."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif _is_field(part):
            path += f".{part[:64]}" if path else part[:64]
    return path


def _is_field(part: str) -> bool:
    """Whether a part of a location is a key of the body and not the name of a branch: `str`, `list[int]`, a class."""
    return part not in _BRANCHES and part.replace("_", "").isalnum() and not part[0].isupper()
