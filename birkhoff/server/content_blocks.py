"""An answer as a row of blocks: reasoning, text and tool calls, each opened, filled and closed in its turn.

Two dialects speak in blocks, Anthropic's and OpenAI's newer one. What they share is here: events of the parser in,
steps out. A whole answer is the same steps taken at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from birkhoff.server.calls import new_id
from birkhoff.text.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)

Kind = Literal["reasoning", "text", "tool"]


@dataclass
class ContentBlock:
    index: int
    kind: Kind
    name: str = ""
    id: str = ""
    text: str = ""
    complete: bool = True


@dataclass(frozen=True)
class ContentBlockDelta:
    what: Literal["open", "piece", "close"]
    block: ContentBlock
    text: str = ""


@dataclass
class ContentBlocks:
    tool_prefix: str = "call_"
    all: list[ContentBlock] = field(default_factory=list)
    _open: ContentBlock | None = None

    def feed(self, events: Iterable[Event]) -> list[ContentBlockDelta]:
        steps: list[ContentBlockDelta] = []
        for event in events:
            if isinstance(event, ReasoningDelta):
                steps += self._say("reasoning", event.text)
            elif isinstance(event, ContentDelta):
                steps += self._say("text", event.text)
            elif isinstance(event, ToolCallStart):
                steps += [*self.finish(), self._begin("tool", event.name)]
            elif isinstance(event, ToolCallDelta) and self._open is not None:
                steps.append(self._piece(event.arguments))
            elif isinstance(event, ToolCallEnd) and self._open is not None:
                self._open.complete = event.complete
                steps += self.finish()
        return steps

    def finish(self) -> list[ContentBlockDelta]:
        """Close the block that is open."""
        if self._open is None:
            return []
        closed = self._open
        self._open = None
        return [ContentBlockDelta("close", closed)]

    @property
    def called(self) -> bool:
        return any(block.kind == "tool" and block.complete for block in self.all)

    def _say(self, kind: Kind, text: str) -> list[ContentBlockDelta]:
        steps = []
        if self._open is None or self._open.kind != kind:
            if kind == "text" and not text.strip() and self._open is None and self.called:
                return []  # a line break behind a call says nothing
            steps = [*self.finish(), self._begin(kind)]
        return [*steps, self._piece(text)]

    def _begin(self, kind: Kind, name: str = "") -> ContentBlockDelta:
        prefix = {"tool": self.tool_prefix, "text": "msg_", "reasoning": "rs_"}[kind]
        self._open = ContentBlock(len(self.all), kind, name, new_id(prefix))
        self.all.append(self._open)
        return ContentBlockDelta("open", self._open)

    def _piece(self, text: str) -> ContentBlockDelta:
        assert self._open is not None
        self._open.text += text
        return ContentBlockDelta("piece", self._open, text)
