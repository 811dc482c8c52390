"""What every route needs: read a body, find the model, run a call, tell a problem.

`run` is the one way a call reaches the engine. It lets the call in or refuses it, and watches the client all the while:
one that leaves, streamed or not, ends its answers before the next step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.errors import quoted
from birkhoff.server.access_log import AccessLog
from birkhoff.server.api_errors import ApiError, bad, problem_of
from birkhoff.server.async_engine import ActiveCall, AsyncEngine
from birkhoff.server.body import LARGE, Model, RequestBody, checked, json_fields
from birkhoff.server.calls import GenerationCall
from birkhoff.server.capture_index import CaptureIndex
from birkhoff.server.fields import InterpFields, flattened, notices
from birkhoff.server.json_grammar import Grammars
from birkhoff.server.reply import json_response
from birkhoff.server.server_settings import ServerSettings
from birkhoff.server.sse import EventStream, first_of
from birkhoff.server.steering_routes import request_edits

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine

Made = TypeVar("Made")
HEAVY = 32 * 1024  # bytes of a body from which its text is encoded beside the event loop


class ResponseFormatter(Protocol):
    """How the answers of one call look in one dialect."""

    def whole(self, running: ActiveCall) -> dict[str, Any]: ...
    def frames(self, running: ActiveCall, ping_seconds: float) -> AsyncIterator[bytes]: ...


class ServingContext:
    def __init__(self, settings: ServerSettings, hub: AsyncEngine, journal: AccessLog, name: str):
        self.settings = settings
        self.hub = hub
        self.journal = journal
        self.name = name
        self.grammars = Grammars(lambda: self.engine)
        self.shelf = CaptureIndex(lambda: self.engine.capture_roots)

    @property
    def engine(self) -> Engine:
        return self.hub.engine

    @property
    def thinks(self) -> bool:
        """Whether answers begin with reasoning when nobody says: a released checkpoint's do, nano was not taught to."""
        return self.engine.name != "nano"

    @cached_property
    def fingerprint(self) -> str:
        """What decides the bits of an answer besides the weights; the same for as long as the engine is."""
        settings = self.engine.settings
        return "birkhoff-" + "-".join(str(settings[key]) for key in ("dtype", "numerics", "kernels"))

    def model_name(self, asked: str | None) -> str:
        if asked in (None, "", self.name):
            return self.name
        raise ApiError(
            404,
            f"the model {quoted(asked)} is not served here. This is {self.name}.",
            code="model_not_found",
            param="model",
        )

    def room(self, prompt_tokens: int) -> int | None:
        """All that is left of the context; None when there is nothing, so that the refusal is the engine's."""
        left = self.engine.max_context - prompt_tokens
        return left if left > 0 else None

    async def read(
        self, http: HttpRequest, model: type[Model], most_bytes: int | None = None
    ) -> tuple[Model, list[str]]:
        """The checked body, and what to warn about."""
        s = self.settings
        fields = await json_fields(http, most_bytes or s.max_body_bytes, s.body_seconds, s.max_depth)
        fields, said = flattened(fields)
        if int(http.headers.get("content-length", 0) or 0) > LARGE:
            body = await asyncio.to_thread(checked, model, fields)
        else:
            body = checked(model, fields)
        return body, said + notices(body, http.headers.get("x-strict") == "1")

    async def prepare(self, make: Callable[[], Made], heavy: bool = False) -> Made:
        """Do what may take long beside the event loop; little things stay on it, since a hand-over costs more."""
        return await asyncio.to_thread(make) if heavy else make()

    async def call(self, http: HttpRequest, body: RequestBody, make: Callable[[], Made]) -> Made:
        """What a body comes to; long texts and grammars are worked on beside the event loop."""
        length = http.headers.get("content-length", "")
        forms = getattr(body, "tools", None) or getattr(body, "response_format", None)
        return await self.prepare(make, heavy=not length.isdecimal() or int(length) > HEAVY or bool(forms))

    def looking(self, body: InterpFields) -> dict[str, Any]:
        """The extension fields as keywords of a `GenerationCall`."""
        found: dict[str, Any] = {"steer": request_edits(body.steers, self.engine), "capture": body.capture}
        found["capture_wait"], found["baseline"] = body.capture_wait, body.baseline
        found["signals"] = body.signals
        if body.baseline and not found["steer"]:
            raise bad(
                "baseline is the unsteered twin of a steered answer, and nothing steers this one.", "baseline"
            )
        return found

    async def run(
        self,
        http: HttpRequest,
        calls: GenerationCall | list[GenerationCall],
        shape: ResponseFormatter,
        stream: bool,
        request_id: str | None = None,
    ) -> Response:
        """Run one call, or one per prompt, and answer in its dialect."""
        calls = [calls] if isinstance(calls, GenerationCall) else calls
        heavy = sum(len(call.prompt) for call in calls) > 4096
        requests = await self.prepare(
            lambda: [each for call in calls for each in call.requests(self.engine)], heavy
        )
        call_id = request_id or http.state.request_id
        running = self.hub.running(requests, http.state.caller, call_id, own=request_id is not None)
        await running.enter()
        if stream:
            return EventStream(shape.frames(running, self.settings.ping_seconds), leave=running.leave)
        ending = asyncio.ensure_future(running.finish())
        try:
            if await first_of(ending, http.receive):
                running.cancel("left")
                raise ApiError(499, "the client left.", code="left")
            ending.result()
            if running.cancelled:
                raise ApiError(499, "this answer was cancelled.", code="cancelled")
        finally:
            ending.cancel()
            running.leave()
        waits = any(call.capture is not None for call in calls)
        return json_response(await self.prepare(lambda: shape.whole(running), heavy=waits))

    def told(self, error: Exception, call_id: str) -> dict[str, Any]:
        """An error that comes after the first byte."""
        problem = problem_of(error)
        if problem.status >= 500:
            self.journal.defect(call_id, error)
        return problem.as_json()
