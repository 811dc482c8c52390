"""Parse the inside of a tool-call block incrementally (format: spec 13.2, parsing: 13.3).

    <｜DSML｜tool_calls>              already read by the caller
    <｜DSML｜invoke name="NAME">
    <｜DSML｜parameter name="KEY" string="true|false">VALUE</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

Arguments are emitted as pieces of one JSON object: string values are escaped as they arrive, other values are inserted
verbatim once they are known to be valid JSON. Inside VALUE every marker is part of the value, since a tool may be
called with any text; only the closing parameter tag, with the DSML marker itself, ends it. Extra spaces, a missing
`string` and a value that is not JSON (it becomes a string) are accepted; after any other deviation the rest of the
answer is kept in one `FormatProblem`, so that no text is lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from birkhoff.errors import quoted
from birkhoff.text.events import Event, FormatProblem, ToolCallDelta, ToolCallEnd, ToolCallStart
from birkhoff.text.markers import DSML

MAX_TAG_CHARS = 8192  # characters between a tag's marker and its '>'
_INVOKE = re.compile(r'invoke\s+name="(.*?)">', re.DOTALL)
_PARAMETER = re.compile(r'parameter name="(.*?)" string="(true|false)">', re.DOTALL)
_LOOSE_INVOKE = re.compile(r'invoke\s+name="([^"]*)"\s*>')
_LOOSE_PARAMETER = re.compile(r'parameter\s+name="([^"]*)"(?:\s+string="(true|false)")?\s*>')
_GAP = re.compile(r"\s*(?:</?)?")


class ToolBlock:
    """Feed the text after `<｜DSML｜tool_calls>`; `closed` is set at the closing tag."""

    def __init__(self, first_index: int, *, opening: str) -> None:
        self.events: list[Event] = []
        self.next_index = first_index
        self.closed = False
        self._raw = [opening]  # all text since the last finished call
        self._error = ""  # set once the block is malformed
        self._buffer = ""
        self._call_open = False
        self._names: set[str] = set()
        self._is_string: bool | None = None
        self._value: list[str] = []  # a JSON value is validated before it is emitted
        self._read: Callable[[str], str] = self._between_calls

    def text(self, text: str) -> str:
        """Parse `text`; return what follows the block."""
        self._raw.append(text)
        while text and not self.closed and not self._error:
            text = self._read(text)
        return text if self.closed else ""

    def marker(self, marker: str) -> None:
        """Parse a marker inside the block."""
        self._raw.append(marker)
        if self._error:
            return
        if self._read == self._closing_parameter:
            self._back_to_value()
        if self._read == self._in_value:
            if marker == DSML and self._buffer == "</":
                self._expect(self._closing_parameter)
            else:
                self._add_value(self._buffer + marker)
                self._buffer = ""
        elif (
            marker == DSML
            and self._read in (self._between_calls, self._between_parameters)
            and self._buffer.endswith(("<", "</"))
        ):
            self._enter_tag(closing=self._buffer.endswith("</"))
        else:
            self._fail(f"a {marker} marker stands where a tool-call block has none")

    def finish(self) -> None:
        """Report that the answer ended inside the block."""
        self._fail("the answer ends inside a tool-call block")
        self.events.append(FormatProblem(self._error, "".join(self._raw)))

    # Between tags: a line break, then the '<' or '</' of the next tag.

    def _between_calls(self, text: str) -> str:
        return self._gap(text)

    def _between_parameters(self, text: str) -> str:
        return self._gap(text)

    def _gap(self, text: str) -> str:
        self._buffer += text
        if len(self._buffer) > MAX_TAG_CHARS or _GAP.fullmatch(self._buffer) is None:
            self._fail("there is text between the tags of a tool-call block")
        return ""

    def _enter_tag(self, *, closing: bool) -> None:
        inside_call = self._read == self._between_parameters
        if closing:
            self._expect(self._closing_invoke if inside_call else self._closing_block)
        else:
            self._expect(self._parameter_tag if inside_call else self._invoke_tag)

    # Opening tags

    def _invoke_tag(self, text: str) -> str:
        match, rest = self._tag(text, _INVOKE, _LOOSE_INVOKE)
        if match:
            self.events.append(ToolCallStart(self.next_index, match[1]))
            self._call_open = True
            self._names = set()
            self._expect(self._between_parameters)
        return rest

    def _parameter_tag(self, text: str) -> str:
        match, rest = self._tag(text, _PARAMETER, _LOOSE_PARAMETER)
        if not match:
            return rest
        name, kind = match[1], match[2]
        if name in self._names:
            self._fail(f"parameter {quoted(name)} is given twice")
            return rest
        self._emit_arguments(("{" if not self._names else ", ") + _json(name) + ": ")
        self._names.add(name)
        self._is_string = None if kind is None else kind == "true"
        if self._is_string:
            self._emit_arguments('"')
        self._expect(self._in_value)
        return rest

    def _tag(
        self, text: str, pattern: re.Pattern[str], loose: re.Pattern[str]
    ) -> tuple[re.Match[str] | None, str]:
        """Match a tag at its first possible '>'; names may contain that character."""
        seen = len(self._buffer)
        self._buffer = self._buffer + text
        end = self._buffer.find(">", seen, MAX_TAG_CHARS)
        while end >= 0:
            match = pattern.fullmatch(self._buffer, 0, end + 1) or loose.fullmatch(self._buffer, 0, end + 1)
            if match:
                return match, self._buffer[end + 1 :]
            end = self._buffer.find(">", end + 1, MAX_TAG_CHARS)
        if len(self._buffer) >= MAX_TAG_CHARS:
            self._fail(f"a tool-call tag has no end within {MAX_TAG_CHARS} characters")
        return None, ""

    # Values

    def _in_value(self, text: str) -> str:
        text = self._buffer + text
        keep = 2 if text.endswith("</") else 1 if text.endswith("<") else 0
        self._buffer = text[len(text) - keep :]
        self._add_value(text[: len(text) - keep])
        return ""

    def _add_value(self, text: str) -> None:
        if self._is_string:
            # Escapes are per character, so pieces can be escaped separately.
            self._emit_arguments(_json(text)[1:-1])
        else:
            self._value.append(text)

    def _closing_parameter(self, text: str) -> str:
        done, rest = self._literal(text, "parameter>")
        if done:
            self._end_value()
            self._expect(self._between_parameters)
        elif done is None:  # another tag is part of the value
            self._back_to_value()
        return rest

    def _back_to_value(self) -> None:
        self._add_value("</" + DSML + self._buffer)
        self._expect(self._in_value)

    def _end_value(self) -> None:
        if self._is_string:
            self._emit_arguments('"')
            return
        value = "".join(self._value)
        self._value.clear()
        if _is_json(value):
            self._emit_arguments(value)
            return
        if self._is_string is False:
            self.events.append(FormatProblem(f"the value {quoted(value)} is marked as JSON and is not"))
        self._emit_arguments(_json(value))

    # Closing tags

    def _closing_invoke(self, text: str) -> str:
        done, rest = self._literal(text, "invoke>")
        if done:
            self._emit_arguments("}" if self._names else "{}")
            self.events.append(ToolCallEnd(self.next_index))
            self._call_open = False
            self.next_index += 1
            self._raw = [rest]
            self._expect(self._between_calls)
        elif done is None:
            self._fail("a tool call is closed by another tag than </invoke>")
        return rest

    def _closing_block(self, text: str) -> str:
        done, rest = self._literal(text, "tool_calls>")
        self.closed = bool(done)
        if done is None:
            self._fail("the tool-call block is closed by another tag than </tool_calls>")
        return rest

    # Helpers of the states

    def _expect(self, state: Callable[[str], str]) -> None:
        self._buffer = ""
        self._read = state

    def _literal(self, text: str, literal: str) -> tuple[bool | None, str]:
        """Continue matching `literal`: (True, rest) if complete, (None, text) if `text` differs."""
        need = literal[len(self._buffer) :]
        for i, (seen, expected) in enumerate(zip(text, need)):
            if seen != expected:
                self._buffer += text[:i]
                return None, text[i:]
        self._buffer += text[: len(need)]
        return self._buffer == literal, text[len(need) :]

    def _emit_arguments(self, arguments: str) -> None:
        if arguments:
            self.events.append(ToolCallDelta(self.next_index, arguments))

    def _fail(self, message: str) -> None:
        """Keep the rest of the answer verbatim; `finish` emits it."""
        self._error = self._error or message
        if self._call_open:
            self.events.append(ToolCallEnd(self.next_index, complete=False))
            self.next_index += 1
            self._call_open = False


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    def refuse(constant: str) -> None:
        raise ValueError(constant)  # Python accepts NaN and infinities, JSON does not

    try:
        value = json.loads(text, parse_constant=refuse)
        json.dumps(
            value, ensure_ascii=False
        ).encode()  # Python accepts half of a surrogate pair, JSON in UTF-8 has none
    except (ValueError, RecursionError):
        return False
    return True
