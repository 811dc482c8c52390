"""What a completion turns out to say, piece by piece, and the message the pieces come to.

The parser emits these events; `assemble` joins them. A streamed answer and a whole one are the same thing seen at
different times, so there is one parser and one way to put its events together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call whose name is known; `index` counts the calls of this message from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next piece of the arguments, as JSON text."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """No more arguments. When not `complete`, the answer broke off or broke the format: do not run this call."""

    index: int
    complete: bool = True


@dataclass(frozen=True, slots=True)
class FormatProblem:
    """The completion left the format. `raw` is the text that reached no other event, markers spelled out."""

    message: str
    raw: str = ""


Event = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallDelta | ToolCallEnd | FormatProblem


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments_json: str


@dataclass(frozen=True)
class ParsedMessage:
    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    problems: tuple[FormatProblem, ...] = field(default=())


def assemble(events: Iterable[Event]) -> ParsedMessage:
    """The message a run of events comes to; calls that were not completed are left out."""
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
