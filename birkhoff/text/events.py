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
    """A complete tool call; arguments as JSON text."""

    name: str
    arguments_json: str


@dataclass(frozen=True)
class ParsedMessage:
    """A complete answer."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    problems: tuple[FormatProblem, ...] = field(default=())


def assemble(events: Iterable[Event]) -> ParsedMessage:
    """Join events into a message; incomplete tool calls are left out."""
    reasoning: list[str] = []
    content: list[str] = []
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    complete: list[int] = []
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
            case FormatProblem():
                problems.append(event)
    calls = tuple(ToolCall(names[index], "".join(arguments[index])) for index in complete)
    return ParsedMessage("".join(reasoning), "".join(content), calls, tuple(problems))
