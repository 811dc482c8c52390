"""Anthropic's API: `POST /v1/messages`, complete and streamed, and `POST /v1/messages/count_tokens`.

Anthropic's blocks are translated into chat messages (tool results become messages of their own) and the parsed output
back into blocks. Every event has an `event:` line, which Anthropic's clients rely on. Fields about caches, tiers and
containers are accepted and ignored; images are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import pydantic_core
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.engine.request import Request
from birkhoff.server.api_errors import ApiError, bad_request
from birkhoff.server.async_engine import ActiveCall
from birkhoff.server.body import RequestBody
from birkhoff.server.chat_prompt import REASONING_EFFORTS, ChatPrompt, encode_chat
from birkhoff.server.chat_routes import Thinking
from birkhoff.server.content_blocks import BlockFormatter, ContentBlock, ContentBlockDelta
from birkhoff.server.context import Routes, ServingContext
from birkhoff.server.fields import (
    InterpFields,
    ModelName,
    PositiveInt,
    Seed,
    StopString,
    ToolList,
    TopP,
    refuse_baseline,
    sampling_fields,
    schema_format,
)
from birkhoff.server.generation import GenerationCall, new_id, stop_reason
from birkhoff.server.reply import json_response
from birkhoff.server.sse import format_event
from birkhoff.server.tools import Tools

SIGNATURE = "unsigned"  # clients return it with the thinking block; it is not checked
Content = str | Annotated[list[dict[str, Any]], Field(max_length=4096)]


class InputMessage(RequestBody):
    role: Literal["user", "assistant", "system"]
    content: Content


class OutputConfig(RequestBody):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class PromptFields(RequestBody):
    """The fields of Anthropic's Messages API that make the prompt."""

    without_effect = frozenset({"metadata", "service_tier", "inference_geo", "betas", "cache_control"})
    refused: ClassVar[Mapping[str, str]] = {
        "mcp_servers": "this server opens no connections",
        "container": "there is nothing to run code in",
        "context_management": "the whole conversation is used",
    }

    model: ModelName | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=4096)]
    system: Content | None = None
    tools: ToolList | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class CountTokensBody(PromptFields):
    pass


class MessagesBody(PromptFields, InterpFields):
    max_tokens: PositiveInt
    stop_sequences: Annotated[list[StopString], Field(max_length=8)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stream: bool | None = None
    seed: Seed | None = None


class MessageRoutes(Routes):
    async def create(self, http: HttpRequest) -> Response:
        """Anthropic's Messages API."""
        body, warnings = await self._context.read_body(http, MessagesBody)
        model = self._context.check_model(body.model)
        generation = await self._context.build(http, body, lambda: self._generation(body, warnings))
        formatter = MessageFormatter(self._context, generation, model, http.state.request_id)
        return await self._context.run(http, [generation], formatter, bool(body.stream))

    async def count_tokens(self, http: HttpRequest) -> Response:
        """Number of prompt tokens of a message."""
        body, _ = await self._context.read_body(http, CountTokensBody)
        self._context.check_model(body.model)
        return json_response({"input_tokens": len(self._encode(body).ids)})

    def _generation(self, body: MessagesBody, warnings: list[str]) -> GenerationCall:
        prompt = self._encode(body)
        sampling = sampling_fields(body)
        if body.stop_sequences:
            sampling["stop"] = body.stop_sequences
        arguments = self._context.interp_arguments(body)
        refuse_baseline(body)
        return prompt.generation(sampling, warnings=warnings, **arguments)

    def _encode(self, body: PromptFields) -> ChatPrompt:
        messages = _chat_messages(body)
        # As in Anthropic's API, a last message of the assistant is the beginning of the answer.
        continued = body.messages[-1].role == "assistant" and not messages[-1].get("tool_calls")
        thinking, effort = self._context.thinks_by_default and not continued, None
        if body.thinking is not None:
            thinking = body.thinking.type != "disabled"
        config = body.output_config
        if config is not None and config.effort is not None and (thinking or body.thinking is None):
            thinking, effort = REASONING_EFFORTS[config.effort]
        tool_choice, single_call = _tool_choice(body.tool_choice)
        response_format = None
        if config is not None and config.format is not None:
            schema = config.format.get("schema")
            if config.format.get("type") != "json_schema" or not isinstance(schema, dict):
                raise bad_request(
                    "output_config.format: expected a json_schema with its schema.", "output_config.format"
                )
            response_format = schema_format(schema)
        return encode_chat(
            self._context,
            messages,
            thinking=thinking,
            effort=effort,
            tools=_function_tools(body.tools),
            tool_choice=tool_choice,
            single_call=single_call,
            response_format=response_format,
            continue_final=continued,
        )


def _chat_messages(body: PromptFields) -> list[dict[str, Any]]:
    """Anthropic's messages as chat messages of the model's encoding."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _plain_text(body.system, "system")})
    for index, message in enumerate(body.messages):
        where = f"messages[{index}].content"
        if message.role == "system":
            messages.append({"role": "system", "content": _plain_text(message.content, where)})
        elif message.role == "assistant":
            messages.append(_assistant_message(message.content, where))
        else:
            messages += _user_messages(message.content, where)
    return messages


def _user_messages(content: Content, where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    messages: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        if block.get("type") == "tool_result":
            text = _plain_text(block.get("content") or "", f"{where}[{index}].content")
            text = f"Error: {text}" if block.get("is_error") is True else text
            messages.append(
                {"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": text}
            )
        else:
            messages.append({"role": "user", "content": _block_text(block, f"{where}[{index}]")})
    return messages


def _assistant_message(content: Content, where: str) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, reasoning, tool_calls = [], [], []
    for index, block in enumerate(content):
        kind = block.get("type")
        if kind == "thinking":
            reasoning.append(str(block.get("thinking", "")))
        elif kind == "redacted_thinking":
            continue
        elif kind == "tool_use":
            if not isinstance(block.get("name"), str) or not isinstance(block.get("input", {}), dict):
                raise bad_request(
                    f"{where}[{index}]: a tool_use needs a name and an input.", f"{where}[{index}]"
                )
            function = {
                "name": block["name"],
                "arguments": json.dumps(block.get("input", {}), ensure_ascii=False),
            }
            tool_calls.append({"id": str(block.get("id", "")), "type": "function", "function": function})
        else:
            texts.append(_block_text(block, f"{where}[{index}]"))
    message: dict[str, Any] = {"role": "assistant", "content": "\n\n".join(texts)}
    if reasoning:
        message["reasoning_content"] = "\n\n".join(reasoning)
    if tool_calls:
        message["tool_calls"] = tool_calls
    return message


def _plain_text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise bad_request(f"{where}: expected text or a list of blocks.", where)
    return "\n\n".join(_block_text(block, f"{where}[{index}]") for index, block in enumerate(content))


def _block_text(block: dict[str, Any], where: str) -> str:
    text = block.get("text")
    if block.get("type") != "text" or not isinstance(text, str):
        raise bad_request(
            f"{where}: expected a text block; this model reads no images or files.", where, "content-kind"
        )
    return text


def _function_tools(tools: Tools | None) -> Tools | None:
    """Anthropic's tools in OpenAI's form."""
    functions = []
    for index, tool in enumerate(tools or ()):
        if tool.get("type", "custom") != "custom":
            raise bad_request(
                f"tools[{index}]: only tools of the caller are served, not {tool.get('type')!a}.",
                f"tools[{index}]",
            )
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {}}
        if tool.get("description"):
            function["description"] = tool["description"]
        functions.append({"type": "function", "function": function})
    return functions or None


def _tool_choice(choice: dict[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool]:
    """Anthropic's `tool_choice` in OpenAI's form, and whether only one call is allowed."""
    if choice is None:
        return None, False
    single_call = choice.get("disable_parallel_tool_use") is True
    kind = choice.get("type")
    if kind == "tool":
        return {"name": choice.get("name")}, single_call
    known = {"auto": "auto", "any": "required", "none": "none"}
    if not isinstance(kind, str) or kind not in known:
        raise bad_request("tool_choice.type: expected auto, any, tool or none.", "tool_choice.type")
    return known[kind], single_call


class MessageFormatter(BlockFormatter):
    """Renders Anthropic `message` objects and their stream events."""

    tool_prefix = "toolu_"
    ping = format_event({"type": "ping"}, "ping")

    def __init__(self, context: ServingContext, generation: GenerationCall, model: str, request_id: str):
        super().__init__(context, generation)
        self._request_id = request_id
        self._head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": model}

    def response(self, request: Request, extras: dict[str, Any]) -> dict[str, Any]:
        content = [_block_json(block) for block in self._blocks.blocks]
        return {
            **self._head,
            "content": content,
            **self._stop(request),
            "usage": self._usage(request),
            **extras,
        }

    def _stop(self, request: Request) -> dict[str, Any]:
        matched = stop_reason(request)
        reason = "end_turn"
        if request.finish_reason == "length":
            full = request.num_tokens >= self._context.engine.max_context
            reason = "model_context_window_exceeded" if full else "max_tokens"
        elif self._blocks.has_tool_call:
            reason = "tool_use"
        elif isinstance(matched, str):
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": matched if reason == "stop_sequence" else None}

    def _usage(self, request: Request) -> dict[str, Any]:
        """Anthropic's counts: `input_tokens` are those not in the cache; the prompt has the sum of the inputs."""
        cached = request.cached_tokens or 0
        return {
            "input_tokens": len(request.prompt_ids) - cached,
            "output_tokens": len(request.output_ids),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
        }

    def start_events(self, call: ActiveCall) -> list[bytes]:
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(call.requests[0]),
        }
        return [_event("message_start", message=message), self.ping]

    def block_events(self, delta: ContentBlockDelta, request: Request) -> list[bytes]:
        block = delta.block
        if delta.change == "start":
            return [
                _event("content_block_start", index=block.index, content_block=_block_json(block, empty=True))
            ]
        if delta.change == "delta":
            return [_event("content_block_delta", index=block.index, delta=_delta_json(block, delta.text))]
        events = [_event("content_block_stop", index=block.index)]
        if block.kind == "reasoning":
            signature = {"type": "signature_delta", "signature": SIGNATURE}
            return [_event("content_block_delta", index=block.index, delta=signature), *events]
        return events

    def final_events(self, request: Request, extras: dict[str, Any]) -> list[bytes]:
        return [
            _event("message_delta", delta=self._stop(request), usage=self._usage(request), **extras),
            _event("message_stop"),
        ]

    def error_event(self, error: ApiError) -> bytes:
        return format_event(error.as_anthropic(self._request_id), "error")


def _event(kind: str, **fields: Any) -> bytes:
    return format_event({"type": kind, **fields}, kind)


def _block_json(block: ContentBlock, empty: bool = False) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": "" if empty else block.text}
    if block.kind == "reasoning":
        return {
            "type": "thinking",
            "thinking": "" if empty else block.text,
            "signature": "" if empty else SIGNATURE,
        }
    return {
        "type": "tool_use",
        "id": block.id,
        "name": block.name,
        # Of a call that was cut off: the arguments that are whole, as Anthropic's clients read them from a stream.
        "input": {} if empty else pydantic_core.from_json(block.text or "{}", allow_partial=True),
    }


def _delta_json(block: ContentBlock, text: str) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text_delta", "text": text}
    if block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "input_json_delta", "partial_json": text}
