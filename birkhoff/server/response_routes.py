"""`POST /v1/responses`: OpenAI's Responses API, stateless.

Nothing is stored between calls: `previous_response_id` is refused with the advice to send the conversation again, and
`store` is accepted and ignored. Input items become chat messages, content blocks become output items. Streamed events
are numbered in order; the last one carries the complete response.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.api.driver import RequestOutput
from birkhoff.engine.request import Request, TokenLogprob
from birkhoff.server.api_errors import ApiError, bad_request
from birkhoff.server.async_engine import ActiveCall
from birkhoff.server.body import RequestBody
from birkhoff.server.chat_prompt import REASONING_EFFORTS, ReasoningEffort, encode_chat, normalize_messages
from birkhoff.server.content_blocks import BlockFormatter, ContentBlock, ContentBlockDelta
from birkhoff.server.context import Routes, ServingContext
from birkhoff.server.fields import (
    OPENAI_WITHOUT_EFFECT,
    REFUSED,
    InterpFields,
    MessageList,
    ModelName,
    PositiveInt,
    ResponseFormat,
    Seed,
    Temperature,
    ToolList,
    TopP,
    refuse_baseline,
    refuse_verbosity,
    sampling_fields,
    schema_format,
)
from birkhoff.server.generation import GenerationCall, in_reasoning, is_eos, new_id, now, token_logprob, usage
from birkhoff.server.sse import format_event
from birkhoff.server.tools import Tools


class Reasoning(RequestBody):
    without_effect = frozenset({"summary", "generate_summary"})

    effort: ReasoningEffort | None = None


class TextConfig(RequestBody):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesBody(InterpFields):
    without_effect = (OPENAI_WITHOUT_EFFECT - {"metadata"}) | {"stream_options"}
    refused = REFUSED | {
        "prompt": "nothing is stored here. Send the text as instructions and input",
        "truncation": "an input that is too long is refused",
        "max_tool_calls": "calls are made by the client",
    }

    model: ModelName | None = None
    input: str | MessageList
    instructions: str | None = None
    max_output_tokens: PositiveInt | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    seed: Seed | None = None
    tools: ToolList | None = None
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


class ResponseRoutes(Routes):
    async def create(self, http: HttpRequest) -> Response:
        """OpenAI's Responses API. Stateless: the whole conversation is sent as `input`."""
        body, warnings = await self._context.read_body(http, ResponsesBody)
        model = self._context.check_model(body.model)
        generation = await self._context.build(http, body, lambda: self._generation(body, warnings))
        formatter = ResponseObjectFormatter(self._context, generation, model, body)
        return await self._context.run(http, [generation], formatter, bool(body.stream))

    def _generation(self, body: ResponsesBody, warnings: list[str]) -> GenerationCall:
        for name in ("previous_response_id", "conversation"):
            if getattr(body, name):
                raise bad_request(
                    f"{name}: nothing is kept between calls here. Send the whole conversation as input.", name
                )
        if body.background:
            raise bad_request(
                "background: answers are given while the call is open. Leave it out.", "background"
            )
        if body.text is not None:
            refuse_verbosity(body.text.verbosity, "text.verbosity")
        thinking, effort = self._context.thinks_by_default, None
        if body.reasoning is not None and body.reasoning.effort is not None:
            thinking, effort = REASONING_EFFORTS[body.reasoning.effort]
        prompt = encode_chat(
            self._context,
            normalize_messages(_chat_messages(body)),
            thinking=thinking,
            effort=effort,
            tools=_function_tools(body.tools),
            tool_choice=body.tool_choice,
            single_call=body.parallel_tool_calls is False,
            response_format=_response_format(body),
        )
        sampling = sampling_fields(body)
        sampling["max_tokens"] = body.max_output_tokens or self._context.remaining_context(len(prompt.ids))
        if body.top_logprobs is not None or "message.output_text.logprobs" in (body.include or ()):
            sampling["logprobs"] = body.top_logprobs or 0
        arguments = self._context.interp_arguments(body)
        refuse_baseline(body)
        return prompt.generation(sampling, warnings=warnings, **arguments)


def _chat_messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """Input items as chat messages. The items of one answer, its reasoning, text and function calls, become one message
    of the assistant."""
    messages: list[dict[str, Any]] = (
        [{"role": "system", "content": body.instructions}] if body.instructions else []
    )
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    answer: dict[str, Any] | None = None  # the message that the next items of an answer belong to
    for index, item in enumerate(body.input):
        kind, where = item.get("type", "message"), f"input[{index}]"
        if kind in ("reasoning", "function_call") and answer is None:
            answer = {"role": "assistant", "content": ""}
            messages.append(answer)
        if kind == "reasoning":
            assert answer is not None
            text = _reasoning_text(item, where)
            if text:
                answer["reasoning_content"] = answer.get("reasoning_content", "") + text
        elif kind == "function_call":
            assert answer is not None
            function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
            call = {"id": str(item.get("call_id", "")), "type": "function", "function": function}
            answer.setdefault("tool_calls", []).append(call)
        elif kind == "message" and item.get("role") == "assistant":
            if answer is None or answer["content"] or "tool_calls" in answer:
                answer = {"role": "assistant"}
                messages.append(answer)
            answer["content"] = item.get("content")
        elif kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
            answer = None
        elif kind == "function_call_output":
            call_id = str(item.get("call_id", ""))
            messages.append({"role": "tool", "tool_call_id": call_id, "content": item.get("output")})
            answer = None
        else:
            raise bad_request(f"{where}.type: {kind!a} is no item this server knows.", where)
    return [message for message in messages if message != {"role": "assistant", "content": ""}]


def _reasoning_text(item: dict[str, Any], where: str) -> str:
    """The text of a reasoning item; its summary is none of the model's words."""
    parts = item.get("content") or []
    if not isinstance(parts, list) or not all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts
    ):
        raise bad_request(f"{where}.content: expected parts with a text.", where)
    return "".join(part["text"] for part in parts)


def _function_tools(tools: Tools | None) -> Tools | None:
    """Tools of the Responses API in the form of the chat API."""
    functions = []
    for index, tool in enumerate(tools or ()):
        if tool.get("type") != "function":
            raise bad_request(
                f"tools[{index}]: only functions are served, not {tool.get('type')!a}.", f"tools[{index}]"
            )
        function = {
            key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None
        }
        functions.append({"type": "function", "function": function})
    return functions or None


def _response_format(body: ResponsesBody) -> ResponseFormat | None:
    requested = body.text.format if body.text is not None else None
    if requested is None or requested.get("type") == "text":
        return None
    if requested.get("type") == "json_object":
        return ResponseFormat(type="json_object")
    if requested.get("type") != "json_schema" or not isinstance(requested.get("schema"), dict):
        raise bad_request(
            "text.format: expected text, json_object, or json_schema with its schema.", "text.format"
        )
    return schema_format(requested["schema"])


class ResponseObjectFormatter(BlockFormatter):
    """Renders `response` objects and their stream events."""

    def __init__(self, context: ServingContext, generation: GenerationCall, model: str, body: ResponsesBody):
        super().__init__(context, generation)
        self._sequence_number = 0
        self._streamed_tokens = 0
        self._new_logprobs: list[dict[str, Any]] = []  # of tokens whose text was not sent yet
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
        self._in_progress = {
            **self._head,
            "status": "in_progress",
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }

    def response(self, request: Request, extras: dict[str, Any]) -> dict[str, Any]:
        truncated = request.finish_reason == "length"
        counts = usage([request])
        return {
            **self._head,
            "status": "incomplete" if truncated else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
            "output": [self._item(block, request) for block in self._blocks.blocks],
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": counts["completion_tokens_details"],
                "total_tokens": counts["total_tokens"],
            },
            **extras,
        }

    def _item(self, block: ContentBlock, request: Request | None) -> dict[str, Any]:
        """An output item; `request` is None while the item is in progress, which leaves its content empty."""
        status = "in_progress" if request is None else "completed" if block.complete else "incomplete"
        if block.kind == "reasoning":
            content = [{"type": "reasoning_text", "text": block.text}] if request is not None else []
            return {"type": "reasoning", "id": block.id, "summary": [], "content": content, "status": status}
        if block.kind == "tool":
            return {
                "type": "function_call",
                "id": "fc_" + block.id[5:],
                "call_id": block.id,
                "name": block.name,
                "arguments": block.text if request is not None else "",
                "status": status,
            }
        content = [self._text_part(block, request)] if request is not None else []
        return {"type": "message", "id": block.id, "role": "assistant", "status": status, "content": content}

    def _text_part(self, block: ContentBlock, request: Request | None) -> dict[str, Any]:
        logprobs = [] if request is None else self._logprobs(request, request.logprobs)
        return {
            "type": "output_text",
            "text": block.text if request else "",
            "annotations": [],
            "logprobs": logprobs,
        }

    def _logprobs(
        self, request: Request, entries: Sequence[TokenLogprob], first: int = 0
    ) -> list[dict[str, Any]]:
        """Log-probabilities of the tokens from index `first` on that are no reasoning; none unless requested."""
        return [
            token_logprob(entry, self._context.engine)
            for index, entry in enumerate(entries, first)
            if not is_eos(entry.token_id, request) and not in_reasoning(request, index)
        ]

    def output_events(self, index: int, output: RequestOutput) -> Iterable[bytes]:
        entries = [token.logprob for token in output.tokens if token.logprob is not None]
        self._new_logprobs += self._logprobs(output.request, entries, self._streamed_tokens)
        self._streamed_tokens += len(entries)
        return super().output_events(index, output)

    def start_events(self, call: ActiveCall) -> list[bytes]:
        return [
            self._event("response.created", response=self._in_progress),
            self._event("response.in_progress", response=self._in_progress),
        ]

    def final_events(self, request: Request, extras: dict[str, Any]) -> list[bytes]:
        response = self.response(request, extras)
        return [self._event(f"response.{response['status']}", response=response)]

    def error_event(self, error: ApiError) -> bytes:
        failure = {"code": error.code or error.type, "message": error.message}
        failed = {**self._in_progress, "status": "failed", "error": failure}
        return self._event("response.failed", response=failed)

    def block_events(self, delta: ContentBlockDelta, request: Request) -> list[bytes]:
        block = delta.block
        item = {"output_index": block.index, "item_id": self._item(block, None)["id"]}
        part = {**item, "content_index": 0}
        if delta.change == "start":
            events = [
                self._event(
                    "response.output_item.added", output_index=block.index, item=self._item(block, None)
                )
            ]
            if block.kind == "text":
                text_part = self._text_part(block, None)
                events.append(self._event("response.content_part.added", **part, part=text_part))
            return events
        if delta.change == "delta":
            if block.kind == "tool":
                return [self._event("response.function_call_arguments.delta", **item, delta=delta.text)]
            if block.kind == "reasoning":
                return [self._event("response.reasoning_text.delta", **part, delta=delta.text)]
            logprobs, self._new_logprobs = self._new_logprobs, []
            return [self._event("response.output_text.delta", **part, delta=delta.text, logprobs=logprobs)]
        events = []
        if block.kind == "tool":
            done = {"name": block.name, "arguments": block.text}
            events.append(self._event("response.function_call_arguments.done", **item, **done))
        elif block.kind == "reasoning":
            events.append(self._event("response.reasoning_text.done", **part, text=block.text))
        else:
            text_part = self._text_part(block, request)
            done = {"text": block.text, "logprobs": text_part["logprobs"]}
            events.append(self._event("response.output_text.done", **part, **done))
            events.append(self._event("response.content_part.done", **part, part=text_part))
        done_item = self._item(block, request)
        return [*events, self._event("response.output_item.done", output_index=block.index, item=done_item)]

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = format_event({"type": kind, "sequence_number": self._sequence_number, **fields}, kind)
        self._sequence_number += 1
        return data
