"""Text and tokens: `/tokenize`, `/detokenize`, `/apply-template`, and how long a prompt would be.

Field names are vLLM's. Text typed into any of these stays text: what merely spells a marker is never one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.server.api_errors import bad
from birkhoff.server.body import RequestBody
from birkhoff.server.chat_routes import EFFORTS, conversation
from birkhoff.server.context import ServingContext
from birkhoff.server.fields import TokenId
from birkhoff.server.reply import json_response
from birkhoff.server.tools import checked_tools

Messages = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=4096)]


class TokenizeBody(RequestBody):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(RequestBody):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1 << 20)]
    return_token_strs: bool = False


class TemplateBody(RequestBody):
    model: str | None = None
    messages: Messages
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class TokenRoutes:
    def __init__(self, context: ServingContext):
        self._context = context

    async def tokenize(self, http: HttpRequest) -> Response:
        body, _ = await self._context.read(http, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise bad("give either a prompt or messages.", "prompt")
        engine = self._context.engine
        ids = await self._context.call(http, body, lambda: self._ids(body))
        found: dict[str, Any] = {"count": len(ids), "max_model_len": engine.max_context, "tokens": ids}
        if body.return_token_strs:
            found["token_strs"] = self._texts(ids)
        return json_response(found)

    async def detokenize(self, http: HttpRequest) -> Response:
        body, _ = await self._context.read(http, DetokenizeBody)
        last = self._context.engine.config.vocab_size - 1
        for place, token in enumerate(body.tokens):
            if token > last:
                raise bad(f"tokens[{place}] is {token}, this model has ids 0..{last}.", f"tokens[{place}]")
        found: dict[str, Any] = {"prompt": self._context.engine.tokenizer.decode(body.tokens)}
        if body.return_token_strs:
            found["token_strs"] = self._texts(body.tokens)
        return json_response(found)

    async def template(self, http: HttpRequest) -> Response:
        body, _ = await self._context.read(http, TemplateBody)
        ids = await self._context.call(http, body, lambda: self._ids(body))
        return json_response(
            {"prompt": self._context.engine.tokenizer.decode(ids), "tokens": ids, "count": len(ids)}
        )

    async def input_tokens(self, http: HttpRequest) -> Response:
        body, _ = await self._context.read(http, TemplateBody)
        self._context.model_name(body.model)
        ids = await self._context.call(http, body, lambda: self._ids(body))
        return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})

    def _ids(self, body: TokenizeBody | TemplateBody) -> list[int]:
        engine = self._context.engine
        if isinstance(body, TokenizeBody) and body.prompt is not None:
            bos = engine.config.bos_token_id if body.add_special_tokens else None
            return [*([] if bos is None else [bos]), *engine.tokenizer.encode(body.prompt)]
        thinking, effort = (
            (self._context.thinks, None) if body.reasoning_effort is None else EFFORTS[body.reasoning_effort]
        )
        messages = conversation(body.messages or [])
        tools = checked_tools(body.tools)
        return engine.encode_chat(messages, thinking=thinking, effort=effort, tools=tools)

    def _texts(self, ids: list[int]) -> list[str]:
        """One string per token; a piece of a character shows as what it is."""
        tokenizer = self._context.engine.tokenizer
        return [tokenizer.marker(i) or tokenizer.piece(i).decode("utf-8", "replace") for i in ids]
