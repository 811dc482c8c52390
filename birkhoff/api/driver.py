"""A thread that steps an engine for callers that must not block, such as a server.

Elsewhere a caller that waits for a token steps the engine itself. A server waits for many requests and must stay
responsive, so this thread does the stepping: requests are passed to `submit`, and after every step `deliver` is called
once, in this thread, with the new outputs. A refused or cancelled request ends with a last output as well. `submit` and
`cancel` do not block; they take effect before the next step.

A step that fails ends its requests and the thread continues; an error outside a step ends all requests and is stored in
`failure`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from birkhoff.engine.request import Request, TokenEvent
from birkhoff.engine.request_loop import RequestLoop
from birkhoff.errors import BirkhoffError, EngineClosed
from birkhoff.hooks.signals import Frame
from birkhoff.text.events import Event
from birkhoff.text.output_stream import ChatStream


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What is new about one request: tokens, chat events parsed from them, signals, or the error that refused it.

    `computed_prompt_tokens` is the number of prompt tokens computed so far, until the first output token; then None."""

    request: Request
    tokens: tuple[TokenEvent, ...] = ()
    parsed: tuple[Event, ...] = ()
    frames: tuple[Frame, ...] = ()
    refused: BirkhoffError | None = None
    computed_prompt_tokens: int | None = None

    @property
    def last(self) -> bool:
        return self.refused is not None or bool(self.tokens and self.tokens[-1].finish_reason)


class Driver:
    """Starts its thread on construction; `deliver` is called in that thread."""

    def __init__(self, core: RequestLoop, deliver: Callable[[list[RequestOutput]], None]):
        self._core = core
        self._deliver = deliver
        self._inbox: deque[tuple[Request, ...]] = deque()  # the requests of one call
        self._active: dict[Request, int] = {}  # submitted and not done: number of chat events delivered
        self._wake = threading.Event()
        self._closing = False
        self.failure: BaseException | None = None
        self.steps = 0
        self._thread = threading.Thread(target=self._run, name="birkhoff-driver", daemon=True)
        self._thread.start()

    def submit(self, requests: Iterable[Request]) -> None:
        """Submit the requests of one call before the next step: all of them, or none if one is refused."""
        if self.failure is not None or self._closing:
            raise EngineClosed("the engine has stopped. Start the server again.")
        self._inbox.append(tuple(requests))
        self._wake.set()

    def cancel(self, requests: Iterable[Request]) -> None:
        """End requests before the next step; no effect on those that are done."""
        for request in requests:
            self._core.request_cancel(request)
        self._wake.set()

    @property
    def running(self) -> int:
        """Number of requests that were submitted and are not done, including queued ones."""
        return len(self._active) + sum(map(len, self._inbox))

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.failure is None

    def close(self, seconds: float = 10.0) -> None:
        """Stop after the current step; remaining requests get no further output."""
        self._closing = True
        self._wake.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._submit_queued()
                if self._active:
                    stepped = self._core.step()
                    self.steps += stepped
                    self._deliver_outputs()
                    assert stepped or not self._active or self._inbox, "requests wait but nothing can run"
                elif not self._inbox:
                    self._wake.wait()
                    self._wake.clear()
        except BaseException as error:
            self.failure = error
            for request in [*self._active, *(request for call in self._inbox for request in call)]:
                if not request.done:
                    request.finish("error", error=error if isinstance(error, Exception) else None)
            self._deliver_outputs()

    def _submit_queued(self) -> None:
        outputs = []
        while self._inbox:
            requests = self._inbox.popleft()
            try:
                self._core.submit(*requests)
            except BirkhoffError as refusal:
                outputs += [RequestOutput(request, refused=refusal) for request in requests]
            else:
                self._active |= dict.fromkeys(requests, 0)
                outputs += [RequestOutput(request) for request in requests]
        if outputs:
            self._deliver(outputs)

    def _deliver_outputs(self) -> None:
        outputs = []
        for request in list(self._active):
            tokens = tuple(_drain(request.events))
            parsed: tuple[Event, ...] = ()
            if isinstance(request.sink, ChatStream):
                parsed = tuple(request.sink.events[self._active[request] :])
                self._active[request] += len(parsed)
            frames = _frames(request)
            computed = request.num_computed_tokens
            in_prefill = len(request.output_ids) <= len(tokens) and computed > 0
            if tokens or parsed or frames or in_prefill:
                in_prompt = min(computed, len(request.prompt_ids)) if in_prefill else None
                outputs.append(
                    RequestOutput(request, tokens, parsed, frames, computed_prompt_tokens=in_prompt)
                )
            if request.done:
                del self._active[request]
        if outputs:
            self._deliver(outputs)


def _drain(events: deque[TokenEvent]) -> Iterable[TokenEvent]:
    while events:
        yield events.popleft()


def _frames(request: Request) -> tuple[Frame, ...]:
    signals = request.results.signals
    return () if signals is None else tuple(signals.take())
