"""Responses made of content blocks: reasoning, text and tool calls, each started, extended and stopped in turn.

Anthropic's `/v1/messages` and OpenAI's `/v1/responses` share this structure. `ContentBlocks` turns parser events into
block deltas; `BlockFormatter` turns them into a full response or a stream. A full response is built from the same
deltas.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from birkhoff.api.driver import RequestOutput
from birkhoff.engine.request import Request
from birkhoff.server.async_engine import ActiveCall
from birkhoff.server.context import ServingContext
from birkhoff.server.generation import GenerationCall, new_id, raise_on_failure
from birkhoff.server.interp_response import response_extras
from birkhoff.server.stream_formatter import StreamFormatter
from birkhoff.text.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from birkhoff.text.output_stream import ChatStream

BlockKind = Literal["reasoning", "text", "tool"]


@dataclass
class ContentBlock:
    index: int
    kind: BlockKind
    name: str = ""
    id: str = ""
    text: str = ""
    complete: bool = True


@dataclass(frozen=True)
class ContentBlockDelta:
    change: Literal["start", "delta", "stop"]
    block: ContentBlock
    text: str = ""


@dataclass
class ContentBlocks:
    """The blocks of one message so far."""

    tool_prefix: str = "call_"
    blocks: list[ContentBlock] = field(default_factory=list)
    _open: ContentBlock | None = None

    def feed(self, events: Iterable[Event]) -> list[ContentBlockDelta]:
        """Apply parser events and return the resulting changes."""
        deltas: list[ContentBlockDelta] = []
        for event in events:
            if isinstance(event, ReasoningDelta):
                deltas += self._append("reasoning", event.text)
            elif isinstance(event, ContentDelta):
                deltas += self._append("text", event.text)
            elif isinstance(event, ToolCallStart):
                deltas += [*self.finish(), self._start("tool", event.name)]
            elif isinstance(event, ToolCallDelta) and self._open is not None:
                deltas.append(self._extend(event.arguments))
            elif isinstance(event, ToolCallEnd) and self._open is not None:
                self._open.complete = event.complete
                deltas += self.finish()
        return deltas

    def finish(self) -> list[ContentBlockDelta]:
        """Stop the open block, if there is one."""
        if self._open is None:
            return []
        block, self._open = self._open, None
        return [ContentBlockDelta("stop", block)]

    @property
    def has_tool_call(self) -> bool:
        return any(block.kind == "tool" and block.complete for block in self.blocks)

    def _append(self, kind: BlockKind, text: str) -> list[ContentBlockDelta]:
        deltas = []
        if self._open is None or self._open.kind != kind:
            if kind == "text" and not text.strip() and self._open is None and self.has_tool_call:
                return []  # whitespace after a tool call is not a block of its own
            deltas = [*self.finish(), self._start(kind)]
        return [*deltas, self._extend(text)]

    def _start(self, kind: BlockKind, name: str = "") -> ContentBlockDelta:
        prefix = {"tool": self.tool_prefix, "text": "msg_", "reasoning": "rs_"}[kind]
        self._open = ContentBlock(len(self.blocks), kind, name, new_id(prefix))
        self.blocks.append(self._open)
        return ContentBlockDelta("start", self._open)

    def _extend(self, text: str) -> ContentBlockDelta:
        assert self._open is not None
        self._open.text += text
        return ContentBlockDelta("delta", self._open, text)


class BlockFormatter(StreamFormatter):
    """Renders a call with one choice as content blocks. Subclasses define the events and the final object."""

    tool_prefix: ClassVar[str] = "call_"

    def __init__(self, context: ServingContext, generation: GenerationCall):
        super().__init__(context)
        self._generation = generation
        self._blocks = ContentBlocks(self.tool_prefix)

    @abstractmethod
    def response(self, request: Request, extras: dict[str, Any]) -> dict[str, Any]:
        """The complete response object."""

    @abstractmethod
    def block_events(self, delta: ContentBlockDelta, request: Request) -> list[bytes]: ...

    @abstractmethod
    def final_events(self, request: Request, extras: dict[str, Any]) -> list[bytes]: ...

    def full_response(self, call: ActiveCall) -> dict[str, Any]:
        request = call.requests[0]
        raise_on_failure(request)
        assert isinstance(request.sink, ChatStream)
        self._blocks.feed(request.sink.events)
        self._blocks.finish()
        return self.response(request, self._extras(request))

    def output_events(self, index: int, output: RequestOutput) -> Iterable[bytes]:
        return self._delta_events(self._blocks.feed(output.parsed), output.request)

    def end_events(self, call: ActiveCall) -> Iterable[bytes]:
        request = call.requests[0]
        yield from self._delta_events(self._blocks.finish(), request)
        yield from self.final_events(request, self._extras(request))

    def _delta_events(self, deltas: list[ContentBlockDelta], request: Request) -> Iterator[bytes]:
        for delta in deltas:
            yield from self.block_events(delta, request)

    def _extras(self, request: Request) -> dict[str, Any]:
        return response_extras([request], self._generation, self._context.capture_index)
