"""Parse a completion into reasoning, content and tool calls (spec 13.3), as it arrives.

The input is segments, so markers are known by id and text that spells one stays text. The joined events do not depend
on how the input is split, and no marker appears in reasoning or content. A few characters are held back while they may
start a tool block: a blank line and its '<'.

Parsing continues after a deviation from the format:

* a stray marker is dropped and reported; `<think>` inside content starts reasoning again;
* a tool block inside reasoning ends the reasoning; the line breaks before a block may be missing;
* a malformed block ends its open call as incomplete and is kept whole in a `FormatProblem`;
* text after the block is content; text after the end marker is kept in a `FormatProblem`.

A missing end marker is not a deviation: engines strip it, and a token limit may cut it off. The limit may also cut off
the opening tag of a tool block: a tag that is known by its marker, or by a grammar that allows nothing else
(`forced_call`), is kept in a `FormatProblem`.
"""

from __future__ import annotations

import re

from birkhoff.text.events import ContentDelta, Event, FormatProblem, ReasoningDelta
from birkhoff.text.markers import DSML, END_THINK, EOS, THINK
from birkhoff.text.segments import Marker, Segment
from birkhoff.text.tool_block import ToolBlock

_MAY_OPEN_BLOCK = re.compile(r"(?:\n{0,2}<|\n{1,2})\Z")
_BLOCK_NAME = "tool_calls>"


class CompletionParser:
    """Converts segments to events; call `finish` once at the end."""

    def __init__(self, *, thinking: bool, forced_call: bool = False) -> None:
        self._forced_call = forced_call
        self._events: list[Event] = []
        self.in_reasoning = thinking
        self._buffer = ""  # text that may start a block
        self._opening: str | None = None  # text before a DSML marker whose tag is incomplete
        self._block: ToolBlock | None = None
        self._next_index = 0
        self._after_block = False
        self._ended = False
        self._trailing: list[str] = []

    def feed(self, segment: Segment) -> list[Event]:
        """Return the events completed by this segment."""
        if self._ended:
            self._trailing.append(segment.string)
        elif isinstance(segment, Marker):
            self._marker(segment.string)
        else:
            self._text(segment.string)
        return self._take_events()

    def finish(self) -> list[Event]:
        """Return the events of the text held back, and report what is missing."""
        if not self._ended:
            self._end()
        if self._trailing:
            self._events.append(FormatProblem("there is text behind the end marker", "".join(self._trailing)))
            self._trailing = []
        return self._take_events()

    def _text(self, text: str) -> None:
        while text:
            if self._block is not None:
                text = self._in_block(text)
            elif self._opening is not None:
                text = self._block_name(text)
            else:
                text = self._plain_text(text)

    def _plain_text(self, text: str) -> str:
        """Handle reasoning or content."""
        text = self._buffer + text
        if self._after_block:
            if not text.strip():
                self._buffer = text  # white space after the block is not content
                return ""
            self._after_block = False
            self._report("there is text behind the tool calls")
        may_open = _MAY_OPEN_BLOCK.search(text)
        keep = may_open.start() if may_open else len(text)
        self._buffer = text[keep:]
        self._emit(text[:keep])
        return ""

    def _block_name(self, text: str) -> str:
        """Handle text after '<' and a DSML marker: the block's name, or anything else."""
        need = _BLOCK_NAME[len(self._buffer) :]
        same = 0
        while same < min(len(need), len(text)) and need[same] == text[same]:
            same += 1
        self._buffer += text[:same]
        if same == len(need):
            self._open_block()
        elif same < len(text):
            self._not_a_block()
        return text[same:]

    def _open_block(self) -> None:
        opening = self._opening or ""
        if self.in_reasoning:
            self._report("a tool-call block comes before </think>")
            self.in_reasoning = False
        self._block = ToolBlock(self._next_index, opening=f"{opening}{DSML}{_BLOCK_NAME}")
        self._opening = None
        self._buffer = ""

    def _not_a_block(self) -> None:
        """Report a stray marker; the text around it is plain text."""
        opening = self._opening or ""
        name = self._buffer
        self._opening = None
        self._buffer = ""
        self._emit(opening)
        self._report(f"a {DSML} marker stands outside a tool-call block", DSML)
        if name:
            self._plain_text(name)

    def _in_block(self, text: str) -> str:
        block = self._block
        assert block is not None
        rest = block.text(text)
        self._collect(block)
        if block.closed:
            self._block = None
            self._after_block = True
        return rest

    def _collect(self, block: ToolBlock) -> None:
        self._events += block.events
        block.events.clear()
        self._next_index = block.next_index

    def _marker(self, marker: str) -> None:
        if marker == EOS:
            self._end()
            self._ended = True
            return
        if self._block is not None:
            self._block.marker(marker)
            self._collect(self._block)
            return
        if self._opening is not None:
            self._not_a_block()
        self._after_block = False
        if marker == DSML and self._buffer.endswith("<"):
            self._opening = self._buffer
            self._buffer = ""
        elif marker == END_THINK and self.in_reasoning:
            self._flush()
            self.in_reasoning = False
        else:
            self._flush()
            where = "reasoning" if self.in_reasoning else "content"
            self._report(f"a {marker} marker stands inside {where}", marker)
            self.in_reasoning = self.in_reasoning or marker == THINK

    def _end(self) -> None:
        if self._block is not None:
            self._block.finish()
            self._collect(self._block)
            self._block = None
            return
        if self._opening is not None:
            self._cut_off(f"{self._opening}{DSML}{self._buffer}")
        elif self._buffer and self._forced_call and not (self.in_reasoning or self._after_block):
            self._cut_off(self._buffer)
        if not self._after_block:
            self._flush()
        if self.in_reasoning:
            self._report("the answer ends before </think>")

    def _cut_off(self, tag: str) -> None:
        """Report an opening tag of a block that is incomplete."""
        self._report("the answer ends inside the opening tag of a tool-call block", tag)
        self._opening = None
        self._buffer = ""

    def _flush(self) -> None:
        self._emit(self._buffer)
        self._buffer = ""

    def _emit(self, text: str) -> None:
        if text:
            self._events.append(ReasoningDelta(text) if self.in_reasoning else ContentDelta(text))

    def _report(self, message: str, raw: str = "") -> None:
        self._events.append(FormatProblem(message, raw))

    def _take_events(self) -> list[Event]:
        events = self._events
        self._events = []
        return events
