"""A completion to reasoning, content and tool calls (spec 13.3), whole or as it streams.

Pieces come in as segments, so a marker is known by its id and text that merely spells one stays text. Whatever the
cut of the pieces, the joined events are the same, and no marker reaches reasoning or content. A few characters are
held back while they may still open a tool block: a blank line and its '<'.

Strict reading raises `ChatError` at the first deviation from the format. Lenient reading, for serving, goes on:

* a stray marker is left out and reported; `<think>` inside content opens reasoning again;
* a tool block inside reasoning ends the reasoning; line breaks before a block may be missing;
* a block that breaks the format ends its open call as incomplete and is kept whole in a `FormatProblem`;
* text behind the block is content again; text behind the end marker is kept in a `FormatProblem`.

A missing end marker is no deviation: engines take it off, and a token limit may cut it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from birkhoff.errors import ChatError, PromptError
from birkhoff.text.events import ContentDelta, Event, FormatProblem, ParsedMessage, ReasoningDelta, assemble
from birkhoff.text.markers import DSML, END_THINK, EOS, THINK
from birkhoff.text.segments import Marker, Segment, TextSegment, split_markers
from birkhoff.text.stream import SegmentDecoder
from birkhoff.text.tokenizer import Tokenizer
from birkhoff.text.tool_block import ToolBlock

_MAY_OPEN_BLOCK = re.compile(r"(?:\n{0,2}<|\n{1,2})\Z")
_BLOCK_NAME = "tool_calls>"


def parse_completion(
    completion: str | Sequence[int] | Sequence[Segment],
    *,
    thinking: bool,
    tokenizer: Tokenizer | None = None,
    strict: bool = True,
) -> ParsedMessage:
    """Parse a whole completion: token ids (with their tokenizer), segments, or text whose markers are spelled out."""
    parser = CompletionParser(thinking=thinking, strict=strict)
    events: list[Event] = []
    for segment in _segments(completion, tokenizer):
        events += parser.feed(segment)
    return assemble(events + parser.finish())


def _segments(
    completion: str | Sequence[int] | Sequence[Segment], tokenizer: Tokenizer | None
) -> list[Segment]:
    if isinstance(completion, str):
        return split_markers(completion)
    out: list[Segment] = []
    decoder = None if tokenizer is None else SegmentDecoder(tokenizer)
    for item in completion:
        if isinstance(item, (Marker, TextSegment)):
            out.append(item)
        elif decoder is not None:
            out += decoder.feed(item)
        else:
            raise PromptError("a completion of token ids was given without its tokenizer; pass tokenizer=….")
    return out + (decoder.finish() if decoder is not None else [])


class CompletionParser:
    """Feed segments, get events; `finish` once at the end."""

    def __init__(self, *, thinking: bool, strict: bool = False) -> None:
        self._strict = strict
        self._events: list[Event] = []
        self._in_reasoning = thinking
        self._held = ""  # text that may still open a block
        self._opening: str | None = None  # what stood before a DSML marker whose tag is not read yet
        self._block: ToolBlock | None = None
        self._next_index = 0
        self._after_block = False
        self._ended = False
        self._beyond: list[str] = []

    def feed(self, segment: Segment) -> list[Event]:
        """What this piece brings to light."""
        if self._ended:
            self._beyond.append(segment.string)
            self._refuse_if_strict("there is text behind the end marker")
        elif isinstance(segment, Marker):
            self._marker(segment.string)
        else:
            self._text(segment.string)
        return self._take_events()

    def finish(self) -> list[Event]:
        """What was held back, and what is missing."""
        if not self._ended:
            self._end()
        if self._beyond:
            self._events.append(FormatProblem("there is text behind the end marker", "".join(self._beyond)))
            self._beyond = []
        return self._take_events()

    def _text(self, text: str) -> None:
        while text:
            if self._block is not None:
                text = self._in_block(text)
            elif self._opening is not None:
                text = self._block_name(text)
            else:
                text = self._talk(text)

    def _talk(self, text: str) -> str:
        """Reasoning or content."""
        text = self._held + text
        if self._after_block:
            if not text.strip() and not self._strict:
                self._held = text  # a line break behind the block says nothing
                return ""
            self._after_block = False
            self._report("there is text behind the tool calls")
        may_open = _MAY_OPEN_BLOCK.search(text)
        keep = may_open.start() if may_open else len(text)
        self._held = text[keep:]
        self._say(text[:keep])
        return ""

    def _block_name(self, text: str) -> str:
        """Behind '<' and a DSML marker: the name of the block, or anything else."""
        need = _BLOCK_NAME[len(self._held) :]
        same = 0
        while same < min(len(need), len(text)) and need[same] == text[same]:
            same += 1
        self._held += text[:same]
        if same == len(need):
            self._open_block()
        elif same < len(text):
            self._not_a_block()
        return text[same:]

    def _open_block(self) -> None:
        opening = self._opening or ""
        if self._in_reasoning:
            self._report("a tool-call block comes before </think>")
            self._in_reasoning = False
        elif opening != "\n\n<":
            self._refuse_if_strict("a tool-call block does not begin with a blank line")
        self._block = ToolBlock(
            self._next_index, strict=self._strict, opening=f"{opening}{DSML}{_BLOCK_NAME}"
        )
        self._opening = None
        self._held = ""

    def _not_a_block(self) -> None:
        """The marker was stray; the text around it is what it seemed."""
        opening = self._opening or ""
        name = self._held
        self._opening = None
        self._held = ""
        self._say(opening)
        self._report(f"a {DSML} marker stands outside a tool-call block", DSML)
        if name:
            self._talk(name)

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
        if marker == DSML and self._held.endswith("<"):
            self._opening = self._held
            self._held = ""
        elif marker == END_THINK and self._in_reasoning:
            self._flush()
            self._in_reasoning = False
        else:
            self._flush()
            where = "reasoning" if self._in_reasoning else "content"
            self._report(f"a {marker} marker stands inside {where}", marker)
            self._in_reasoning = self._in_reasoning or marker == THINK

    def _end(self) -> None:
        if self._block is not None:
            self._block.finish()
            self._collect(self._block)
            self._block = None
            return
        if self._opening is not None:
            self._not_a_block()
        if not self._after_block:
            self._flush()
        if self._in_reasoning:
            self._report("the answer ends before </think>")

    def _flush(self) -> None:
        self._say(self._held)
        self._held = ""

    def _say(self, text: str) -> None:
        if text:
            self._events.append(ReasoningDelta(text) if self._in_reasoning else ContentDelta(text))

    def _report(self, message: str, raw: str = "") -> None:
        self._refuse_if_strict(message)
        self._events.append(FormatProblem(message, raw))

    def _refuse_if_strict(self, message: str) -> None:
        if self._strict:
            raise ChatError(f"{message}. The completion does not follow the V4 format; parse it leniently.")

    def _take_events(self) -> list[Event]:
        events = self._events
        self._events = []
        return events
