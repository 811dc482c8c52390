"""Tools of a call: which are shown to the model, and whether it must call one.

`auto` leaves the choice to the model. `required` and a named function force a call with a grammar, which works even for
a model that was not trained on tools. `none` hides the tools.
"""

from __future__ import annotations

import re
from typing import Any

from birkhoff.errors import quoted
from birkhoff.server.api_errors import bad_request
from birkhoff.server.json_grammar import GrammarCompiler, MaskFactory, tool_call_grammar
from birkhoff.server.json_schema import check_schema
from birkhoff.text.template_answer import CallSyntax

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
Tools = list[dict[str, Any]]


def validate_tools(tools: Tools | None) -> Tools | None:
    """Check that all tools are functions with valid names and schemas. Returns None for an empty list."""
    for index, tool in enumerate(tools or ()):
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, dict):
            kind = quoted(tool.get("type"), 40)
            raise bad_request(
                f"tools[{index}]: expected a function; tools of type {kind} are not served.",
                f"tools[{index}]",
            )
        if not isinstance(function.get("name"), str) or not _NAME.match(function["name"]):
            raise bad_request(
                f"tools[{index}].function.name is {quoted(function.get('name'), 80)}, expected 1 to 64 letters, "
                "digits, dots, dashes or underscores.",
                f"tools[{index}].function.name",
            )
        if function.get("parameters") is not None:
            check_schema(function["parameters"], f"tools[{index}].function.parameters")
    return tools or None


def resolve_tool_choice(
    grammars: GrammarCompiler,
    tools: Tools | None,
    choice: str | dict[str, Any] | None,
    reasoning: str | None,
    single_call: bool,
    syntax: CallSyntax | None,
) -> tuple[Tools | None, MaskFactory | None]:
    """The tools to show to the model, and the mask that forces a call if `choice` demands one. `syntax` is how the
    model writes calls, None for V4; `reasoning` is as in `ChatFormat.reasoning_start`."""
    tools = validate_tools(tools)
    if choice in (None, "auto"):
        return tools, None
    if choice == "none":
        return None, None
    if not tools:
        raise bad_request("tool_choice asks for a call, but there are no tools.", "tool_choice")
    callable_tools = tools
    if isinstance(choice, dict):
        function = choice.get("function")
        name = choice.get("name") or (function.get("name") if isinstance(function, dict) else None)
        callable_tools = [tool for tool in tools if tool["function"]["name"] == name]
        if not callable_tools:
            raise bad_request(
                f"tool_choice names {quoted(name, 80)}, which is none of the tools.", "tool_choice"
            )
        single_call = True
    elif choice != "required":
        raise bad_request(
            f"tool_choice is {quoted(choice, 40)}, expected none, auto, required or a function.",
            "tool_choice",
        )
    grammar = tool_call_grammar(grammars, callable_tools, single_call, syntax)
    return tools, grammars.from_lark(grammar, reasoning, "tools")
