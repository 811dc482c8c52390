"""Anthropic's wire: `POST /v1/messages`, whole and streamed, and `count_tokens`.

Their blocks become our messages on the way in (tool results are messages of their own here) and our parsed answer
becomes their blocks on the way out. Every event is named on its `event:` line, since their clients go by that. Fields
about caches, tiers and containers are taken and ignored; pictures are refused.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.engine.request import Request
from birkhoff.server.api_errors import bad, problem_of
from birkhoff.server.async_engine import ActiveCall
from birkhoff.server.body import RequestBody
from birkhoff.server.calls import GenerationCall, cached, check_end, new_id, problems, stop_reason
from birkhoff.server.chat_routes import EFFORTS, Thinking
from birkhoff.server.content_blocks import ContentBlock, ContentBlockDelta, ContentBlocks
from birkhoff.server.context import ServingContext
from birkhoff.server.fields import InterpFields, Stop, schema_format
from birkhoff.server.interp_response import findings
from birkhoff.server.reply import json_response
from birkhoff.server.sse import frame
from birkhoff.server.tools import Tools, forced

SIGNATURE = "unsigned"  # their clients hand it back with the thought; nothing is made of it
Content = str | Annotated[list[dict[str, Any]], Field(max_length=4096)]


class InputMessage(RequestBody):
    role: Literal["user", "assistant", "system"]
    content: Content


class OutputConfig(RequestBody):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class CountBody(InterpFields):
    model: Annotated[str, Field(max_length=512)] | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=4096)]
    system: Content | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountBody):
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stop_sequences: Annotated[list[Stop], Field(max_length=8)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stream: bool | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None


class MessageRoutes:
    def __init__(self, context: ServingContext):
        self._context = context

    async def answer(self, http: HttpRequest) -> Response:
        body, warnings = await self._context.read(http, MessagesBody)
        model = self._context.model_name(body.model)
        call = await self._context.call(http, body, lambda: self.call(body, warnings))
        return await self._context.run(
            http, call, MessageFormatter(self._context, call, model, http.state.request_id), bool(body.stream)
        )

    async def count(self, http: HttpRequest) -> Response:
        body, _ = await self._context.read(http, CountBody)
        self._context.model_name(body.model)
        return json_response({"input_tokens": len(self._prompt(body)[0])})

    def call(self, body: MessagesBody, warnings: list[str]) -> GenerationCall:
        prompt, mask, thinking = self._prompt(body)
        sampling: dict[str, Any] = {"max_tokens": body.max_tokens, "stop": body.stop_sequences or None}
        sampling |= {name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "seed")}
        sampling = {name: value for name, value in sampling.items() if value is not None}
        looking = self._context.looking(body)
        if looking["baseline"]:
            raise bad("baseline has no place in this dialect. Use /v1/chat/completions.", "baseline")
        return GenerationCall(prompt, sampling, thinking, mask=mask, warnings=warnings, **looking)

    def _prompt(self, body: CountBody) -> tuple[list[int], Any, bool]:
        thinking, effort = self._context.thinks, None
        if body.thinking is not None:
            thinking = body.thinking.type != "disabled"
        config = body.output_config
        if config is not None and config.effort is not None and (thinking or body.thinking is None):
            thinking, effort = EFFORTS[config.effort]
        choice, one = _choice(body.tool_choice)
        tools, mask = forced(self._context.grammars, _tools(body.tools), choice, thinking, one)
        shown = None
        if config is not None and config.format is not None:
            shown = config.format.get("schema")
            if config.format.get("type") != "json_schema" or not isinstance(shown, dict):
                raise bad(
                    "output_config.format: expected a json_schema with its schema.", "output_config.format"
                )
            mask = mask or self._context.grammars.of_format(schema_format(shown), thinking)
        messages = conversation(body)
        prompt = self._context.engine.encode_chat(
            messages, thinking=thinking, effort=effort, tools=tools, response_format=shown
        )
        return prompt, mask, thinking


def conversation(body: CountBody) -> list[dict[str, Any]]:
    """Their messages as ours."""
    out: list[dict[str, Any]] = []
    if body.system:
        out.append({"role": "system", "content": _plain(body.system, "system")})
    for place, message in enumerate(body.messages):
        where = f"messages[{place}].content"
        if message.role == "system":
            out.append({"role": "system", "content": _plain(message.content, where)})
        elif message.role == "assistant":
            out.append(_assistant(message.content, where))
        else:
            out += _user(message.content, where)
    return out


def _user(content: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    out: list[dict[str, Any]] = []
    for place, block in enumerate(content):
        if block.get("type") == "tool_result":
            said = _plain(block.get("content") or "", f"{where}[{place}].content")
            said = f"Error: {said}" if block.get("is_error") is True else said
            out.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": said})
        else:
            out.append({"role": "user", "content": _text(block, f"{where}[{place}]")})
    return out


def _assistant(content: Any, where: str) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    text = []
    thoughts = []
    calls = []
    for place, block in enumerate(content):
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "redacted_thinking":
            continue
        elif kind == "tool_use":
            if not isinstance(block.get("name"), str) or not isinstance(block.get("input", {}), dict):
                raise bad(f"{where}[{place}]: a tool_use needs a name and an input.", f"{where}[{place}]")
            function = {
                "name": block["name"],
                "arguments": json.dumps(block.get("input", {}), ensure_ascii=False),
            }
            calls.append({"id": str(block.get("id", "")), "type": "function", "function": function})
        else:
            text.append(_text(block, f"{where}[{place}]"))
    message: dict[str, Any] = {"role": "assistant", "content": "\n\n".join(text)}
    if thoughts:
        message["reasoning_content"] = "\n\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _plain(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise bad(f"{where}: expected text or a list of blocks.", where)
    return "\n\n".join(_text(block, f"{where}[{place}]") for place, block in enumerate(content))


def _text(block: dict[str, Any], where: str) -> str:
    if block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise bad(
            f"{where}: expected a text block; this model reads no images or files.", where, "content-kind"
        )
    return block["text"]


def _tools(tools: list[dict[str, Any]] | None) -> Tools | None:
    out = []
    for place, tool in enumerate(tools or ()):
        if tool.get("type", "custom") != "custom":
            raise bad(
                f"tools[{place}]: only tools of the caller are served, not {tool.get('type')!a}.",
                f"tools[{place}]",
            )
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {}}
        if tool.get("description"):
            function["description"] = tool["description"]
        out.append({"type": "function", "function": function})
    return out or None


def _choice(choice: dict[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool]:
    if choice is None:
        return None, False
    one = choice.get("disable_parallel_tool_use") is True
    kind = choice.get("type")
    if kind == "tool":
        return {"name": choice.get("name")}, one
    known = {"auto": "auto", "any": "required", "none": "none"}
    if not isinstance(kind, str) or kind not in known:
        raise bad("tool_choice.type: expected auto, any, tool or none.", "tool_choice.type")
    return known[kind], one


class MessageFormatter:
    def __init__(self, context: ServingContext, call: GenerationCall, model: str, request_id: str):
        self._context = context
        self._call = call
        self._request_id = request_id
        self._head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": model}
        self._blocks = ContentBlocks("toolu_")

    def whole(self, running: ActiveCall) -> dict[str, Any]:
        request = running.requests[0]
        check_end(request)
        self._blocks.feed(request.sink.events)  # type: ignore[union-attr]
        self._blocks.finish()
        content = [_block(block) for block in self._blocks.all if block.complete]
        return {
            **self._head,
            "content": content,
            **self._end(request),
            "usage": self._usage(request),
            **self._tail(request),
        }

    def _end(self, request: Request) -> dict[str, Any]:
        matched = stop_reason(request)
        reason = "end_turn"
        if request.finish_reason == "length":
            full = request.num_tokens >= self._context.engine.max_context
            reason = "model_context_window_exceeded" if full else "max_tokens"
        elif self._blocks.called:
            reason = "tool_use"
        elif isinstance(matched, str):
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": matched if reason == "stop_sequence" else None}

    def _usage(self, request: Request) -> dict[str, Any]:
        return {
            "input_tokens": len(request.prompt_ids),
            "output_tokens": len(request.output_ids),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached(request),
        }

    def _tail(self, request: Request) -> dict[str, Any]:
        found = findings([request], self._call, self._context.shelf)
        said = [*self._call.warnings, *problems(request)]
        return {**found, **({"warnings": said} if said else {})}

    async def frames(self, running: ActiveCall, ping_seconds: float) -> AsyncIterator[bytes]:
        request = running.requests[0]
        start: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(request),
        }
        yield _event("message_start", message=start)
        yield _event("ping")
        try:
            async for item in running.news(ping_seconds):
                if item is None:
                    yield _event("ping")
                    continue
                told = item[1]
                for step in self._blocks.feed(told.parsed):
                    for data in self._step(step):
                        yield data
            if running.cancelled:
                return
            check_end(request)
            for step in self._blocks.finish():
                for data in self._step(step):
                    yield data
            tail = await asyncio.to_thread(self._tail, request)
            yield _event("message_delta", delta=self._end(request), usage=self._usage(request), **tail)
            yield _event("message_stop")
        except Exception as error:
            self._context.told(error, running.id)
            yield frame(problem_of(error).as_anthropic(self._request_id), "error")

    def _step(self, step: ContentBlockDelta) -> list[bytes]:
        block = step.block
        if step.what == "open":
            return [_event("content_block_start", index=block.index, content_block=_block(block, empty=True))]
        if step.what == "piece":
            return [_event("content_block_delta", index=block.index, delta=_delta(block, step.text))]
        closing = [_event("content_block_stop", index=block.index)]
        if block.kind == "reasoning":
            signed = {"type": "signature_delta", "signature": SIGNATURE}
            return [_event("content_block_delta", index=block.index, delta=signed), *closing]
        return closing


def _event(kind: str, **fields: Any) -> bytes:
    return frame({"type": kind, **fields}, kind)


def _block(block: ContentBlock, empty: bool = False) -> dict[str, Any]:
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
        "input": {} if empty else json.loads(block.text or "{}"),
    }


def _delta(block: ContentBlock, text: str) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text_delta", "text": text}
    if block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "input_json_delta", "partial_json": text}
