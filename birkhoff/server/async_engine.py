"""Where calls meet the engine: who is let in, and the hand-over between its thread and many waiting clients.

One driving thread steps the engine; this file lives on the event loop. A `ActiveCall` is the requests of one call:
entering takes places in the queue or is refused with 429, leaving ends whatever still runs, before the next step. News
crosses threads once per step, for everybody together.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Literal

from birkhoff.api.driver import Driver, RequestOutput
from birkhoff.engine.request import Request
from birkhoff.server.api_errors import ApiError
from birkhoff.server.server_settings import ServerSettings

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine
    from birkhoff.server.metrics import Metrics


class AsyncEngine:
    def __init__(self, settings: ServerSettings, metrics: Metrics):
        self.settings = settings
        self.metrics = metrics
        self.draining = False
        self._engine: Engine | None = None
        self._driver: Driver | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: dict[
            Request, ActiveCall | None
        ] = {}  # None: its call has left, the engine has not said so yet
        self._held: Counter[str] = Counter()  # places by caller
        self._seconds: deque[float] = deque([1.0], maxlen=64)  # how long recent answers took

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise ApiError(
                503,
                "the model is still being loaded. Try again soon.",
                code="loading",
                headers={"Retry-After": "2"},
            )
        return self._engine

    @property
    def loaded(self) -> bool:
        return self._engine is not None

    @property
    def healthy(self) -> bool:
        return self._driver is None or self._driver.alive

    @property
    def ready(self) -> bool:
        return self.loaded and self.healthy and not self.draining and self.places > 0

    @property
    def places(self) -> int:
        """How many more answers would be let in."""
        return self.engine.max_requests + self.settings.max_queue - len(self._running)

    @property
    def live(self) -> list[Request]:
        return list(self._running)

    def start(self, engine: Engine) -> None:
        """Open for work; called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._driver = engine.driver(self._from_driver)

    def stop(self) -> None:
        """End everything that still runs, finish captures, close the engine."""
        self.draining = True
        self.halt()
        if self._engine is not None:
            self._engine.close()

    def halt(self) -> None:
        """Step no more; the engine stays open for whoever else holds it."""
        if self._driver is not None:
            self._driver.cancel(self.live)
            self._driver.close()

    def running(self, requests: Sequence[Request], caller: str, call_id: str, own: bool) -> ActiveCall:
        """`own`: the caller chose the id, so that nobody else may have it."""
        if own and any(call is not None and call.id == call_id for call in self._running.values()):
            raise ApiError(
                409,
                "a call of this id is running. Choose another.",
                code="request-id-taken",
                param="request_id",
            )
        return ActiveCall(self, requests, caller, call_id)

    def cancel_call(self, request_id: str) -> bool:
        """End the call of that id; False when there is none."""
        found = [call for call in self._running.values() if call is not None and call.id == request_id]
        for call in found:
            call.cancel("asked")
        return bool(found)

    def call_id(self, request: Request) -> str | None:
        call = self._running.get(request)
        return None if call is None else call.id

    def admit(self, call: ActiveCall) -> None:
        if self.draining:
            raise ApiError(
                503, "the server is stopping. Try again later.", code="draining", headers={"Retry-After": "5"}
            )
        wanted, slots = len(call.requests), self.engine.max_requests
        share = slots + self.settings.max_queue
        if len(self.settings.api_key) > 1:  # one greedy key leaves room for the others
            share = max(slots, math.ceil(share * 0.75))
        if wanted > self.places or self._held[call.caller] + wanted > share:
            self.metrics.rejected.labels("queue").inc()
            mean = sum(self._seconds) / len(self._seconds)
            after = min(30, max(1, math.ceil(mean * len(self._running) / max(slots, 1))))
            raise ApiError(
                429,
                f"{len(self._running)} answers are running or waiting and there is no place for {wanted} more. "
                f"Try again in {after} s.",
                code="queue-full",
                headers={"Retry-After": str(after)},
            )
        assert self._driver is not None
        self._driver.submit(call.requests)
        for request in call.requests:
            self._running[request] = call
        self._held[call.caller] += wanted

    def leave(self, call: ActiveCall, cause: str) -> None:
        """End what still runs of a call."""
        left = [request for request in call.requests if self._running.get(request) is call]
        if left and self._driver is not None:
            self.metrics.cancelled.labels(cause).inc(len(left))
            self._driver.cancel(left)
            for request in left:
                self._running[request] = None
        self._held[call.caller] -= len(left)
        if not self._held[call.caller]:
            del self._held[call.caller]

    def _from_driver(self, news: list[RequestOutput]) -> None:
        """In the engine's thread, after every step."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._spread, news)

    def _spread(self, news: list[RequestOutput]) -> None:
        now = time.monotonic()
        for told in news:
            call = self._running.get(told.request)
            if told.last:
                self._running.pop(told.request, None)
                self.metrics.ended(told.request)
                if call is not None:
                    self._held[call.caller] -= 1
                    self._seconds.append(now - call.began)
            if call is not None:
                call.hear(told)


class ActiveCall:
    """The requests of one call while they run."""

    def __init__(self, hub: AsyncEngine, requests: Sequence[Request], caller: str, call_id: str):
        self.requests = tuple(requests)
        self.caller = caller
        self.began = time.monotonic()
        self.id = call_id
        self._hub = hub
        self._loop = asyncio.get_running_loop()
        self._places = {request: place for place, request in enumerate(requests)}
        self._news: deque[RequestOutput | Literal["quiet", "cancelled"]] = deque()
        self._waiting: asyncio.Future[None] | None = None  # the one who waits for news
        self.heard = self._loop.time()  # when there was news last
        self._open = len(requests)
        self._cancelled = ""

    async def enter(self) -> None:
        """Take places, or be refused. Whoever enters must `leave`."""
        try:
            self._hub.admit(self)
        except ApiError:
            self._give_up()
            raise
        taken = 0
        while taken < len(self.requests):  # all are taken before the next step, or it is said why not
            told = await self._next()
            if not isinstance(told, RequestOutput):
                break
            if told.refused is not None:
                self._hub.leave(self, "refused")
                self._give_up()
                raise told.refused
            taken += 1

    def leave(self) -> None:
        """End what still runs; harmless when nothing does."""
        self._hub.leave(self, self._cancelled or "left")

    def _give_up(self) -> None:
        """Requests that never ran end here, and so do the captures that were begun for them."""
        for request in self.requests:
            if not request.done and request.slot is None and not request.output_ids:
                request.finish("cancelled")

    def hear(self, told: RequestOutput | Literal["quiet", "cancelled"]) -> None:
        self._news.append(told)
        self.heard = self._loop.time()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def cancel(self, cause: str) -> None:
        self._cancelled = cause
        self.hear("cancelled")

    @property
    def cancelled(self) -> bool:
        return bool(self._cancelled)

    @property
    def behind(self) -> bool:
        """Whether more is known already; what is written can then wait for it and go out in one piece."""
        return bool(self._news)

    async def _next(self) -> RequestOutput | Literal["quiet", "cancelled"]:
        while not self._news:
            self._waiting = self._loop.create_future()
            await self._waiting
        return self._news.popleft()

    async def news(
        self, ping_seconds: float | None = None
    ) -> AsyncIterator[tuple[int, RequestOutput] | None]:
        """(choice, what is new) until every request has ended; None when there was nothing for so long."""
        watch = None if ping_seconds is None else _Watch(self, ping_seconds)
        try:
            while self._open:
                told = await self._next()
                if told == "cancelled":
                    return
                if told == "quiet":
                    yield None
                    continue
                if told.last:
                    self._open -= 1
                if told.tokens or told.parsed or told.frames or told.refused or told.read is not None:
                    yield self._places[told.request], told
        finally:
            if watch is not None:
                watch.close()

    async def finish(self) -> None:
        """Wait for the end of all of them."""
        async for _ in self.news():
            pass


class _Watch:
    """Says "quiet" to a call that has heard nothing for so long. One timer, looked at when it is over: setting one for
    every token would cost more than writing the token."""

    def __init__(self, running: ActiveCall, seconds: float):
        self._running = running
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        if self._loop.time() >= self._running.heard + self._seconds:
            self._running.hear("quiet")
        self._timer = self._loop.call_at(self._running.heard + self._seconds, self._look)

    def close(self) -> None:
        self._timer.cancel()
