"""`ServingContext`: what all routes share.

`run` is the only path from an HTTP call to the engine. It submits the requests or refuses the call, and cancels the
requests before the next step if the client disconnects, streamed or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.embedded import has_sizes_of
from birkhoff.errors import quoted
from birkhoff.server.access_log import AccessLog
from birkhoff.server.api_errors import ApiError, bad_request, to_api_error
from birkhoff.server.async_engine import ActiveCall, AsyncEngine
from birkhoff.server.body import LARGE_BODY, Body, RequestBody, read_json, refuse_unknown_fields, validate
from birkhoff.server.capture_index import CaptureIndex
from birkhoff.server.fields import InterpFields, spread_extra_body
from birkhoff.server.generation import GenerationCall
from birkhoff.server.json_grammar import GrammarCompiler
from birkhoff.server.reply import json_response
from birkhoff.server.server_settings import ServerSettings
from birkhoff.server.sse import EventStream, wait_or_disconnect
from birkhoff.server.steering_routes import request_edits

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine

Result = TypeVar("Result")
OFFLOAD_BODY_BYTES = 16 * 1024  # larger bodies are tokenized in a worker thread
OFFLOAD_PROMPT_TOKENS = 4096  # longer prompts are turned into requests in a worker thread


class ResponseFormatter(Protocol):
    """Renders the results of one call in the wire format of one API."""

    def full_response(self, call: ActiveCall) -> dict[str, Any]: ...
    def stream(self, call: ActiveCall, ping_seconds: float) -> AsyncIterator[bytes]: ...


class ServingContext:
    """Settings, engine, log and caches shared by all routes, and the steps every generating route takes."""

    def __init__(
        self,
        settings: ServerSettings,
        async_engine: AsyncEngine,
        access_log: AccessLog,
        model_names: tuple[str, ...],
    ):
        self.settings = settings
        self.async_engine = async_engine
        self.access_log = access_log
        self.model_names = model_names
        self.model_name = model_names[0]
        self.grammars = GrammarCompiler(lambda: self.engine)
        self.capture_index = CaptureIndex(lambda: self.engine.capture_roots)

    @property
    def engine(self) -> Engine:
        return self.async_engine.engine

    @cached_property
    def thinks_by_default(self) -> bool:
        """Whether chats begin with reasoning unless the call says otherwise. nano, in whatever
        format, was not trained to reason."""
        return self.engine.chat_abilities["reasoning"] and not has_sizes_of("nano", self.engine.config)

    @cached_property
    def fingerprint(self) -> str:
        """`system_fingerprint`: the engine settings that affect numerics. Constant for the life of the engine."""
        settings = self.engine.settings
        keys = ("dtype", "numerics", "kernels", "backend", "attention")
        return "birkhoff-" + "-".join(str(settings[key]) for key in keys if key in settings)

    def check_model(self, requested: str | None) -> str:
        """Return the name a call uses for the served model; raise 404 if the call names another model."""
        if not requested:
            return self.model_name
        if self.settings.any_model or requested.removesuffix(":latest") in self.model_names:
            return requested  # Ollama's clients add ":latest"
        raise ApiError(
            404,
            f"the model {quoted(requested)} is not served here. This is {' or '.join(self.model_names)}. "
            "GET /v1/models lists the names; birkhoff serve --any-model accepts every name.",
            code="model_not_found",
            param="model",
        )

    def remaining_context(self, prompt_tokens: int) -> int | None:
        """Tokens left in the context after the prompt; None if there are none, which the engine then refuses."""
        left = self.engine.max_context - prompt_tokens
        return left if left > 0 else None

    def token_text(self, token_id: int) -> str:
        """A token as text: the name of a chat marker, or its bytes decoded with replacement characters."""
        tokenizer = self.engine.tokenizer
        return tokenizer.marker(token_id) or tokenizer.piece(token_id).decode("utf-8", "replace")

    async def read_body(
        self, http: HttpRequest, body_type: type[Body], max_bytes: int | None = None, optional: bool = False
    ) -> tuple[Body, list[str]]:
        """Read, parse and validate the request body. Returns it with warnings about fields without effect.

        With `optional` a call without a body is one with an empty object."""
        limits = self.settings
        fields = await read_json(
            http, max_bytes or limits.max_body_bytes, limits.body_seconds, limits.max_depth, optional
        )
        fields, warnings = spread_extra_body(fields)
        if int(http.headers.get("content-length", 0) or 0) > LARGE_BODY:
            body = await asyncio.to_thread(validate, body_type, fields)
        else:
            body = validate(body_type, fields)
        http.state.prompt_field = body.prompt_field  # for errors about the length of the text
        self.check_model(getattr(body, "model", None))
        return body, warnings + refuse_unknown_fields(body, http.headers.get("x-strict") == "1")

    async def offload(self, work: Callable[[], Result], heavy: bool) -> Result:
        """Run `work` in a worker thread if it is heavy, else here: a thread hop costs more than light work."""
        return await asyncio.to_thread(work) if heavy else work()

    async def build(self, http: HttpRequest, body: RequestBody, work: Callable[[], Result]) -> Result:
        """Run `work`, which tokenizes `body`, in a worker thread if the text is long or a grammar is compiled."""
        grammar = getattr(body, "tools", None) or getattr(body, "response_format", None)
        return await self.offload(work, heavy=_is_long(http) or bool(grammar))

    def interp_arguments(self, body: InterpFields) -> dict[str, Any]:
        """The extension fields of `body` as keyword arguments of a `GenerationCall`."""
        steer = request_edits(body.steering_fields, self.engine)
        if body.baseline and not steer:
            raise bad_request(
                "baseline is the unsteered twin of a steered answer, and nothing steers this one.", "baseline"
            )
        return {
            "steer": steer,
            "capture": body.capture,
            "capture_wait": body.capture_wait,
            "baseline": body.baseline,
            "signals": body.signals,
        }

    async def run(
        self,
        http: HttpRequest,
        generations: list[GenerationCall],
        formatter: ResponseFormatter,
        stream: bool,
        request_id: str | None = None,
        media_type: str = EventStream.media_type,
    ) -> Response:
        """Run one generation per prompt and return the response, streamed or complete."""
        prompt_tokens = sum(len(generation.prompt) for generation in generations)
        groups = await self.offload(
            lambda: [generation.requests(self.engine) for generation in generations],
            heavy=prompt_tokens > OFFLOAD_PROMPT_TOKENS or _is_long(http),
        )
        requests = [request for group in groups for request in group]
        first_choices = [group[0] for group in groups]
        http.state.requests, http.state.first_choices = requests, first_choices  # for the access log
        call = self.async_engine.new_call(
            requests,
            first_choices,
            http.state.caller,
            request_id or http.state.request_id,
            client_chose_id=request_id is not None,
        )
        await call.submit()
        if stream:

            def close() -> None:
                if call.note:
                    http.state.note = call.note  # the status of the line is 200, as the stream had begun
                call.close()

            events = formatter.stream(call, self.settings.ping_seconds)
            return EventStream(events, on_close=close, media_type=media_type)
        finished = asyncio.ensure_future(call.wait())
        try:
            if await wait_or_disconnect(finished, http.receive):
                call.cancel("left")
                raise ApiError(499, "the client left.", code="left")
            finished.result()
            if call.error is not None:
                raise call.error
            if call.cancelled:
                raise ApiError(499, "this answer was cancelled.", code="cancelled")
        finally:
            finished.cancel()
            call.close()
        heavy = any(each.capture is not None or each.prompt_logprobs for each in generations)
        return json_response(await self.offload(lambda: formatter.full_response(call), heavy))

    def stream_error(self, error: Exception, call_id: str) -> ApiError:
        """Convert an error raised after the response has started, and log it if it is the server's fault."""
        api_error = to_api_error(error)
        if api_error.status >= 500:
            self.access_log.log_exception(call_id, error)
        return api_error


class Routes:
    """Handlers of some routes."""

    def __init__(self, context: ServingContext):
        self._context = context


def _is_long(http: HttpRequest) -> bool:
    """Whether the body is so long, or of unknown length, that work on it belongs into a worker thread."""
    length = http.headers.get("content-length", "")
    return not length.isdecimal() or int(length) > OFFLOAD_BODY_BYTES
