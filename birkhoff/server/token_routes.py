"""Tokenizer routes: `/tokenize`, `/detokenize`, `/apply-template`, and token counts of prompts.

Field names follow vLLM. Chat markers spelled out in text are encoded as text, never as marker tokens.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.server.api_errors import bad_request
from birkhoff.server.body import RequestBody
from birkhoff.server.chat_prompt import REASONING_EFFORTS, ReasoningEffort, normalize_messages
from birkhoff.server.context import Routes
from birkhoff.server.fields import MessageList, TokenId, ToolList
from birkhoff.server.reply import json_response
from birkhoff.server.tools import validate_tools


class TokenizeBody(RequestBody):
    model: str | None = None
    prompt: str | None = None
    messages: MessageList | None = None
    tools: ToolList | None = None
    reasoning_effort: ReasoningEffort | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    # the form of llama.cpp's server, which adds no special tokens by default
    content: str | None = None
    add_special: bool = False
    with_pieces: bool = False


class DetokenizeBody(RequestBody):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1 << 20)]
    return_token_strs: bool = False


class TemplateBody(RequestBody):
    model: str | None = None
    messages: MessageList
    tools: ToolList | None = None
    reasoning_effort: ReasoningEffort | None = None


class TokenRoutes(Routes):
    async def tokenize(self, http: HttpRequest) -> Response:
        """Token ids of a text or a conversation."""
        body, _ = await self._context.read_body(http, TokenizeBody)
        if body.content is not None and body.prompt is None and body.messages is None:
            return json_response(
                {"tokens": await self._context.build(http, body, lambda: self._pieces(body))}
            )
        if (body.prompt is None) == (body.messages is None) or body.content is not None:
            raise bad_request("give either a prompt or messages.", "prompt")
        engine = self._context.engine
        ids = await self._context.build(http, body, lambda: self._encode(body))
        fields: dict[str, Any] = {"count": len(ids), "max_model_len": engine.max_context, "tokens": ids}
        if body.return_token_strs:
            fields["token_strs"] = self._token_strs(ids)
        return json_response(fields)

    async def detokenize(self, http: HttpRequest) -> Response:
        """Text of token ids."""
        body, _ = await self._context.read_body(http, DetokenizeBody)
        last = self._context.engine.config.vocab_size - 1
        for index, token in enumerate(body.tokens):
            if token > last:
                where = f"tokens[{index}]"
                raise bad_request(f"{where} is {token}, this model has ids 0..{last}.", where)

        def decode() -> dict[str, Any]:
            fields: dict[str, Any] = {"prompt": self._context.engine.tokenizer.decode(body.tokens)}
            fields["content"] = fields["prompt"]  # llama.cpp's name
            if body.return_token_strs:
                fields["token_strs"] = self._token_strs(body.tokens)
            return fields

        return json_response(await self._context.build(http, body, decode))

    async def template(self, http: HttpRequest) -> Response:
        """The prompt text and token ids of a conversation."""
        body, _ = await self._context.read_body(http, TemplateBody)
        ids = await self._context.build(http, body, lambda: self._encode(body))
        return json_response(
            {"prompt": self._context.engine.tokenizer.decode(ids), "tokens": ids, "count": len(ids)}
        )

    async def input_tokens(self, http: HttpRequest) -> Response:
        """Number of prompt tokens of a chat completion."""
        body, _ = await self._context.read_body(http, TemplateBody)
        self._context.check_model(body.model)
        ids = await self._context.build(http, body, lambda: self._encode(body))
        return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})

    def _encode(self, body: TokenizeBody | TemplateBody) -> list[int]:
        engine = self._context.engine
        if isinstance(body, TokenizeBody) and body.prompt is not None:
            bos = engine.config.bos_token_id if body.add_special_tokens else None
            return [*([] if bos is None else [bos]), *engine.tokenizer.encode(body.prompt)]
        thinking, effort = self._context.thinks_by_default, None
        if body.reasoning_effort is not None:
            thinking, effort = REASONING_EFFORTS[body.reasoning_effort]
        messages = normalize_messages(body.messages or [])
        tools = validate_tools(body.tools)
        return engine.encode_chat(messages, thinking=thinking, effort=effort, tools=tools)

    def _pieces(self, body: TokenizeBody) -> list[int] | list[dict[str, Any]]:
        """llama.cpp's answer: ids, or ids with their text, or their bytes where these are no text."""
        engine = self._context.engine
        bos = engine.config.bos_token_id if body.add_special else None
        ids = [*([] if bos is None else [bos]), *engine.tokenizer.encode(body.content or "")]
        if not body.with_pieces:
            return ids
        pieces = []
        for token in ids:
            raw = engine.tokenizer.piece(token)
            try:
                pieces.append({"id": token, "piece": raw.decode("utf-8")})
            except UnicodeDecodeError:
                pieces.append({"id": token, "piece": list(raw)})
        return pieces

    def _token_strs(self, ids: list[int]) -> list[str]:
        """One string per token; bytes of incomplete characters become replacement characters."""
        return [self._context.token_text(token) for token in ids]
