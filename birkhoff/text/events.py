"""Events of a parsed completion, and the message they form.

The parser emits events; `assemble` joins them. Streaming and whole-completion parsing share both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More reasoning text."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More content text."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Start of a tool call. `index` counts the calls of this message from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of the arguments, as JSON text."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """End of the arguments. A call that is not `complete` was cut off or malformed and must not be run."""

    index: int
    complete: bool = True


@dataclass(frozen=True, slots=True)
class FormatProblem:
    """A deviation from the format. `raw` is text that is in no other event, with markers spelled out."""

    message: str
    raw: str = ""


Event = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallDelta | ToolCallEnd | FormatProblem


@dataclass(frozen=True)
class ToolCall:
    """A tool call; arguments as JSON text, which is cut off in one that is incomplete."""

    name: str
    arguments_json: str


@dataclass(frozen=True)
class ParsedMessage:
    """A whole answer. `incomplete_call` is the one after `tool_calls` that was begun and cut off or malformed."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    problems: tuple[FormatProblem, ...] = field(default=())
    incomplete_call: ToolCall | None = None


def assemble(events: Iterable[Event]) -> ParsedMessage:
    """Join events into a message. Only its last tool call can be incomplete: the parser reads none after it."""
    reasoning: list[str] = []
    content: list[str] = []
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    complete: list[int] = []
    incomplete: list[int] = []
    problems: list[FormatProblem] = []
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning.append(text)
            case ContentDelta(text):
                content.append(text)
            case ToolCallStart(index, name):
                names[index], arguments[index] = name, []
            case ToolCallDelta(index, piece):
                arguments[index].append(piece)
            case ToolCallEnd(index, True):
                complete.append(index)
            case ToolCallEnd(index, False):
                incomplete.append(index)
            case FormatProblem():
                problems.append(event)
    calls = {index: ToolCall(name, "".join(arguments[index])) for index, name in names.items()}
    return ParsedMessage(
        "".join(reasoning),
        "".join(content),
        tuple(calls[index] for index in complete),
        tuple(problems),
        calls[incomplete[-1]] if incomplete else None,
    )
