"""Parse an answer of a model with a chat template into reasoning, content and tool calls, as it arrives.

Reasoning is between `<think>` and `</think>`; the opening may be part of the prompt. Calls are JSON in one of the
formats of `CallSyntax` (also Qwen3-Coder's `<function=...>` inside `<tool_call>`), and are only looked for when the
request has tools. A tag may be a token of its own or plain text. A call is emitted whole, once its JSON is complete.
The joined events do not depend on how the input is split: text is held back while it may start a tag. White space next
to reasoning and calls is dropped. A call that is not valid stays content, one that is cut off is kept in a
`FormatProblem`; so is a tag or a bare object that is cut off, if a grammar makes the answer a call (`forced_call`)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from birkhoff.text.events import (
    ContentDelta,
    Event,
    FormatProblem,
    ReasoningDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from birkhoff.text.markers import END_THINK, THINK
from birkhoff.text.segments import Marker, Segment

ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]*\s*)?(?:\[ARGS\])?\s*(?=\{)")
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True)
class CallSyntax:
    """How a family writes calls. Without `closing` the end of the JSON is the end of the calls. `bare`: an answer that
    begins with a JSON object is a call without an opening tag. `array`: the calls of an answer are one JSON array."""

    name: str
    opening: str
    closing: str = ""
    arguments: str = "arguments"  # the key; both this and "parameters" are read
    bare: bool = False
    array: bool = False
    named: bool = False  # the name stands before the JSON, which is the arguments alone


HERMES = CallSyntax("hermes", "<tool_call>", "</tool_call>")
MISTRAL = CallSyntax("mistral", "[TOOL_CALLS]", array=True)
MISTRAL_NAMED = CallSyntax("mistral", "[TOOL_CALLS]", named=True)
PHI = CallSyntax("phi", "<|tool_call|>", "<|/tool_call|>", array=True)
LLAMA = CallSyntax("llama", "<|python_tag|>", arguments="parameters", bare=True)


def takes_tools(template: str) -> bool:
    return re.search(r"\btools\b", template) is not None


def writes_reasoning(template: str) -> bool:
    return THINK in template or END_THINK in template


def call_syntax(template: str) -> CallSyntax:
    """The format in which a chat template with tools writes calls: by the tags it spells, else a bare JSON object."""
    if MISTRAL.opening in template:
        return MISTRAL_NAMED if ARGS in template else MISTRAL
    return next((syntax for syntax in (HERMES, PHI) if syntax.opening in template), LLAMA)


class TemplateParser:
    """Converts segments to events. `reasons`: the answer may begin with `<think>`; `in_reasoning`: the prompt ended
    with it. `tools` are those of the request; without `calls` none are looked for."""

    def __init__(
        self,
        *,
        reasons: bool = False,
        in_reasoning: bool = False,
        calls: CallSyntax | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        forced_call: bool = False,
    ) -> None:
        self._forced_call = forced_call
        self.in_reasoning = in_reasoning
        self._may_think = reasons and not in_reasoning
        self._calls = calls
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        self._tags = {THINK, END_THINK} if reasons else set()
        if calls is not None:
            self._tags |= {calls.opening, calls.closing, ARGS, CALL_ID}
        self._events: list[Event] = []
        self._buffer = ""
        self._trim = in_reasoning  # white space before the next text is dropped
        self._has_content = False
        self._opened: str | None = None  # how the call now being read began
        self._num_calls = 0

    def feed(self, segment: Segment) -> list[Event]:
        """Return the events completed by this segment. Markers other than tags are dropped."""
        if not isinstance(segment, Marker) or segment.string in self._tags:
            self._buffer += segment.string
            incomplete = self._opened is not None and not re.search(r"[]}>]", segment.string)
            while not incomplete and self._advance(last=False):
                pass
        return self._take()

    def finish(self) -> list[Event]:
        """Return the events of the text held back, and report what is missing."""
        while self._advance(last=True):
            pass
        if self._opened is not None:  # nothing came after the tag
            self._events.append(FormatProblem("the answer ends inside a tool call", self._opened))
            self._opened = None
        if self.in_reasoning:
            self._events.append(FormatProblem(f"the answer ends before {END_THINK}"))
            self.in_reasoning = False
        return self._take()

    def _advance(self, last: bool) -> bool:
        """Move on in the buffer; False if it is used up or more text must come first."""
        if self._trim:
            self._buffer = self._buffer.lstrip()
            self._trim = not self._buffer
        if not self._buffer:
            return False
        if self._opened is not None:
            return self._call(last)
        return self._reasoning(last) if self.in_reasoning else self._content(last)

    def _reasoning(self, last: bool) -> bool:
        text, found, rest = self._buffer.partition(END_THINK)
        if found:
            self._emit(ReasoningDelta, text.rstrip())
            self._buffer, self.in_reasoning, self._trim = rest, False, True
            return True
        keep = 0 if last else _held(text, (END_THINK,))
        self._emit(ReasoningDelta, text[: len(text) - keep])
        self._buffer = text[len(text) - keep :]
        return False

    def _content(self, last: bool) -> bool:
        head = self._buffer.lstrip()
        if self._may_think:
            if head.startswith(THINK):
                self._buffer = head[len(THINK) :]
                self._may_think, self.in_reasoning, self._trim = False, True, True
                return True
            if THINK.startswith(head) and not last:
                return False
            self._may_think = False
        calls = self._calls
        if calls is None:
            self._say(self._buffer)
            self._buffer = ""
            return False
        if calls.bare and not self._has_content:
            head = head.lstrip("; \n") if self._num_calls else head
            if head.startswith("{"):
                self._opened, self._buffer = "", head
                return True
            if not head and not last:
                return False
            if not head and self._num_calls:
                self._buffer = ""
                return False
        before, found, rest = self._buffer.partition(calls.opening)
        if found:
            self._say(before.rstrip())
            self._opened, self._buffer = calls.opening, rest
            return True
        keep = 0 if last and not self._forced_call else _held(before, (calls.opening,))
        self._say(before[: len(before) - keep])
        self._buffer = before[len(before) - keep :]
        if last and self._buffer:
            self._events.append(FormatProblem("the answer ends inside a tool call", self._buffer))
            self._buffer = ""
        return False

    def _call(self, last: bool) -> bool:
        calls, opening = self._calls, self._opened
        assert calls is not None and opening is not None
        body, closed, rest = (
            self._buffer.partition(calls.closing) if calls.closing else (self._buffer, "", "")
        )
        if calls.closing and not closed and not last:
            return False
        found, end = self._read(body)
        if closed:
            found = found if not body[end:].strip() else None
        elif found:
            rest = body[end:]
            if calls.closing.startswith(rest.strip()):  # a closing tag that is cut off is no content
                rest = ""
        elif found is None and not last:
            return False
        self._opened = None
        if found:
            for call in found:
                self._events += [
                    ToolCallStart(self._num_calls, call.name),
                    ToolCallDelta(self._num_calls, call.arguments_json),
                    ToolCallEnd(self._num_calls),
                ]
                self._num_calls += 1
            self._buffer, self._trim = rest, True
        elif closed or found is not None or (not opening and not self._forced_call):
            if opening:
                self._events.append(FormatProblem("a tool call is not valid and is kept as content"))
            self._say(opening + body + closed)
            self._buffer = rest
        else:
            self._events.append(FormatProblem("the answer ends inside a tool call", opening + body))
            self._buffer = ""
        return True

    def _read(self, body: str) -> tuple[list[ToolCall] | None, int]:
        """The calls at the beginning of `body` and where they end. None if there is no complete JSON, an empty list if
        the JSON is no call of a tool."""
        if function := _FUNCTION.match(body):
            return [self._function(function[1].strip(), function[2])], function.end()
        start = len(body) - len(body.lstrip())
        assert self._calls is not None
        may_name = self._calls.opening == MISTRAL.opening and body[start : start + 1] not in ("{", "[")
        named = _NAMED.match(body) if may_name else None
        try:
            value, end = _JSON.raw_decode(body, named.end() if named else start)
        except (ValueError, RecursionError):
            return None, 0
        if named:
            value = {"name": named[1], "arguments": value}
        found = [_tool_call(each) for each in (value if isinstance(value, list) else [value])]
        known = [call for call in found if call is not None]
        if len(known) < len(found) or (
            self._opened == "" and not {c.name for c in known} <= self._schemas.keys()
        ):
            return [], end
        return known, end

    def _function(self, name: str, body: str) -> ToolCall:
        """A call whose parameters are written one by one: a value is text unless the tool's schema says otherwise."""
        properties = self._schemas.get(name, {}).get("properties") or {}
        arguments: dict[str, Any] = {}
        for key, value in _PARAMETER.findall(body):
            arguments[key] = value
            schema = properties.get(key)
            if isinstance(schema, Mapping) and schema.get("type", "string") != "string":
                with suppress(ValueError, RecursionError):  # else the caller sees what the model wrote
                    arguments[key] = _JSON.decode(value)
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))

    def _say(self, text: str) -> None:
        self._has_content = self._has_content or bool(text.strip())
        self._emit(ContentDelta, text)

    def _emit(self, kind: type[ReasoningDelta] | type[ContentDelta], text: str) -> None:
        if text:
            self._events.append(kind(text))

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def _held(text: str, tags: Sequence[str]) -> int:
    """How many characters at the end of `text` are a beginning of a tag, with the white space before it."""
    longest = max(
        (n for tag in tags for n in range(1, min(len(tag), len(text) + 1)) if text.endswith(tag[:n])),
        default=0,
    )
    rest = text[: len(text) - longest]
    return longest + len(rest) - len(rest.rstrip())


def _tool_call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = _JSON.decode(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    # JSON may spell half of a surrogate pair, which UTF-8 has not: it becomes a question mark.
    text = json.dumps(arguments, ensure_ascii=False).encode("utf-8", "replace").decode()
    return ToolCall(value["name"], text)


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # Python accepts NaN and infinities, JSON does not


_JSON = json.JSONDecoder(parse_constant=_refuse)
