"""The inside of a tool-call block, read one piece at a time (spec 13.2 for the form, 13.3 for reading it).

    <｜DSML｜tool_calls>              the caller has read this line's tag
    <｜DSML｜invoke name="NAME">
    <｜DSML｜parameter name="KEY" string="true|false">VALUE</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

Arguments come out as the pieces of one JSON object: string values are escaped as they arrive, other values are spliced
in verbatim once they are known to be JSON. Inside VALUE every marker is part of the value, since a tool may be asked to
write any text; only the closing parameter tag, spelled with the DSML marker itself, ends it. Strict reading raises at
the first deviation. Lenient reading forgives spaces, a missing `string` and a value that is not JSON (it becomes a
string); after anything worse the rest of the answer is kept in one `FormatProblem`, so no text is lost and none leaks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from birkhoff.errors import ChatError, quoted
from birkhoff.text.events import Event, FormatProblem, ToolCallDelta, ToolCallEnd, ToolCallStart
from birkhoff.text.markers import DSML

LONGEST_TAG = 8192  # characters between a tag's marker and its '>'
_INVOKE = re.compile(r'invoke\s+name="(.*?)">', re.DOTALL)
_PARAMETER = re.compile(r'parameter name="(.*?)" string="(true|false)">', re.DOTALL)
_LOOSE_INVOKE = re.compile(r'invoke\s+name="([^"]*)"\s*>')
_LOOSE_PARAMETER = re.compile(r'parameter\s+name="([^"]*)"(?:\s+string="(true|false)")?\s*>')
_LOOSE_GAP = re.compile(r"\s*(?:</?)?")


class ToolBlock:
    """Feed it what follows `<｜DSML｜tool_calls>`; `closed` turns true at the closing tag."""

    def __init__(self, first_index: int, *, strict: bool, opening: str) -> None:
        self.events: list[Event] = []
        self.next_index = first_index
        self.closed = False
        self._strict = strict
        self._raw = [opening]  # everything since the last finished call
        self._why = ""  # set once the block is broken
        self._held = ""
        self._call_open = False
        self._names: set[str] = set()
        self._is_string: bool | None = None
        self._value: list[str] = []  # a JSON value is checked before it is passed on
        self._read: Callable[[str], str] = self._between_calls

    def text(self, text: str) -> str:
        """Read `text`; what is left over belongs behind the block."""
        self._raw.append(text)
        while text and not self.closed and not self._why:
            text = self._read(text)
        return text if self.closed else ""

    def marker(self, marker: str) -> None:
        self._raw.append(marker)
        if self._why:
            return
        if self._read == self._closing_parameter:
            self._back_to_value()
        if self._read == self._in_value:
            if marker == DSML and self._held == "</":
                self._expect(self._closing_parameter)
            else:
                self._take_value(self._held + marker)
                self._held = ""
        elif (
            marker == DSML
            and self._read in (self._between_calls, self._between_parameters)
            and self._gap_is_done()
        ):
            self._enter_tag(closing=self._held.endswith("</"))
        else:
            self._break(f"a {marker} marker stands where a tool-call block has none")

    def finish(self) -> None:
        """The answer ended inside the block."""
        self._break("the answer ends inside a tool-call block")
        self.events.append(FormatProblem(self._why, "".join(self._raw)))

    # Between tags: a line break, then the '<' or '</' of the next tag.

    def _between_calls(self, text: str) -> str:
        return self._gap(text)

    def _between_parameters(self, text: str) -> str:
        return self._gap(text)

    def _gap(self, text: str) -> str:
        self._held += text
        if self._strict:
            fits = any(gap.startswith(self._held) for gap in self._gaps())
        else:
            fits = len(self._held) <= LONGEST_TAG and _LOOSE_GAP.fullmatch(self._held) is not None
        if not fits:
            self._break("the tags of a tool-call block are not one to a line")
        return ""

    def _gaps(self) -> tuple[str, ...]:
        """A call without parameters is written with an empty line between its tags."""
        empty_call = self._read == self._between_parameters and not self._names
        return ("\n<", "\n</", "\n\n</") if empty_call else ("\n<", "\n</")

    def _gap_is_done(self) -> bool:
        return self._held in self._gaps() if self._strict else self._held.endswith(("<", "</"))

    def _enter_tag(self, *, closing: bool) -> None:
        inside_call = self._read == self._between_parameters
        if closing:
            self._expect(self._closing_invoke if inside_call else self._closing_block)
        else:
            self._expect(self._parameter_tag if inside_call else self._invoke_tag)

    # Opening tags

    def _invoke_tag(self, text: str) -> str:
        found, rest = self._tag(text, _INVOKE, _LOOSE_INVOKE)
        if found:
            self.events.append(ToolCallStart(self.next_index, found[1]))
            self._call_open = True
            self._names = set()
            self._expect(self._between_parameters)
        return rest

    def _parameter_tag(self, text: str) -> str:
        found, rest = self._tag(text, _PARAMETER, _LOOSE_PARAMETER)
        if not found:
            return rest
        name, kind = found[1], found[2]
        if name in self._names:
            self._break(f"parameter {quoted(name)} is given twice")
            return rest
        self._pass_on(("{" if not self._names else ", ") + _json(name) + ": ")
        self._names.add(name)
        self._is_string = None if kind is None else kind == "true"
        if self._is_string:
            self._pass_on('"')
        self._expect(self._in_value)
        return rest

    def _tag(
        self, text: str, pattern: re.Pattern[str], loose: re.Pattern[str]
    ) -> tuple[re.Match[str] | None, str]:
        """Match a tag at its first possible '>'; names may hold that character."""
        seen = len(self._held)
        self._held = self._held + text
        end = self._held.find(">", seen, LONGEST_TAG)
        while end >= 0:
            found = pattern.fullmatch(self._held, 0, end + 1)
            if not found and not self._strict:
                found = loose.fullmatch(self._held, 0, end + 1)
            if found:
                return found, self._held[end + 1 :]
            end = self._held.find(">", end + 1, LONGEST_TAG)
        if len(self._held) >= LONGEST_TAG:
            self._break(f"a tool-call tag has no end within {LONGEST_TAG} characters")
        return None, ""

    # Values

    def _in_value(self, text: str) -> str:
        text = self._held + text
        keep = 2 if text.endswith("</") else 1 if text.endswith("<") else 0
        self._held = text[len(text) - keep :]
        self._take_value(text[: len(text) - keep])
        return ""

    def _take_value(self, text: str) -> None:
        if self._is_string:
            self._pass_on(_json(text)[1:-1])  # escapes are per character, so pieces may be escaped alone
        else:
            self._value.append(text)

    def _closing_parameter(self, text: str) -> str:
        done, rest = self._literal(text, "parameter>")
        if done:
            self._end_value()
            self._expect(self._between_parameters)
        elif done is None and self._strict and self._held == "parameter":
            self._break("a closing parameter tag is not closed by '>'")
        elif done is None:  # some other tag: part of the value
            self._back_to_value()
        return rest

    def _back_to_value(self) -> None:
        self._take_value("</" + DSML + self._held)
        self._expect(self._in_value)

    def _end_value(self) -> None:
        if self._is_string:
            self._pass_on('"')
            return
        value = "".join(self._value)
        self._value.clear()
        if _is_json(value):
            self._pass_on(value)
            return
        if self._is_string is False:
            self._note(f"the value {quoted(value)} is marked as JSON and is not")
        self._pass_on(_json(value))

    # Closing tags

    def _closing_invoke(self, text: str) -> str:
        done, rest = self._literal(text, "invoke>")
        if done:
            self._pass_on("}" if self._names else "{}")
            self.events.append(ToolCallEnd(self.next_index))
            self._call_open = False
            self.next_index += 1
            self._raw = [rest]
            self._expect(self._between_calls)
        elif done is None:
            self._break("a tool call is closed by another tag than </invoke>")
        return rest

    def _closing_block(self, text: str) -> str:
        done, rest = self._literal(text, "tool_calls>")
        self.closed = bool(done)
        if done is None:
            self._break("the tool-call block is closed by another tag than </tool_calls>")
        return rest

    # Shared by the states

    def _expect(self, state: Callable[[str], str]) -> None:
        self._held = ""
        self._read = state

    def _literal(self, text: str, literal: str) -> tuple[bool | None, str]:
        """Read on in `literal`: (True, rest) when it is complete, (None, text) when `text` leaves it."""
        need = literal[len(self._held) :]
        for i, (seen, expected) in enumerate(zip(text, need)):
            if seen != expected:
                self._held += text[:i]
                return None, text[i:]
        self._held += text[: len(need)]
        return self._held == literal, text[len(need) :]

    def _pass_on(self, arguments: str) -> None:
        if arguments:
            self.events.append(ToolCallDelta(self.next_index, arguments))

    def _note(self, message: str) -> None:
        if self._strict:
            raise ChatError(f"tool call: {message}.")
        self.events.append(FormatProblem(message))

    def _break(self, message: str) -> None:
        """From here on the answer is kept as it is; `finish` hands it over."""
        if self._strict:
            raise ChatError(
                f"tool call: {message}. The completion does not follow the V4 format; parse it leniently."
            )
        self._why = self._why or message
        if self._call_open:
            self.events.append(ToolCallEnd(self.next_index, complete=False))
            self.next_index += 1
            self._call_open = False


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    def refuse(constant: str) -> None:
        raise ValueError(constant)  # NaN and the infinities are Python's, not JSON's

    try:
        json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True
