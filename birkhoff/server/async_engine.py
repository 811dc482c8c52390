"""Async front of the engine: admission control, and delivery of step outputs to waiting clients.

One driver thread steps the engine; everything here runs on the event loop. An `ActiveCall` groups the requests of one
HTTP call: `submit` reserves places in the queue or raises 429, `close` cancels whatever still runs before the next
step. Outputs cross from the driver thread to the event loop once per step, for all requests together.
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

CallEvent = RequestOutput | Literal["idle", "cancelled"]


class AsyncEngine:
    """The engine as the routes see it. Created before the model is loaded; `start` attaches the loaded engine."""

    def __init__(self, settings: ServerSettings, metrics: Metrics):
        self.settings = settings
        self.metrics = metrics
        self.draining = False
        self._engine: Engine | None = None
        self._driver: Driver | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: dict[Request, ActiveCall | None] = {}  # None: call closed, last output still to come
        self._counted_tokens: dict[Request, int] = {}  # those of running requests that are in the metrics
        self._uncounted_prompts: set[Request] = set()  # requests whose prompts are not in the metrics yet
        self._requests_by_caller: Counter[str] = Counter()
        self._durations: deque[float] = deque([1.0], maxlen=64)  # seconds per recent request

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
        return self.loaded and self.healthy and not self.draining and self.free_places > 0

    @property
    def free_places(self) -> int:
        """Number of further requests that would be admitted: slots plus queue, minus active requests."""
        return self.engine.max_requests + self.settings.max_queue - len(self._calls)

    @property
    def _places_per_caller(self) -> int:
        """Requests that one caller may have running and waiting: with several keys three quarters of the places,
        rounded down, and at least the slots."""
        slots = self.engine.max_requests
        places = slots + self.settings.max_queue
        return places if len(self.settings.api_key) < 2 else max(slots, places * 3 // 4)

    @property
    def active_requests(self) -> list[Request]:
        return list(self._calls)

    def start(self, engine: Engine) -> None:
        """Accept requests. Must be called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._driver = engine.driver(self._on_step)

    def stop(self) -> None:
        """Cancel all requests, finish captures and close the engine."""
        self.draining = True
        self.stop_driver()
        if self._engine is not None:
            self._engine.close()

    def stop_driver(self) -> None:
        """Cancel all requests and stop stepping. The engine stays open."""
        if self._driver is not None:
            self._driver.cancel(self.active_requests)
            self._driver.close()

    def new_call(
        self,
        requests: Sequence[Request],
        first_choices: Sequence[Request],
        caller: str,
        call_id: str,
        client_chose_id: bool,
    ) -> ActiveCall:
        """Create a call that has not been submitted. An id chosen by the client must not be in use.

        `first_choices` has one request of each prompt: metrics count a prompt once, as `usage` does."""
        if client_chose_id and self._calls_with_id(call_id):
            raise ApiError(
                409,
                "a call of this id is running. Choose another.",
                code="request-id-taken",
                param="request_id",
            )
        return ActiveCall(self, requests, first_choices, caller, call_id)

    def cancel_call(self, call_id: str) -> bool:
        """Cancel the call with this id. Returns False if there is none."""
        calls = self._calls_with_id(call_id)
        for call in calls:
            call.cancel("asked")
        return bool(calls)

    def end_calls(self) -> None:
        """End all calls with an error: the server stops and their time to finish is over."""
        error = ApiError(
            503,
            "the server stopped before this answer was complete. Send the call again.",
            code="draining",
            headers={"Retry-After": "5"},
        )
        for call in {id(call): call for call in self._calls.values() if call is not None}.values():
            call.cancel("stopping", error)

    def call_id(self, request: Request) -> str | None:
        call = self._calls.get(request)
        return None if call is None else call.id

    def _calls_with_id(self, call_id: str) -> list[ActiveCall]:
        return [call for call in self._calls.values() if call is not None and call.id == call_id]

    def admit(self, call: ActiveCall) -> None:
        """Submit the requests of `call` to the driver, or raise 429 (queue full) or 503 (stopping)."""
        if self.draining:
            raise ApiError(
                503, "the server is stopping. Try again later.", code="draining", headers={"Retry-After": "5"}
            )
        count, slots = len(call.requests), self.engine.max_requests
        share, own = self._places_per_caller, self._requests_by_caller[call.caller]
        if count > self.free_places or own + count > share:
            self.metrics.rejected.labels("queue").inc()
            mean = sum(self._durations) / len(self._durations)
            retry_after = min(30, max(1, math.ceil(mean * len(self._calls) / max(slots, 1))))
            holders, places = (
                (f"{len(self._calls)} answers are", "there is no place")
                if count > self.free_places
                else (f"{own} answers of this key are", f"one key has {share} places, not enough")
            )
            raise ApiError(
                429,
                f"{holders} running or waiting and {places} for {count} more. Try again in {retry_after} s.",
                code="queue-full",
                headers={"Retry-After": str(retry_after)},
            )
        assert self._driver is not None
        self._driver.submit(call.requests)
        for request in call.requests:
            self._calls[request] = call
        self._uncounted_prompts.update(call.first_choices)
        self._requests_by_caller[call.caller] += count

    def release(self, call: ActiveCall, cause: str) -> None:
        """Cancel the unfinished requests of `call`; `cause` labels the metric."""
        unfinished = [request for request in call.requests if self._calls.get(request) is call]
        if unfinished and self._driver is not None:
            self.metrics.cancelled.labels(cause).inc(len(unfinished))
            self._driver.cancel(unfinished)
            for request in unfinished:
                self._calls[request] = None
        self._requests_by_caller[call.caller] -= len(unfinished)
        if not self._requests_by_caller[call.caller]:
            del self._requests_by_caller[call.caller]

    def _on_step(self, outputs: list[RequestOutput]) -> None:
        """Runs in the driver thread after every step."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._dispatch, outputs)

    def _dispatch(self, outputs: list[RequestOutput]) -> None:
        now = time.monotonic()
        self._count_tokens(outputs)
        for output in outputs:
            call = self._calls.get(output.request)
            if output.last:
                self._calls.pop(output.request, None)
                self.metrics.record_request(output.request)
                if call is not None:
                    self._requests_by_caller[call.caller] -= 1
                    self._durations.append(now - call.started)
            if call is not None:
                call.put(output)

    def _count_tokens(self, outputs: list[RequestOutput]) -> None:
        """Count new tokens when they come, so that a long answer is not one jump of the metrics at its end."""
        new_tokens = 0
        for output in outputs:
            request, tokens = output.request, len(output.request.output_ids)
            if request in self._uncounted_prompts and (tokens or output.last):
                self._uncounted_prompts.remove(request)
                self.metrics.record_prompt(request)
            if tokens:
                new_tokens += tokens - self._counted_tokens.get(request, 0)
                self._counted_tokens[request] = tokens
            if output.last:
                self._counted_tokens.pop(request, None)
        if new_tokens:
            self.metrics.generated_tokens.inc(new_tokens)


class ActiveCall:
    """The engine requests of one HTTP call, from submission until they finish or the call is closed."""

    def __init__(
        self,
        async_engine: AsyncEngine,
        requests: Sequence[Request],
        first_choices: Sequence[Request],
        caller: str,
        call_id: str,
    ):
        self.requests = tuple(requests)
        self.first_choices = tuple(first_choices)
        self.caller = caller
        self.started = time.monotonic()
        self.id = call_id
        self._async_engine = async_engine
        self._loop = asyncio.get_running_loop()
        self._index = {request: index for index, request in enumerate(requests)}
        self._events: deque[CallEvent] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.last_event_time = self._loop.time()
        self._unfinished = len(requests)
        self._cancel_cause = ""
        self.error: ApiError | None = None  # what ended the call, if its client is to know

    async def submit(self) -> None:
        """Submit the requests and wait until the engine has accepted all of them.

        Raises the refusal if there is one. After a successful `submit` the caller must call `close`."""
        try:
            self._async_engine.admit(self)
        except ApiError:
            self._finish_unstarted()
            raise
        for _ in self.requests:  # the engine accepts or refuses each of them before its next step
            event = await self._next()
            if not isinstance(event, RequestOutput):
                break
            if event.refused is not None:
                self._async_engine.release(self, "refused")
                self._finish_unstarted()
                raise event.refused

    def close(self) -> None:
        """Cancel what still runs. Does nothing once all requests have finished."""
        self._async_engine.release(self, self._cancel_cause or "left")

    def _finish_unstarted(self) -> None:
        """Finish requests that never ran, so that captures opened for them are closed."""
        for request in self.requests:
            if not request.done and request.slot is None and not request.output_ids:
                request.finish("cancelled")

    def put(self, event: CallEvent) -> None:
        self._events.append(event)
        self.last_event_time = self._loop.time()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancel(self, cause: str, error: ApiError | None = None) -> None:
        """End the call; `cause` labels the metric. With an `error` its response is that error, not a silent end."""
        self._cancel_cause, self.error = cause, error
        self.put("cancelled")

    @property
    def cancelled(self) -> bool:
        return bool(self._cancel_cause)

    @property
    def note(self) -> str:
        """For the log: what ended the call before its last token, empty if nothing did."""
        return (self.error.code or self.error.type) if self.error is not None else self._cancel_cause

    @property
    def has_pending(self) -> bool:
        """Whether more events are queued. A writer can then merge their bytes into one packet."""
        return bool(self._events)

    async def _next(self) -> CallEvent:
        while not self._events:
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._events.popleft()

    async def outputs(
        self, ping_seconds: float | None = None
    ) -> AsyncIterator[tuple[int, RequestOutput] | None]:
        """Yield (request index, output) until all requests have finished.

        Yields None after each `ping_seconds` without an event. Ends early if the call is cancelled."""
        idle_timer = None if ping_seconds is None else _IdleTimer(self, ping_seconds)
        try:
            while self._unfinished:
                event = await self._next()
                if event == "cancelled":
                    return
                if event == "idle":
                    yield None
                    continue
                if event.last:
                    self._unfinished -= 1
                in_prompt = event.computed_prompt_tokens is not None
                if event.last or event.tokens or event.parsed or event.frames or in_prompt:
                    yield self._index[event.request], event
        finally:
            if idle_timer is not None:
                idle_timer.close()

    async def wait(self) -> None:
        """Wait until all requests have finished or the call is cancelled."""
        async for _ in self.outputs():
            pass


class _IdleTimer:
    """Puts an "idle" event into a call that had no event for `seconds`.

    Uses one timer that re-arms itself when it fires; resetting a timer for every token would cost more than writing
    the token."""

    def __init__(self, call: ActiveCall, seconds: float):
        self._call = call
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(seconds, self._check)

    def _check(self) -> None:
        if self._loop.time() >= self._call.last_event_time + self._seconds:
            self._call.put("idle")
        self._timer = self._loop.call_at(self._call.last_event_time + self._seconds, self._check)

    def close(self) -> None:
        self._timer.cancel()
