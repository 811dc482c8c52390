"""Convert generated token ids to text and events as they arrive, and detect stop strings.

Both classes have the interface that the engine uses: `feed(token_id) -> (text, stopped)` and `finish() -> text`.
`TextStream` is for plain prompts. `ChatStream` also parses: `events` collects reasoning, content and tool calls, and
`message()` returns the complete message.

The returned text is final: complete characters, nothing that may become part of a stop string, no BOS or EOS. After a
stop, the remaining text is discarded and `finish` returns nothing. Stop strings are matched in text; in a chat one may
also name a marker, which is matched by id. The first `min_tokens` tokens cannot end an answer, so no stop is matched
in them. `text` is all text returned so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from birkhoff.text.detokenizer import IncrementalDetokenizer, SegmentDetokenizer
from birkhoff.text.events import ContentDelta, Event, ParsedMessage, assemble
from birkhoff.text.segments import Segment, TextSegment
from birkhoff.text.stop import StopMatcher
from birkhoff.text.tokenizer import Tokenizer


class TextStream:
    """A plain completion. Special tokens (BOS, EOS) are dropped, other markers are spelled out."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, min_tokens: int = 0) -> None:
        self.tokenizer = tokenizer
        self.text = ""
        self._decoder = IncrementalDetokenizer(tokenizer, skip_special=True)
        self._stops = StopMatcher(stops)
        self._no_stop_tokens = min_tokens

    def feed(self, token_id: int) -> tuple[str, bool]:
        """Add a token; return (new text, whether a stop string matched)."""
        text = self._decoder.feed(token_id)
        if self._no_stop_tokens:
            self._no_stop_tokens -= 1
        else:
            text = self._stops.feed(text)
        self.text += text
        return text, self._stops.matched is not None

    def finish(self) -> str:
        """Return the text still held back."""
        text = self._stops.feed(self._decoder.finish()) + self._stops.finish()
        self.text += text
        return text

    @property
    def matched(self) -> str | None:
        """The stop string that matched, or None."""
        return self._stops.matched


class SegmentParser(Protocol):
    """Turns the segments of an answer into events. `in_reasoning` while what comes is reasoning."""

    in_reasoning: bool

    def feed(self, segment: Segment) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


class ChatStream:
    """An answer in the chat format of `parser`. `text` is the content; reasoning and tool calls are only in `events`.
    `reasoning_flags` says of each token whether it belongs to the reasoning, its end marker included."""

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, parser: SegmentParser, min_tokens: int = 0
    ) -> None:
        self.tokenizer = tokenizer
        self.events: list[Event] = []
        self.matched: str | None = None
        self._decoder = SegmentDetokenizer(tokenizer)
        self._marker_stops = frozenset(stops)
        self._stops = StopMatcher(stops)
        self._no_stop_tokens = min_tokens
        self._parser = parser
        self.reasoning_flags: list[bool] = []
        self._finished = False

    def feed(self, token_id: int) -> tuple[str, bool]:
        """Add a token; return (new content, whether a stop matched)."""
        before = len(self.events)
        reasons = self._parser.in_reasoning
        for segment in self._decoder.feed(token_id):
            self._take(segment)
        self.reasoning_flags.append(reasons or self._parser.in_reasoning)
        self._no_stop_tokens = max(self._no_stop_tokens - 1, 0)
        return self._content_since(before), self.matched is not None

    def finish(self) -> str:
        """Return the content still held back. Can be called repeatedly, also after a stop."""
        before = len(self.events)
        if not self._finished:
            self._finished = True
            for segment in self._decoder.finish():
                self._take(segment)
            self._emit(self._stops.finish())
            self.events += self._parser.finish()
        return self._content_since(before)

    @property
    def reasoning_tokens(self) -> int:
        """How many tokens the reasoning has so far, its end marker included."""
        return sum(self.reasoning_flags)

    @property
    def text(self) -> str:
        """The content so far."""
        return self._content_since(0)

    def message(self) -> ParsedMessage:
        """Finish and return the whole answer."""
        self.finish()
        return assemble(self.events)

    def _take(self, segment: Segment) -> None:
        if self.matched is not None:
            return
        if self._no_stop_tokens:
            self.events += self._parser.feed(segment)
            return
        if isinstance(segment, TextSegment):
            self._emit(self._stops.feed(segment.string))
            self.matched = self._stops.matched
            return
        self._emit(self._stops.finish())  # a stop string cannot continue across a marker
        if segment.string in self._marker_stops:
            self.matched = segment.string
        else:
            self.events += self._parser.feed(segment)

    def _emit(self, text: str) -> None:
        if text:
            self.events += self._parser.feed(TextSegment(text))

    def _content_since(self, before: int) -> str:
        return "".join(event.text for event in self.events[before:] if isinstance(event, ContentDelta))
