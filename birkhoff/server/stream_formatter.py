"""The stream of a generating call, in the wire format of any API.

Subclasses define the events: those before the first output, those of an output, those at the end, and that of an error.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from typing import Any, ClassVar

from birkhoff.api.driver import RequestOutput
from birkhoff.server.api_errors import ApiError
from birkhoff.server.async_engine import ActiveCall
from birkhoff.server.context import ServingContext
from birkhoff.server.generation import raise_on_failure
from birkhoff.server.sse import PING


class StreamFormatter(ABC):
    """Renders the results of one call, complete or as a stream. `ping` is the heartbeat of an idle stream, or empty."""

    ping: ClassVar[bytes] = PING
    slow_start = False  # whether `start_events` computes for long, and runs in a worker thread

    def __init__(self, context: ServingContext):
        self._context = context

    @abstractmethod
    def full_response(self, call: ActiveCall) -> dict[str, Any]:
        """The complete response object."""

    def start_events(self, call: ActiveCall) -> Iterable[bytes]:
        return ()

    @abstractmethod
    def output_events(self, index: int, output: RequestOutput) -> Iterable[bytes]:
        """The new output of the request with this index."""

    @abstractmethod
    def end_events(self, call: ActiveCall) -> Iterable[bytes]:
        """What follows the last output. Runs in a worker thread, so it may wait for capture files."""

    @abstractmethod
    def error_event(self, error: ApiError) -> bytes: ...

    async def _start(self, call: ActiveCall, ping_seconds: float) -> AsyncIterator[bytes]:
        """The bytes of the events before the first output, with heartbeats while they are computed."""
        if not self.slow_start:
            data = b"".join(self.start_events(call))
        else:
            work = asyncio.ensure_future(asyncio.to_thread(lambda: b"".join(self.start_events(call))))
            while not (await asyncio.wait([work], timeout=ping_seconds))[0]:
                yield self.ping
            data = work.result()
        if data:
            yield data

    async def stream(self, call: ActiveCall, ping_seconds: float) -> AsyncIterator[bytes]:
        """The bytes of the response; events that are pending together are sent as one packet.

        The stream of a cancelled call ends without a last event, unless it has an error. An error after the first byte
        is an event."""
        pending = b""
        try:
            async for data in self._start(call, ping_seconds):
                yield data
            async for item in call.outputs(ping_seconds):
                if item is None:
                    if self.ping:
                        yield self.ping
                    continue
                index, output = item
                if output.refused is not None:
                    raise output.refused
                pending += b"".join(self.output_events(index, output))
                if pending and not call.has_pending:
                    yield pending
                    pending = b""
            if pending:
                yield pending
                pending = b""
            if call.cancelled:
                if call.error is not None:
                    yield self.error_event(call.error)
                return
            for request in call.requests:
                raise_on_failure(request)
            for event in await asyncio.to_thread(lambda: list(self.end_events(call))):
                yield event
        except Exception as error:
            call.error = self._context.stream_error(error, call.id)
            yield pending + self.error_event(call.error)
