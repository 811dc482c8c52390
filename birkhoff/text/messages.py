"""Validate a conversation and normalise it to the turns that V4 renders (spec 13.2, steps 1 and 2).

Messages are dictionaries in the OpenAI format plus V4's fields (`task`, `wo_eos`, `latest_reminder`, tools and
response format on a message). The result is a list of frozen `Turn`s in which

* every string is valid text (no lone surrogates) and every JSON value is serialised;
* there is no tool role: results are parts of user turns, in the order of the calls;
* adjacent user messages are one turn, unless a task separates them.

Errors name the field path. Nothing is dropped silently: an unknown field is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from birkhoff.errors import ChatError, PromptError, did_you_mean, quoted
from birkhoff.text.markers import TASKS
from birkhoff.text.tokenizer import check_text

# Fields of each role. `_IGNORED` fields are common in clients' message objects and not part of a V4 prompt.
_ROLES: dict[str, tuple[str, ...]] = {
    "system": ("content", "tools", "response_format", "task"),
    "developer": ("content", "tools", "response_format", "task"),
    "user": ("content", "task", "wo_eos"),
    "assistant": ("content", "reasoning_content", "reasoning", "tool_calls", "task", "wo_eos"),
    "tool": ("content", "tool_call_id"),
    "latest_reminder": ("content", "task"),
}
_IGNORED = ("role", "name", "mask", "annotations", "id")


@dataclass(frozen=True)
class ContentPart:
    """A part of a user turn: text, or the result of a tool call."""

    text: str
    is_result: bool = False
    call_id: str = ""


@dataclass(frozen=True)
class PromptToolCall:
    """A tool call of an assistant turn; parameters are (name, is_string, value) with JSON serialised."""

    name: str
    parameters: tuple[tuple[str, bool, str], ...]
    id: str = ""


@dataclass(frozen=True)
class Turn:
    """One turn of the normalised conversation."""

    role: str
    content: str = ""
    reasoning: str = ""
    parts: tuple[ContentPart, ...] = ()
    calls: tuple[PromptToolCall, ...] = ()
    tools: tuple[str, ...] = ()  # one JSON line each
    response_format: str | None = None  # JSON
    task: str | None = None
    wo_eos: bool = False


def read_conversation(
    messages: Sequence[Mapping[str, Any]], *, tools: object = None, response_format: object = None
) -> list[Turn]:
    """Convert `messages` to turns; call-level `tools` and `response_format` join the leading turn."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ChatError(
            f"messages is a {type(messages).__name__}, expected a list of objects with 'role' and 'content'."
        )
    if not messages:
        raise ChatError(
            "messages is empty, expected at least one message, such as {'role': 'user', 'content': …}."
        )
    turns = [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    turns = _attach(turns, _read_tools(tools, "tools"), _json_or_none(response_format, "response_format"))
    return _in_call_order(_merge(turns))


def _read_message(message: object, path: str) -> Turn:
    if not isinstance(message, Mapping):
        raise ChatError(
            f"{path} is a {type(message).__name__}, expected an object with 'role' and 'content'."
        )
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise ChatError(
            f"{path}.role is {quoted(role)}, expected one of {', '.join(_ROLES)}.{did_you_mean(role, _ROLES)}"
        )
    allowed = _ROLES[role]
    for key, value in message.items():
        if key not in allowed and key not in _IGNORED and value is not None:
            raise ChatError(
                f"{path}.{quoted(key)[1:-1]} is not a field of a {role} message, expected {', '.join(allowed)}."
                f"{did_you_mean(key, allowed)} Remove it or move it."
            )
    content = message.get("content")
    if role == "tool":
        call_id = _text_or_empty(message.get("tool_call_id"), f"{path}.tool_call_id")
        part = ContentPart(_content(content, f"{path}.content", required=True, is_result=True), True, call_id)
        return Turn(role, parts=(part,))
    turn = Turn(
        role,
        content=_content(
            content, f"{path}.content", required=role in ("user", "latest_reminder", "developer")
        ),
        reasoning=_reasoning(message, path),
        calls=_read_calls(message.get("tool_calls"), f"{path}.tool_calls"),
        tools=_read_tools(message.get("tools"), f"{path}.tools"),
        response_format=_json_or_none(message.get("response_format"), f"{path}.response_format"),
        task=_task(message.get("task"), f"{path}.task"),
        wo_eos=_flag(message.get("wo_eos"), f"{path}.wo_eos"),
    )
    if role == "developer" and not turn.content:
        raise ChatError(
            f"{path}.content is empty, but a developer message needs text. Use role 'system' for tools alone."
        )
    return replace(turn, parts=(ContentPart(turn.content),)) if role == "user" else turn


def _attach(turns: list[Turn], tools: tuple[str, ...], response_format: str | None) -> list[Turn]:
    """Put call-level tools and response format on the leading system or developer turn, or on a new one."""
    if not tools and response_format is None:
        return turns
    head = turns[0] if turns[0].role in ("system", "developer") else Turn("system")
    if tools and any(turn.tools for turn in turns):
        raise ChatError("tools are given both with the call and on a message; give them once.")
    if response_format is not None and any(turn.response_format for turn in turns):
        raise ChatError("response_format is given both with the call and on a message; give it once.")
    leading = replace(
        head, tools=tools or head.tools, response_format=response_format or head.response_format
    )
    return [leading, *turns[1:]] if head is turns[0] else [leading, *turns]


def _merge(turns: Iterable[Turn]) -> list[Turn]:
    """Step 1: tool results and adjacent user texts become parts of one user turn."""
    merged: list[Turn] = []
    for turn in turns:
        before = merged[-1] if merged and merged[-1].role == "user" else None
        if turn.role == "tool" and before is not None:
            merged[-1] = replace(before, parts=before.parts + turn.parts)
        elif turn.role == "tool":
            merged.append(Turn("user", parts=turn.parts))
        elif turn.role == "user" and before is not None and before.task is None:
            # As in the release, only the task of the message that starts the turn counts.
            merged[-1] = replace(before, parts=before.parts + turn.parts)
        else:
            merged.append(turn)
    return merged


def _in_call_order(turns: list[Turn]) -> list[Turn]:
    """Step 2: sort the results of a turn by the most recent list of calls, keeping their positions."""
    order: dict[str, int] = {}
    out = []
    for turn in turns:
        if turn.calls:
            order = {call.id: index for index, call in enumerate(turn.calls) if call.id}
        results = [part for part in turn.parts if part.is_result]
        if order and len(results) > 1:
            sorted_results = iter(sorted(results, key=lambda part: order.get(part.call_id, 0)))
            parts = tuple(next(sorted_results) if part.is_result else part for part in turn.parts)
            turn = replace(turn, parts=parts)
        out.append(turn)
    return out


def _content(value: object, path: str, *, required: bool, is_result: bool = False) -> str:
    """Return a string, or a list of text parts joined by blank lines, as V4 does."""
    if value is None and not required:
        return ""
    if isinstance(value, str):
        return _text(value, path)
    if not isinstance(value, Sequence) or isinstance(value, (bytes, bytearray)):
        raise ChatError(f"{path} is {quoted(value)}, expected text or a list of text parts.")
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            texts.append(_text(part.get("text"), f"{path}[{i}].text"))
        elif is_result and isinstance(kind, str):
            # As the released encoder writes it.
            texts.append(f"[Unsupported {_text(kind, f'{path}[{i}].type')}]")
        else:
            raise ChatError(
                f"{path}[{i}] is {quoted(kind or part)}, expected {{'type': 'text', 'text': …}}. V4 reads text only."
            )
    return "\n\n".join(texts)


def _reasoning(message: Mapping[str, Any], path: str) -> str:
    present = {
        key: message[key] for key in ("reasoning_content", "reasoning") if message.get(key) is not None
    }
    texts = {_text(value, f"{path}.{key}") for key, value in present.items()}
    if len(texts) > 1:
        raise ChatError(f"{path} has a reasoning and a reasoning_content that differ; give one of them.")
    return texts.pop() if texts else ""


def _read_calls(value: object, path: str) -> tuple[PromptToolCall, ...]:
    if value is None:
        return ()
    calls = []
    for i, item in enumerate(_list(value, path)):
        function = item.get("function") if isinstance(item, Mapping) else None
        if not isinstance(function, Mapping):
            raise ChatError(
                f"{path}[{i}].function is {quoted(function)}, expected an object with 'name' and 'arguments'."
            )
        name = _text(function.get("name"), f"{path}[{i}].function.name")
        parameters = _parameters(function.get("arguments"), f"{path}[{i}].function.arguments")
        call_id = item.get("id") or function.get("id")
        calls.append(PromptToolCall(name, parameters, _text_or_empty(call_id, f"{path}[{i}].id")))
    return tuple(calls)


def _parameters(arguments: object, path: str) -> tuple[tuple[str, bool, str], ...]:
    if isinstance(arguments, str):
        _text(arguments, path)
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):  # as in the release; without an object there are no parameter names
            parsed = {"arguments": arguments}
    elif isinstance(arguments, Mapping):
        parsed = dict(arguments)
    else:
        raise ChatError(f"{path} is {quoted(arguments)}, expected a JSON object as text, or an object.")
    out = []
    for key, value in parsed.items():
        at = f"{path}.{quoted(key)[1:-1]}"
        is_string = isinstance(value, str)
        out.append((_text(key, at), is_string, _text(value, at) if is_string else _json(value, at)))
    return tuple(out)


def _read_tools(value: object, path: str) -> tuple[str, ...]:
    if value is None:
        return ()
    lines = []
    for i, tool in enumerate(_list(value, path)):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ChatError(
                f"{path}[{i}] is {quoted(tool)}, expected {{'type': 'function', 'function': "
                "{'name': …, 'parameters': …}}."
            )
        lines.append(_json(function, f"{path}[{i}].function"))
    return tuple(lines)


def _json(value: object, path: str) -> str:
    """Serialise as Python-style JSON with non-ASCII kept, as the release does."""
    try:
        return _text(json.dumps(value, ensure_ascii=False), path)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatError(
            f"{path} cannot be written as JSON ({quoted(str(error))}); expected plain JSON values."
        ) from None


def _json_or_none(value: object, path: str) -> str | None:
    return _json(value, path) if value else None


def _task(value: object, path: str) -> str | None:
    if value is not None and (not isinstance(value, str) or value not in TASKS):
        raise ChatError(
            f"{path} is {quoted(value)}, expected one of {', '.join(TASKS)}.{did_you_mean(value, TASKS)}"
        )
    return value


def _flag(value: object, path: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ChatError(f"{path} is {quoted(value)}, expected true or false.")
    return bool(value)


def _list(value: object, path: str) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes, bytearray)):
        raise ChatError(f"{path} is {quoted(value)}, expected a list.")
    return value


def _text_or_empty(value: object, path: str) -> str:
    return "" if value is None else _text(value, path)


def _text(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise ChatError(f"{path} is {quoted(value)}, expected text.")
    try:
        check_text(value)
    except PromptError as error:
        raise ChatError(f"{path}: {error}") from None
    return value
