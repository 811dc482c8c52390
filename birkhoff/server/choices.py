"""What dialects with numbered choices share: the whole answer around them, the order of a stream, what stands beside.

`/v1/chat/completions` and `/v1/completions` differ in how one choice looks, whole and in pieces; that is theirs. Here
is the rest: choices first and their unsteered twins behind them, chunks that go out together when several are known,
what the answer tells about itself, usage when it was asked for, and `[DONE]`. An error after the first byte is a frame.
With `return_progress` a stream says how much of its prompt has been read, until the first token is there.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any

from birkhoff.api.driver import RequestOutput
from birkhoff.engine.request import Request
from birkhoff.server.async_engine import ActiveCall
from birkhoff.server.calls import GenerationCall, check_end, problems, usage
from birkhoff.server.context import ServingContext
from birkhoff.server.fields import Sampling
from birkhoff.server.interp_response import captured, findings
from birkhoff.server.sse import DONE, PING, frame

Json = dict[str, Any]


class Choices(ABC):
    """How one call's answers look; `head` begins the whole answer, `chunk_head` every chunk."""

    def __init__(
        self,
        context: ServingContext,
        calls: list[GenerationCall],
        body: Sampling,
        head: Json,
        chunk_head: Json,
    ):
        self._context = context
        self._calls = calls
        self._body = body
        self._head = head
        self._chunk_head = chunk_head

    @abstractmethod
    def choice(self, index: int, request: Request) -> Json:
        """One answer that has ended."""

    @abstractmethod
    def pieces(self, index: int, told: RequestOutput) -> list[Json]:
        """What is new of one answer, as choices of chunks."""

    @abstractmethod
    def end(self, index: int, request: Request) -> Json:
        """The choice of an answer's last chunk, the one with its `finish_reason`."""

    def whole(self, running: ActiveCall) -> Json:
        for request in running.requests:
            check_end(request)
        chosen, twins = self._sides(running)
        choices = [self.choice(index, request) for index, request in enumerate(chosen)]
        if len(chosen) > 1 and self._calls[0].capture is not None:  # each has files of its own
            for choice, request in zip(choices, chosen):
                choice["capture_results"] = captured(
                    request, self._context.shelf, self._calls[0].capture_wait
                )
        answer = {**self._head, "choices": choices, "usage": self._usage(chosen)}
        if twins:
            answer["baseline"] = [self.choice(index, request) for index, request in enumerate(twins)]
        return answer | self._tail(running)

    async def frames(self, running: ActiveCall, ping_seconds: float) -> AsyncIterator[bytes]:
        chosen, _ = self._sides(running)
        ready = b""
        try:
            async for item in running.news(ping_seconds):
                if item is None:
                    yield PING
                    continue
                ready += self._news(*item, len(chosen))
                if ready and not running.behind:
                    yield ready
                    ready = b""
            if ready:
                yield ready
                ready = b""
            if running.cancelled:
                return  # closed without an error, and without the frame that says all is said
            yield self._chunk([], **await asyncio.to_thread(self._tail, running))
            options = self._body.stream_options
            if options is not None and options.include_usage:
                yield self._chunk([], usage=self._usage(chosen))
        except Exception as error:
            yield ready + frame(self._context.told(error, running.id))
        yield DONE

    def _sides(self, running: ActiveCall) -> tuple[tuple[Request, ...], tuple[Request, ...]]:
        """The choices, and their unsteered twins if there are any."""
        count = len(running.requests) // (2 if self._calls[0].baseline else 1)
        return running.requests[:count], running.requests[count:]

    def _news(self, index: int, told: RequestOutput, count: int) -> bytes:
        if told.refused is not None:
            raise told.refused
        mark: Json = (
            {} if index < count else {"baseline": True}
        )  # an index of its own: clients join deltas by it
        out = b""
        if told.read is not None and self._body.return_progress:
            out += self._chunk([], prompt_progress=_progress(told), index=index, **mark)
        for choice in self.pieces(index, told):
            out += self._chunk([choice], **mark)
        if told.frames:
            out += self._chunk([], signals=told.frames, index=index, **mark)
        if told.last:
            check_end(told.request)
            out += self._chunk([self.end(index, told.request)], **mark)
        return out

    def _chunk(self, choices: list[Json], **more: Any) -> bytes:
        return frame({**self._chunk_head, "choices": choices, **more})

    def _usage(self, chosen: tuple[Request, ...]) -> Json:
        """Every prompt once, every answer."""
        each = len(chosen) // len(self._calls)
        starts = range(0, len(chosen), each)
        first, *others = (
            usage(chosen[at : at + each], self._calls[0], self._context.engine) for at in starts
        )
        for other in others:
            for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
                first[key] += other[key]
        return first

    def _tail(self, running: ActiveCall) -> Json:
        """What the answer says about itself, and the prompt as the model read it when it was asked for."""
        call, body = self._calls[0], self._body
        found = findings(self._sides(running)[0], call, self._context.shelf, bool(body.stream))
        said = [*call.warnings, *(text for request in running.requests for text in problems(request))]
        if said:
            found["warnings"] = said
        if body.return_token_ids:
            found["prompt_token_ids"] = call.prompt
        if body.return_prompt_text:
            found["prompt_text"] = self._context.engine.tokenizer.decode(call.prompt)
        return found


def _progress(told: RequestOutput) -> Json:
    """How much of a prompt is known, and how much of it was known before; milliseconds since its turn came."""
    request, began = told.request, told.request.timings.admitted
    waited = 0.0 if began is None else (request.timings.first_token or time.perf_counter()) - began
    return {
        "total": len(request.prompt_ids),
        "cache": request.cached_tokens or 0,
        "processed": told.read,
        "time_ms": round(waited * 1e3, 3),
    }
