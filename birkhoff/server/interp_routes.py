"""Routes that look into the model without an answer: its hooks, what a capture would cost, the lens, attention.

`/v1/lens` says what every stream, their mean and the head's merge would predict at every depth: the likeliest tokens
at one position, or how surprised each depth is by the text. These passes run beside the engine, one at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.analysis.attention import attention_json, attention_masses
from birkhoff.server.api_errors import ApiError, bad
from birkhoff.server.chat_routes import conversation
from birkhoff.server.context import ServingContext
from birkhoff.server.fields import InterpFields, TokenId
from birkhoff.server.reply import json_response
from birkhoff.server.sse import first_of

Depth = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Found = TypeVar("Found")


class TextBody(InterpFields):
    """A text to look at: token ids, plain text, or a conversation."""

    model: str | None = None
    token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=4096)] | None = None


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


class EstimateBody(TextBody):
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] = 1


class InterpRoutes:
    def __init__(self, context: ServingContext):
        self._context = context
        self._one = asyncio.Lock()

    async def schema(self) -> Response:
        engine = self._context.engine
        return json_response(
            {
                "num_layers": engine.config.num_hidden_layers,
                "streams": engine.config.hc_mult,
                "hidden_size": engine.config.hidden_size,
                "hooks": {name: row.to_json() for name, row in engine.schema.items()},
            }
        )

    async def estimate(self, http: HttpRequest) -> Response:
        body, _ = await self._context.read(http, EstimateBody)
        if body.capture is None:
            raise bad("capture: say what would be captured, as in a request.", "capture")
        found = self._context.engine.estimate(body.capture, self.ids(body, 2**31), body.max_tokens)
        each = {consumer: estimate.to_json() for consumer, estimate in found.items()}
        lowest = [
            e["lowest_prompt_position"] for e in each.values() if e["lowest_prompt_position"] is not None
        ]
        return json_response(
            {
                "consumers": each,
                "bytes": sum(e["bytes"] for e in each.values()),
                "rows": sum(e["rows"] for e in each.values()),
                "recompute_from": min(lowest, default=None),
                "limit": self._context.settings.capture_max_request_bytes,
            }
        )

    async def lens(self, http: HttpRequest) -> Response:
        body, _ = await self._context.read(http, LensBody)
        return json_response(await self.beside(http, lambda: self._lens(body)))

    async def attention(self, http: HttpRequest) -> Response:
        body, _ = await self._context.read(http, AttentionBody)
        return json_response(await self.beside(http, lambda: self._attention(body)))

    def _lens(self, body: LensBody) -> dict[str, Any]:
        engine = self._context.engine
        ids = self.ids(body, self._context.settings.lens_max_tokens)
        lens = engine.lens(ids, steer=self._context.looking(body)["steer"])
        wanted = list(lens.views) if body.views is None else body.views
        for view in wanted:
            if view not in lens.views:
                raise bad(f"views: {view!r} is none of {', '.join(map(str, lens.views))}.", "views")
        depths = (
            list(range(lens.depths))
            if body.depths is None
            else [self._depth(depth, lens.depths) for depth in body.depths]
        )
        if not -len(ids) <= body.position < len(ids):
            raise bad(f"position is {body.position}, the text has {len(ids)} tokens.", "position")
        names = [f"layer {depth}" if depth < lens.depths - 1 else "final" for depth in depths]
        found: dict[str, Any] = {"views": wanted, "depths": names, "position": body.position % len(ids)}
        if body.surprise:
            told = [[lens.surprise(depth, view).tolist() for depth in depths] for view in wanted]
            return {**found, "surprise": told}
        tops = [[lens.top(depth, view, body.position, body.k) for view in wanted] for depth in depths]
        return {**found, "top": [[[self._token(*one) for one in top] for top in views] for views in tops]}

    def _depth(self, depth: int, count: int) -> int:
        if not -count <= depth < count:
            raise bad(f"depths: {depth} is outside 0..{count - 1}.", "depths")
        return depth % count

    def _attention(self, body: AttentionBody) -> dict[str, Any]:
        engine = self._context.engine
        ids = self.ids(body, self._context.settings.lens_max_tokens)
        steer = self._context.looking(body)["steer"]
        if body.masses:
            return {"masses": attention_masses(engine, ids, steer).tolist()}
        return {
            "position": body.position % len(ids),
            "layers": attention_json(engine.attention(ids, body.position, steer)),
        }

    def ids(self, body: TextBody, most: int) -> list[int]:
        engine = self._context.engine
        given = [name for name in ("token_ids", "prompt", "messages") if getattr(body, name) is not None]
        if len(given) != 1:
            raise bad(
                "give the text once: as token_ids, prompt or messages.", given[1] if given else "token_ids"
            )
        if body.messages is not None:
            ids = engine.encode_chat(conversation(body.messages), thinking=self._context.thinks)
        else:
            ids = engine.prompt_ids(body.prompt if body.prompt is not None else body.token_ids or [])
        if len(ids) > most:
            raise bad(
                f"the text has {len(ids)} tokens, this route takes at most {most}.",
                given[0],
                "context_length_exceeded",
            )
        return ids

    def _token(self, token: int, probability: float) -> dict[str, Any]:
        tokenizer = self._context.engine.tokenizer
        text = tokenizer.marker(token) or tokenizer.piece(token).decode("utf-8", "replace")
        return {"token_id": token, "text": text, "probability": probability}

    async def beside(self, http: HttpRequest, work: Callable[[], Found]) -> Found:
        """One pass at a time; a client that leaves while it waits is let go."""
        self._context.engine  # noqa: B018  refused while loading
        if self._context.hub.draining:
            raise ApiError(503, "the server is stopping. Try again later.", code="draining")

        async def one() -> Found:
            async with self._one:
                return await asyncio.to_thread(work)

        task = asyncio.ensure_future(one())
        if await first_of(task, http.receive):
            task.cancel()
            raise ApiError(499, "the client left.", code="left")
        return task.result()
