"""Option defaults from a TOML file.

A top-level key is the default of every command that has such an option; a table named after a command applies to that
command only and takes precedence. A key that no command has is an error, so that a misspelt one is not silently
ignored.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from birkhoff.errors import OptionError, did_you_mean
from birkhoff.small_file import CONFIG_BYTES, read_text


def read_defaults(file: Path, group: Any) -> dict[str, Any]:
    """Read the file and return the nested `default_map` for the commands of `group`."""
    try:
        table = tomllib.loads(read_text(file, CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise OptionError(f"the settings in {file} cannot be read: {reason}. Expected a TOML file.") from None
    return _group_defaults(table, {}, group, str(file))


def _group_defaults(
    table: dict[str, Any], inherited: dict[str, Any], group: Any, source: str
) -> dict[str, Any]:
    """Defaults by command. `inherited` are the checked keys of the enclosing tables, which have lower precedence."""
    tables = {key: value for key, value in table.items() if isinstance(value, dict)}
    common = {key: value for key, value in table.items() if key not in tables}
    for key in common:
        _check_key(key, _option_names(group), f"{source}: {key!r} is no flag")
    for key in tables:
        _check_key(key, set(group.commands), f"{source}: [{key}] is no verb")
    result: dict[str, Any] = {}
    shared = inherited | common
    for name, command in group.commands.items():
        specific = tables.get(name, {})
        command_source = f"{source} [{name}]"
        if hasattr(command, "commands"):
            result[name] = _group_defaults(specific, shared, command, command_source)
            continue
        known = _option_names(command)
        for key in specific:
            _check_key(key, known, f"{command_source}: {key!r} is no flag")
        result[name] = {key: value for key, value in shared.items() if key in known} | specific
    return result


def _option_names(command: Any) -> set[str]:
    """Names a file may set: the options of a command, or of all commands of a group."""
    if hasattr(command, "commands"):
        return {name for inner in command.commands.values() for name in _option_names(inner)}
    return {parameter.name for parameter in command.params if parameter.param_type_name == "option"} - {
        "help"
    }


def _check_key(key: str, known: set[str], problem: str) -> None:
    if key not in known:
        hint = did_you_mean(key, known)
        raise OptionError(f"{problem}, expected one of {', '.join(sorted(known))}.{hint}")
