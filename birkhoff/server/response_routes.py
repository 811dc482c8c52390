"""`POST /v1/responses`: OpenAI's newer dialect, without memory.

Nothing is kept between calls: `previous_response_id` is refused with the advice to send the conversation again, and
`store` is taken and ignored. Items become messages on the way in, blocks become items on the way out. Streamed events
are numbered in order and end with the whole response.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.engine.request import Request
from birkhoff.server.api_errors import bad, problem_of
from birkhoff.server.async_engine import ActiveCall
from birkhoff.server.body import RequestBody
from birkhoff.server.calls import GenerationCall, check_end, new_id, now, problems, token_logprob, usage
from birkhoff.server.chat_routes import EFFORTS, conversation
from birkhoff.server.content_blocks import ContentBlock, ContentBlockDelta, ContentBlocks
from birkhoff.server.context import ServingContext
from birkhoff.server.fields import InterpFields, ResponseFormat, schema_format
from birkhoff.server.interp_response import findings
from birkhoff.server.sse import PING, frame
from birkhoff.server.tools import Tools, forced


class Reasoning(RequestBody):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class TextConfig(RequestBody):
    format: dict[str, Any] | None = None


class ResponsesBody(InterpFields):
    model: Annotated[str, Field(max_length=512)] | None = None
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=4096)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    stream: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None


class ResponseRoutes:
    def __init__(self, context: ServingContext):
        self._context = context

    async def answer(self, http: HttpRequest) -> Response:
        body, warnings = await self._context.read(http, ResponsesBody)
        model = self._context.model_name(body.model)
        call = await self._context.call(http, body, lambda: self.call(body, warnings))
        return await self._context.run(
            http, call, ResponseObjectFormatter(self._context, call, model, body), bool(body.stream)
        )

    def call(self, body: ResponsesBody, warnings: list[str]) -> GenerationCall:
        for name in ("previous_response_id", "conversation"):
            if getattr(body, name):
                raise bad(
                    f"{name}: nothing is kept between calls here. Send the whole conversation as input.", name
                )
        if body.background:
            raise bad("background: answers are given while the call is open. Leave it out.", "background")
        thinking, effort = self._context.thinks, None
        if body.reasoning is not None and body.reasoning.effort is not None:
            thinking, effort = EFFORTS[body.reasoning.effort]
        tools, mask = forced(
            self._context.grammars,
            _tools(body.tools),
            body.tool_choice,
            thinking,
            body.parallel_tool_calls is False,
        )
        wanted = _format(body)
        mask = mask or self._context.grammars.of_format(wanted, thinking)
        shown = wanted.json_schema.schema_ if wanted and wanted.json_schema else None
        prompt = self._context.engine.encode_chat(
            conversation(_messages(body)),
            thinking=thinking,
            effort=effort,
            tools=tools,
            response_format=shown,
        )
        sampling = {name: getattr(body, name) for name in ("temperature", "top_p", "seed")}
        sampling["max_tokens"] = body.max_output_tokens or self._context.room(len(prompt))
        if body.top_logprobs is not None or "message.output_text.logprobs" in (body.include or ()):
            sampling["logprobs"] = body.top_logprobs or 0
        sampling = {name: value for name, value in sampling.items() if value is not None}
        looking = self._context.looking(body)
        if looking["baseline"]:
            raise bad("baseline has no place in this dialect. Use /v1/chat/completions.", "baseline")
        return GenerationCall(prompt, sampling, thinking, mask=mask, warnings=warnings, **looking)


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = (
        [{"role": "system", "content": body.instructions}] if body.instructions else []
    )
    if isinstance(body.input, str):
        return [*out, {"role": "user", "content": body.input}]
    for place, item in enumerate(body.input):
        kind, where = item.get("type", "message"), f"input[{place}]"
        if kind == "message":
            out.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
            call = {"id": str(item.get("call_id", "")), "type": "function", "function": function}
            if out and out[-1]["role"] == "assistant" and "open" in out[-1]:
                out[-1]["tool_calls"].append(call)
            else:
                out.append({"role": "assistant", "content": "", "tool_calls": [call], "open": True})
        elif kind == "function_call_output":
            said = item.get("output")
            out.append({"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": said})
        elif kind != "reasoning":  # thoughts of earlier turns are not told again
            raise bad(f"{where}.type: {kind!a} is no item this server knows.", where)
    return [{key: value for key, value in message.items() if key != "open"} for message in out]


def _tools(tools: list[dict[str, Any]] | None) -> Tools | None:
    out = []
    for place, tool in enumerate(tools or ()):
        if tool.get("type") != "function":
            raise bad(
                f"tools[{place}]: only functions are served, not {tool.get('type')!a}.", f"tools[{place}]"
            )
        kept = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
        out.append({"type": "function", "function": kept})
    return out or None


def _format(body: ResponsesBody) -> ResponseFormat | None:
    given = body.text.format if body.text is not None else None
    if given is None or given.get("type") == "text":
        return None
    if given.get("type") == "json_object":
        return ResponseFormat(type="json_object")
    if given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        raise bad("text.format: expected text, json_object, or json_schema with its schema.", "text.format")
    return schema_format(given["schema"])


class ResponseObjectFormatter:
    def __init__(self, context: ServingContext, call: GenerationCall, model: str, body: ResponsesBody):
        self._context = context
        self._call = call
        self._body = body
        self._blocks = ContentBlocks()
        self._number = 0
        self._head: dict[str, Any] = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": now(),
            "model": model,
            "error": None,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "previous_response_id": None,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "max_output_tokens": body.max_output_tokens,
            "store": False,
            "truncation": "disabled",
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
        }

    def whole(self, running: ActiveCall) -> dict[str, Any]:
        request = running.requests[0]
        check_end(request)
        self._blocks.feed(request.sink.events)  # type: ignore[union-attr]
        self._blocks.finish()
        return self._response(request) | self._tail(request)

    def _response(self, request: Request) -> dict[str, Any]:
        cut = request.finish_reason == "length"
        counted = usage([request], self._call, self._context.engine)
        return {
            **self._head,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self._item(block, request) for block in self._blocks.all if block.complete],
            "usage": {
                "input_tokens": counted["prompt_tokens"],
                "input_tokens_details": counted["prompt_tokens_details"],
                "output_tokens": counted["completion_tokens"],
                "output_tokens_details": counted["completion_tokens_details"],
                "total_tokens": counted["total_tokens"],
            },
        }

    def _tail(self, request: Request) -> dict[str, Any]:
        found = findings([request], self._call, self._context.shelf)
        said = [*self._call.warnings, *problems(request)]
        return {**found, **({"warnings": said} if said else {})}

    def _item(self, block: ContentBlock, request: Request | None) -> dict[str, Any]:
        status = "in_progress" if request is None else "completed"
        if block.kind == "reasoning":
            content = [{"type": "reasoning_text", "text": block.text}] if request is not None else []
            return {"type": "reasoning", "id": block.id, "summary": [], "content": content, "status": status}
        if block.kind == "tool":
            arguments = block.text if request is not None else ""
            return {
                "type": "function_call",
                "id": "fc_" + block.id[5:],
                "call_id": block.id,
                "name": block.name,
                "arguments": arguments,
                "status": status,
            }
        content = [self._part(block, request)] if request is not None else []
        return {"type": "message", "id": block.id, "role": "assistant", "status": status, "content": content}

    def _part(self, block: ContentBlock, request: Request | None) -> dict[str, Any]:
        logprobs = []
        if request is not None and request.options.logprobs is not None:
            logprobs = [token_logprob(each, self._context.engine) for each in request.logprobs]
        return {
            "type": "output_text",
            "text": block.text if request else "",
            "annotations": [],
            "logprobs": logprobs,
        }

    # The stream

    async def frames(self, running: ActiveCall, ping_seconds: float) -> AsyncIterator[bytes]:
        request = running.requests[0]
        begun = {
            **self._head,
            "status": "in_progress",
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        try:
            async for item in running.news(ping_seconds):
                if item is None:
                    yield PING
                    continue
                for step in self._blocks.feed(item[1].parsed):
                    for data in self._step(step, request):
                        yield data
            if running.cancelled:
                return
            check_end(request)
            for step in self._blocks.finish():
                for data in self._step(step, request):
                    yield data
            whole = self._response(request) | await asyncio.to_thread(self._tail, request)
            yield self._event(f"response.{whole['status']}", response=whole)
        except Exception as error:
            self._context.told(error, running.id)
            problem = problem_of(error)
            told = {"code": problem.code or problem.type, "message": problem.message}
            yield self._event("response.failed", response={**begun, "status": "failed", "error": told})

    def _step(self, step: ContentBlockDelta, request: Request) -> list[bytes]:
        block = step.block
        at = {"output_index": block.index, "item_id": self._item(block, None)["id"]}
        inner = {**at, "content_index": 0}
        if step.what == "open":
            out = [
                self._event(
                    "response.output_item.added", output_index=block.index, item=self._item(block, None)
                )
            ]
            if block.kind == "text":
                out.append(self._event("response.content_part.added", **inner, part=self._part(block, None)))
            return out
        if step.what == "piece":
            if block.kind == "tool":
                return [self._event("response.function_call_arguments.delta", **at, delta=step.text)]
            if block.kind == "reasoning":
                return [self._event("response.reasoning_text.delta", **inner, delta=step.text)]
            return [self._event("response.output_text.delta", **inner, delta=step.text, logprobs=[])]
        out = []
        if block.kind == "tool":
            done = {"name": block.name, "arguments": block.text}
            out.append(self._event("response.function_call_arguments.done", **at, **done))
        elif block.kind == "reasoning":
            out.append(self._event("response.reasoning_text.done", **inner, text=block.text))
        else:
            out.append(self._event("response.output_text.done", **inner, text=block.text, logprobs=[]))
            out.append(self._event("response.content_part.done", **inner, part=self._part(block, request)))
        item = self._item(block, request)
        return [*out, self._event("response.output_item.done", output_index=block.index, item=item)]

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = frame({"type": kind, "sequence_number": self._number, **fields}, kind)
        self._number += 1
        return data
