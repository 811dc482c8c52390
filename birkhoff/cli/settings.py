"""Defaults for flags from a TOML file.

A key at the top is a default for every verb that has such a flag; a table named like a verb is for that verb alone and
wins. A key that no verb knows is refused by name: a misspelt setting must not look as if it worked.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

from birkhoff.errors import OptionError


def defaults_from(file: Path, group: Any) -> dict[str, Any]:
    """What `group`'s verbs take as their defaults, in the nested form the command parser wants."""
    try:
        with file.open("rb") as stream:
            given = tomllib.load(stream)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise OptionError(f"the settings in {file} cannot be read: {reason}. Expected a TOML file.") from None
    return _for_verbs(given, {}, group, str(file))


def _for_verbs(given: dict[str, Any], outer: dict[str, Any], group: Any, where: str) -> dict[str, Any]:
    """`outer` holds the keys of the tables around this one; they have been checked and count for less."""
    tables = {key: value for key, value in given.items() if isinstance(value, dict)}
    common = {key: value for key, value in given.items() if key not in tables}
    for key in common:
        _check(key, _flags(group), f"{where}: {key!r} is no flag")
    for key in tables:
        _check(key, set(group.commands), f"{where}: [{key}] is no verb")
    result: dict[str, Any] = {}
    for name, verb in group.commands.items():
        own = tables.get(name, {})
        around = outer | common
        place = f"{where} [{name}]"
        if hasattr(verb, "commands"):
            result[name] = _for_verbs(own, around, verb, place)
            continue
        known = _flags(verb)
        for key in own:
            _check(key, known, f"{place}: {key!r} is no flag")
        result[name] = {key: value for key, value in around.items() if key in known} | own
    return result


def _flags(verb: Any) -> set[str]:
    """The names a file may set: the verb's options, or those of any verb inside it."""
    if hasattr(verb, "commands"):
        return {name for inner in verb.commands.values() for name in _flags(inner)}
    return {parameter.name for parameter in verb.params if parameter.param_type_name == "option"} - {"help"}


def _check(key: str, known: set[str], problem: str) -> None:
    if key not in known:
        close = difflib.get_close_matches(key, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise OptionError(f"{problem}, expected one of {', '.join(sorted(known))}.{hint}")
