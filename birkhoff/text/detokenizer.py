"""Running answers: token ids in, safe text and events out, stop strings obeyed.

Both classes have the same two calls, `feed(token_id) -> (text, stopped)` and `finish() -> text`, which is all the
engine knows of text. `TextStream` is for plain prompts. `ChatStream` also parses: its `events` collect reasoning,
content and tool calls as they become certain, and `message()` is what they come to.

Text is what a reader should see next: complete characters, nothing that may still become a stop string, no BOS or EOS.
Once a stop was met the rest is nobody's: `finish` then has nothing to add. A stop string is looked for in text; in a
chat it may also name a marker, which then ends the answer by its id. The first `min_tokens` tokens cannot end an
answer, so no stop is looked for in what they say. `text` is all that was told so far.
"""

from __future__ import annotations

from collections.abc import Sequence

from birkhoff.text.events import ContentDelta, Event, ParsedMessage, assemble
from birkhoff.text.parse import CompletionParser
from birkhoff.text.segments import Segment, TextSegment
from birkhoff.text.stop import StopMatcher
from birkhoff.text.stream import IncrementalDecoder, SegmentDecoder
from birkhoff.text.tokenizer import Tokenizer


class TextStream:
    """A plain completion; markers other than BOS, EOS and their like are shown as they are spelled."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, min_tokens: int = 0) -> None:
        self.text = ""
        self._decoder = IncrementalDecoder(tokenizer, skip_special=True)
        self._stops = StopMatcher(stops)
        self._safe = min_tokens

    def feed(self, token_id: int) -> tuple[str, bool]:
        text = self._decoder.feed(token_id)
        if self._safe:
            self._safe -= 1
        else:
            text = self._stops.feed(text)
        self.text += text
        return text, self._stops.matched is not None

    def finish(self) -> str:
        text = self._stops.feed(self._decoder.finish()) + self._stops.finish()
        self.text += text
        return text

    @property
    def matched(self) -> str | None:
        """The stop string that was met."""
        return self._stops.matched


class ChatStream:
    """An answer in the chat format. Its text is the content; reasoning and tool calls are in `events` only."""

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, thinking: bool, min_tokens: int = 0
    ) -> None:
        self.events: list[Event] = []
        self.matched: str | None = None
        self._decoder = SegmentDecoder(tokenizer)
        self._marker_stops = frozenset(stops)
        self._stops = StopMatcher(stops)
        self._safe = min_tokens
        self._parser = CompletionParser(thinking=thinking)
        self._finished = False

    def feed(self, token_id: int) -> tuple[str, bool]:
        before = len(self.events)
        for segment in self._decoder.feed(token_id):
            self._take(segment)
        self._safe = max(self._safe - 1, 0)
        return self._content_since(before), self.matched is not None

    def finish(self) -> str:
        """What was held back. Harmless to call again, and after a stop."""
        before = len(self.events)
        if not self._finished:
            self._finished = True
            for segment in self._decoder.finish():
                self._take(segment)
            self._say(self._stops.finish())
            self.events += self._parser.finish()
        return self._content_since(before)

    @property
    def text(self) -> str:
        return self._content_since(0)

    def message(self) -> ParsedMessage:
        """The whole answer."""
        self.finish()
        return assemble(self.events)

    def _take(self, segment: Segment) -> None:
        if self.matched is not None:
            return
        if self._safe:
            self.events += self._parser.feed(segment)
            return
        if isinstance(segment, TextSegment):
            self._say(self._stops.feed(segment.string))
            self.matched = self._stops.matched
            return
        self._say(self._stops.finish())  # no stop string goes on behind a marker
        if segment.string in self._marker_stops:
            self.matched = segment.string
        else:
            self.events += self._parser.feed(segment)

    def _say(self, text: str) -> None:
        if text:
            self.events += self._parser.feed(TextSegment(text))

    def _content_since(self, before: int) -> str:
        return "".join(event.text for event in self.events[before:] if isinstance(event, ContentDelta))
