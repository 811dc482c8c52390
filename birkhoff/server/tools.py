"""Tools of a call: which ones the model is told about, and whether it must call one.

`auto` leaves the choice to the model. `required` and a named function force a call through a grammar, so that the
answer is one even from a model that was never taught tools; `none` hides them.
"""

from __future__ import annotations

import re
from typing import Any

from birkhoff.errors import quoted
from birkhoff.server.api_errors import bad
from birkhoff.server.json_grammar import Grammars, MakeMask, forced_call

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
Tools = list[dict[str, Any]]


def checked_tools(tools: Tools | None) -> Tools | None:
    """Function tools with names; anything else is refused by its place."""
    for place, tool in enumerate(tools or ()):
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, dict):
            kind = quoted(tool.get("type"), 40)
            raise bad(
                f"tools[{place}]: expected a function; tools of type {kind} are not served.",
                f"tools[{place}]",
            )
        if not isinstance(function.get("name"), str) or not _NAME.match(function["name"]):
            raise bad(
                f"tools[{place}].function.name is {quoted(function.get('name'), 80)}, expected 1 to 64 letters, "
                "digits, dots, dashes or underscores.",
                f"tools[{place}].function.name",
            )
        if not isinstance(function.get("parameters", {}), dict | None):
            raise bad(
                f"tools[{place}].function.parameters: expected a JSON schema.",
                f"tools[{place}].function.parameters",
            )
    return tools or None


def forced(
    grammars: Grammars, tools: Tools | None, choice: str | dict[str, Any] | None, thinking: bool, one: bool
) -> tuple[Tools | None, MakeMask | None]:
    """The tools to tell the model about, and the mask that makes it call one if it must."""
    tools = checked_tools(tools)
    if choice in (None, "auto"):
        return tools, None
    if choice == "none":
        return None, None
    if not tools:
        raise bad("tool_choice asks for a call, but there are no tools.", "tool_choice")
    wanted = tools
    if isinstance(choice, dict):
        name = choice.get("name") or (choice.get("function") or {}).get("name")
        wanted = [tool for tool in tools if tool["function"]["name"] == name]
        if not wanted:
            raise bad(f"tool_choice names {quoted(name, 80)}, which is none of the tools.", "tool_choice")
        one = True
    elif choice != "required":
        raise bad(
            f"tool_choice is {quoted(choice, 40)}, expected none, auto, required or a function.",
            "tool_choice",
        )
    return tools, grammars.of_lark(forced_call(grammars, wanted, one), thinking, "tools")
