"""One thread that steps an engine for everybody, for callers that must not compute themselves.

Elsewhere whoever waits for a token drives the engine. A server waits for many at once and must stay awake, so it leaves
the stepping to this thread: requests go in through `submit`, and after every step `deliver` is called once, here, with
what each of them has to say. A request that is refused or cancelled ends in the same way, with a last event. Nothing
blocks the caller: `submit` and `cancel` only leave notes, which are read before the next step begins.

A step that fails ends its requests and the thread goes on; a defect outside a step ends all of them, and `failure` says
so from then on.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from birkhoff.engine.engine import EngineCore
from birkhoff.engine.request import Request, TokenEvent
from birkhoff.errors import BirkhoffError, EngineClosed
from birkhoff.hooks.signals import Frame
from birkhoff.text.events import Event
from birkhoff.text.output_stream import ChatStream


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """News of one request: its tokens since last time, what they meant in a chat, signals, and why it was refused.

    `read` is how many tokens of the prompt are known, told until the first token of the answer is there."""

    request: Request
    tokens: tuple[TokenEvent, ...] = ()
    parsed: tuple[Event, ...] = ()
    frames: tuple[Frame, ...] = ()
    refused: BirkhoffError | None = None
    read: int | None = None

    @property
    def last(self) -> bool:
        return self.refused is not None or bool(self.tokens and self.tokens[-1].finish_reason)


class Driver:
    def __init__(self, core: EngineCore, deliver: Callable[[list[RequestOutput]], None]):
        self._core = core
        self._deliver = deliver
        self._inbox: deque[tuple[Request, ...]] = deque()  # the requests of one call
        self._parsed: dict[Request, int] = {}  # taken and not ended: how many chat events were passed on
        self._wake = threading.Event()
        self._closing = False
        self.failure: BaseException | None = None
        self.steps = 0
        self.busy_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="birkhoff-driver", daemon=True)
        self._thread.start()

    def submit(self, requests: Iterable[Request]) -> None:
        """Submit the requests of one call before the next step: all of them, or none if one is refused."""
        if self.failure is not None or self._closing:
            raise EngineClosed("the engine has stopped. Start the server again.")
        self._inbox.append(tuple(requests))
        self._wake.set()

    def cancel(self, requests: Iterable[Request]) -> None:
        """End requests before the next step; harmless for those that have ended."""
        for request in requests:
            self._core.request_cancel(request)
        self._wake.set()

    @property
    def running(self) -> int:
        """Requests that were taken and have not ended, queued ones among them."""
        return len(self._parsed) + sum(map(len, self._inbox))

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.failure is None

    def close(self, seconds: float = 10.0) -> None:
        """Stop after the step that is running; whoever is left gets no further token."""
        self._closing = True
        self._wake.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._take()
                if self._parsed:
                    started = time.perf_counter()
                    stepped = self._core.step()
                    self.busy_seconds += time.perf_counter() - started
                    self.steps += stepped
                    self._tell()
                    assert stepped or not self._parsed or self._inbox, "requests wait but nothing can run"
                elif not self._inbox:
                    self._wake.wait()
                    self._wake.clear()
        except BaseException as error:
            self.failure = error
            for request in [*self._parsed, *(request for call in self._inbox for request in call)]:
                if not request.done:
                    request.finish("error", error=error if isinstance(error, Exception) else None)
            self._tell()

    def _take(self) -> None:
        news = []
        while self._inbox:
            requests = self._inbox.popleft()
            try:
                self._core.submit(*requests)
            except BirkhoffError as refusal:
                news += [RequestOutput(request, refused=refusal) for request in requests]
            else:
                self._parsed |= dict.fromkeys(requests, 0)
                news += [RequestOutput(request) for request in requests]
        if news:
            self._deliver(news)

    def _tell(self) -> None:
        news = []
        for request in list(self._parsed):
            tokens = tuple(_popped(request.events))
            parsed: tuple[Event, ...] = ()
            if isinstance(request.sink, ChatStream):
                parsed = tuple(request.sink.events[self._parsed[request] :])
                self._parsed[request] += len(parsed)
            frames = _frames(request)
            first = len(request.output_ids) <= len(tokens) and request.computed > 0
            if tokens or parsed or frames or first:
                read = min(request.computed, len(request.prompt_ids)) if first else None
                news.append(RequestOutput(request, tokens, parsed, frames, read=read))
            if request.done:
                del self._parsed[request]
        if news:
            self._deliver(news)


def _popped(events: deque[TokenEvent]) -> Iterable[TokenEvent]:
    while events:
        yield events.popleft()


def _frames(request: Request) -> tuple[Frame, ...]:
    signals = request.results.signals
    return () if signals is None else tuple(signals.take())
