"""Routes that analyse a text without generating: hook schema, capture estimates, lens, logit attribution, attention.

`/v1/lens` decodes every stream, their mean and the head's mix at every depth: the top tokens at one position, or the
surprisal of the text at each depth. These forward passes run in a worker thread, one at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.analysis.attention import attention_json, attention_masses
from birkhoff.analysis.metric import resolve_metric, token_id
from birkhoff.errors import LogitsError, OptionError
from birkhoff.server.api_errors import ApiError, bad_request, to_api_error
from birkhoff.server.body import RequestBody, StrictBody
from birkhoff.server.chat_prompt import normalize_messages
from birkhoff.server.context import Routes, ServingContext
from birkhoff.server.fields import MessageList, PositiveInt, SteeringFields, TokenId
from birkhoff.server.reply import json_response
from birkhoff.server.sse import wait_or_disconnect
from birkhoff.server.steering_routes import request_edits

MAX_METRIC_TOKENS = 256  # of a text that is run many times for a metric
Position = Annotated[int, Field(ge=-MAX_METRIC_TOKENS, lt=MAX_METRIC_TOKENS)]
TokenName = TokenId | Annotated[str, Field(min_length=1, max_length=64)]
Depth = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Result = TypeVar("Result")
Item = TypeVar("Item")
MAX_TEXTS = 64  # of one call
Several = Annotated[list[Item], Field(min_length=1, max_length=MAX_TEXTS)]


class PromptBody(RequestBody):
    """A text: token ids, plain text, or a conversation."""

    model: str | None = None
    token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    prompt: str | None = None
    messages: MessageList | None = None


class TextBody(PromptBody, SteeringFields):
    """A text to analyse, and how it is steered."""


class TokenMetric(StrictBody):
    """Logit of `token`, minus that of `other` if given, at `position`; with `logprob` the log-probability. Tokens are
    ids, or texts that are one token."""

    token: TokenName
    other: TokenName | None = None
    position: Position = -1
    logprob: bool = False


class LensBody(TextBody):
    position: Depth = -1
    k: Annotated[int, Field(ge=1, le=50)] = 5
    surprise: bool = False
    views: (
        Annotated[list[Literal["head", "mean"] | Annotated[int, Field(ge=0, lt=64)]], Field(min_length=1)]
        | None
    ) = None
    depths: Annotated[list[Depth], Field(min_length=1, max_length=1024)] | None = None


class AttentionBody(TextBody):
    position: Depth = -1
    masses: bool = False


class LogitAttributionBody(TextBody):
    """`token`: one token, or two whose logits are subtracted; by default the most likely one."""

    token: TokenName | Annotated[list[TokenName], Field(min_length=1, max_length=2)] | None = None
    position: Depth = -1


class EstimateBody(PromptBody):
    capture: dict[str, Any] | None = None
    max_tokens: PositiveInt = 1


class InterpRoutes(Routes):
    def __init__(self, context: ServingContext):
        super().__init__(context)
        self._lock = asyncio.Lock()
        self._worker = ThreadPoolExecutor(1, "analysis")

    async def schema(self) -> Response:
        """All hooks of the model with shape, dtype and layers."""
        engine = self._context.engine
        return json_response(
            {
                "num_layers": engine.config.num_hidden_layers,
                "streams": engine.num_streams,
                "hidden_size": engine.config.hidden_size,
                "hooks": {name: row.to_json() for name, row in engine.schema.items()},
            }
        )

    async def estimate(self, http: HttpRequest) -> Response:
        """Rows and bytes a capture would store, and from which prompt position it must be recomputed."""
        body, _ = await self._context.read_body(http, EstimateBody)
        if body.capture is None:
            raise bad_request("capture: say what would be captured, as in a request.", "capture")
        estimates = await self._context.build(http, body, lambda: self._estimates(body))
        lowest = [
            estimate["lowest_prompt_position"]
            for estimate in estimates.values()
            if estimate["lowest_prompt_position"] is not None
        ]
        return json_response(
            {
                "consumers": estimates,
                "bytes": sum(estimate["bytes"] for estimate in estimates.values()),
                "rows": sum(estimate["rows"] for estimate in estimates.values()),
                "recompute_from": min(lowest, default=None),
                "limit": self._context.settings.capture_max_request_bytes,
            }
        )

    def _estimates(self, body: EstimateBody) -> dict[str, Any]:
        assert body.capture is not None
        ids = self.token_ids(body, 2**31)
        estimates = self._context.engine.estimate(body.capture, ids, body.max_tokens)
        return {consumer: estimate.to_json() for consumer, estimate in estimates.items()}

    async def lens(self, http: HttpRequest) -> Response:
        """Top tokens of every stream, their mean and the head's mix at every depth, or the surprisal of the text."""
        body, _ = await self._context.read_body(http, LensBody)
        return json_response(await self.run_exclusive(http, lambda: self._lens(body)))

    async def attention(self, http: HttpRequest) -> Response:
        """Attention of one position by layer, or with `masses` how it is distributed for all positions."""
        body, _ = await self._context.read_body(http, AttentionBody)
        return json_response(await self.run_exclusive(http, lambda: self._attention(body)))

    async def logit_attribution(self, http: HttpRequest) -> Response:
        """The logit of a token, or the difference of two, as a sum over what was written to the residual streams."""
        body, _ = await self._context.read_body(http, LogitAttributionBody)
        return json_response(await self.run_exclusive(http, lambda: self._logit_attribution(body)))

    def _logit_attribution(self, body: LogitAttributionBody) -> dict[str, Any]:
        engine = self._context.engine
        ids = self.token_ids(body, self._context.settings.lens_max_tokens)
        _check_position(body.position, ids)
        given = body.token if isinstance(body.token, list) else [] if body.token is None else [body.token]
        try:
            tokens = [token_id(engine, token) for token in given]
        except OptionError as error:
            raise bad_request(f"token: {error}", "token") from error
        steer = request_edits(body.steering_fields, engine)
        return engine.logit_attribution(ids, tokens or None, body.position, steer).to_json()

    def _lens(self, body: LensBody) -> dict[str, Any]:
        engine = self._context.engine
        ids = self.token_ids(body, self._context.settings.lens_max_tokens)
        lens = engine.lens(ids, steer=request_edits(body.steering_fields, engine))
        views = list(lens.views) if body.views is None else body.views
        for view in views:
            if view not in lens.views:
                raise bad_request(f"views: {view!r} is none of {', '.join(map(str, lens.views))}.", "views")
        depths = (
            list(range(lens.depths))
            if body.depths is None
            else [_check_depth(depth, lens.depths) for depth in body.depths]
        )
        _check_position(body.position, ids)
        names = [f"layer {depth}" if depth < lens.depths - 1 else "final" for depth in depths]
        fields: dict[str, Any] = {"views": views, "depths": names, "position": body.position % len(ids)}
        if body.surprise:
            surprise = [[lens.surprise(depth, view).tolist() for depth in depths] for view in views]
            return {**fields, "surprise": surprise}

        def top_tokens(depth: int, view: Any) -> list[dict[str, Any]]:
            return [self._token_json(*pair) for pair in lens.top(depth, view, body.position, body.k)]

        return {**fields, "top": [[top_tokens(depth, view) for view in views] for depth in depths]}

    def _attention(self, body: AttentionBody) -> dict[str, Any]:
        engine = self._context.engine
        ids = self.token_ids(body, self._context.settings.lens_max_tokens)
        steer = request_edits(body.steering_fields, engine)
        if body.masses:
            return {"masses": attention_masses(engine, ids, steer).tolist()}
        return {
            "position": body.position % len(ids),
            "layers": attention_json(engine.attention(ids, body.position, steer)),
        }

    def token_ids(self, body: PromptBody, max_tokens: int) -> list[int]:
        """Encode the text of a body; raises 400 if it has more than `max_tokens` tokens."""
        engine = self._context.engine
        given = [name for name in ("token_ids", "prompt", "messages") if getattr(body, name) is not None]
        if len(given) != 1:
            raise bad_request(
                "give the text once: as token_ids, prompt or messages.", given[1] if given else "token_ids"
            )
        if body.messages is not None:
            ids = engine.encode_chat(
                normalize_messages(body.messages), thinking=self._context.thinks_by_default
            )
        else:
            ids = engine.prompt_ids(body.prompt if body.prompt is not None else body.token_ids or [])
        if len(ids) > max_tokens:
            raise bad_request(
                f"the text has {len(ids)} tokens, this route takes at most {max_tokens}.",
                given[0],
                "context_length_exceeded",
            )
        return ids

    def _token_json(self, token: int, probability: float) -> dict[str, Any]:
        return {"token_id": token, "text": self._context.token_text(token), "probability": probability}

    async def run_exclusive(self, http: HttpRequest, work: Callable[[], Result]) -> Result:
        """Run `work` in a worker thread of its own, one at a time: the C library keeps freed memory by thread, and
        passes with gradients free much of it. Raises 499 if the client disconnects meanwhile."""
        self._context.engine  # noqa: B018  raises 503 while loading
        if self._context.async_engine.draining:
            raise ApiError(503, "the server is stopping. Try again later.", code="draining")

        async def locked() -> Result:
            async with self._lock:
                return await asyncio.get_running_loop().run_in_executor(self._worker, work)

        task = asyncio.ensure_future(locked())
        if await wait_or_disconnect(task, http.receive):
            task.cancel()
            raise ApiError(499, "the client left.", code="left")
        return task.result()


def one_for_each(value: Item | list[Item], texts: int | None, name: str) -> list[Item]:
    """A field of a call with so many texts (None: one text, not in a list), as one value for each: the value given for
    all of them, or the items of a list of as many; raises 400 otherwise."""
    if not isinstance(value, list):
        return [value] * (texts or 1)
    if texts is None:
        raise bad_request(f"{name} is a list, and there is one text. Give one, or a list of texts.", name)
    if len(value) != texts:
        raise bad_request(
            f"{name} has {len(value)} entries for {texts} texts. Give one for all, or one for each.", name
        )
    return value


class AnalysisRoutes(Routes):
    """Handlers whose passes run one at a time with those of `interp`."""

    def __init__(self, context: ServingContext, interp: InterpRoutes):
        super().__init__(context)
        self._interp = interp

    def checked_metric(self, metric: TokenMetric, *texts: list[int]) -> dict[str, Any]:
        """The metric of a body as the engine takes it; raises 400 if the model lacks its tokens, or a text its
        position."""
        fields = metric.model_dump()
        try:
            for ids in texts:
                resolve_metric(self._context.engine, fields, len(ids))
        except OptionError as error:
            raise bad_request(str(error), "metric", error.code) from None
        return fields

    async def analysed(self, http: HttpRequest, work: Callable[[], Any]) -> Response:
        """The result of `work`; its texts run through the edits of every request, which may make logits invalid."""
        try:
            return json_response(await self._interp.run_exclusive(http, work))
        except LogitsError as error:
            raise to_api_error(error, steered=True) from error


def _check_position(position: int, ids: list[int]) -> None:
    if not -len(ids) <= position < len(ids):
        raise bad_request(f"position is {position}, the text has {len(ids)} tokens.", "position")


def _check_depth(depth: int, count: int) -> int:
    if not -count <= depth < count:
        raise bad_request(f"depths: {depth} is outside 0..{count - 1}.", "depths")
    return depth % count
