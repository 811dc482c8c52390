"""`POST /v1/chat/completions`, whole and streamed.

A conversation is rendered by the model's own encoding; the answer's reasoning, content and tool calls come apart as
they are parsed. The streamed form follows OpenAI's rules to the letter: the first chunk of a choice carries the role,
`finish_reason` stands once, in the last chunk of a choice; a tool call's id and name come once, then pieces of its
arguments; usage, when asked for, is a chunk without choices; `[DONE]` ends it. An error after the first byte is a frame
with an `error` object. Joined deltas are the unstreamed answer.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.api.driver import RequestOutput
from birkhoff.engine.request import Request
from birkhoff.server.api_errors import bad
from birkhoff.server.body import RequestBody
from birkhoff.server.calls import GenerationCall, is_end, new_id, now, parsed, stop_reason, token_logprob
from birkhoff.server.choices import Choices
from birkhoff.server.context import ServingContext
from birkhoff.server.fields import ResponseFormat, Sampling
from birkhoff.server.tools import forced
from birkhoff.text.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)

EFFORTS = {
    "none": (False, None),
    "minimal": (False, None),
    "low": (True, None),
    "medium": (True, None),
    "high": (True, "high"),
    "xhigh": (True, "max"),
    "max": (True, "max"),
}


class Thinking(RequestBody):
    type: Literal["enabled", "disabled", "adaptive"]


class ChatBody(Sampling):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    thinking: Thinking | None = None
    modalities: list[str] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    skip_special_tokens: bool | None = None


class ChatRoutes:
    def __init__(self, context: ServingContext):
        self._context = context

    async def answer(self, http: HttpRequest) -> Response:
        body, warnings = await self._context.read(http, ChatBody)
        call = await self._context.call(http, body, lambda: self.call(body, warnings))
        model = self._context.model_name(body.model)
        shape = ChatFormatter(self._context, call, model, body)
        return await self._context.run(http, call, shape, bool(body.stream), body.request_id)

    def call(self, body: ChatBody, warnings: list[str]) -> GenerationCall:
        engine, context = self._context.engine, self._context
        if body.modalities not in (None, ["text"]):
            raise bad("modalities: this model speaks text only. Leave it out.", "modalities")
        for name, only in (("add_generation_prompt", True), ("continue_final_message", False)):
            if getattr(body, name) not in (None, only):
                raise bad(f"{name} can only be {str(only).lower()} here. Leave it out.", name)
        thinking, effort = self.reasoning(body)
        tools, mask = forced(
            context.grammars, body.tools, body.tool_choice, thinking, body.parallel_tool_calls is False
        )
        format_mask = context.grammars.of_format(body.response_format, thinking)
        if mask and format_mask:
            raise bad(
                "response_format and a forced tool call exclude each other. Choose one.", "response_format"
            )
        wanted = body.response_format
        shown = wanted.json_schema.schema_ if wanted and wanted.json_schema else None
        prompt = engine.encode_chat(
            conversation(body.messages), thinking=thinking, effort=effort, tools=tools, response_format=shown
        )
        sampling = body.options(context.settings.max_choices)
        if body.max_completion_tokens is not None:
            sampling["max_tokens"] = body.max_completion_tokens
        elif body.max_tokens is None:
            sampling["max_tokens"] = context.room(len(prompt))
        if body.logprobs:
            sampling["logprobs"] = body.top_logprobs or 0
        elif body.top_logprobs:
            raise bad("top_logprobs needs logprobs to be true.", "top_logprobs")
        return GenerationCall(
            prompt, sampling, thinking, mask=mask or format_mask, warnings=warnings, **context.looking(body)
        )

    def reasoning(self, body: ChatBody) -> tuple[bool, str | None]:
        """Whether to think, and how hard: `reasoning_effort`, `thinking`, `chat_template_kwargs.thinking`, or the
        model's habit."""
        if body.reasoning_effort is not None:
            return EFFORTS[body.reasoning_effort]
        if body.thinking is not None:
            return body.thinking.type != "disabled", None
        given = (body.model_extra or {}).get("chat_template_kwargs")
        asked = given.get("thinking", given.get("enable_thinking")) if isinstance(given, dict) else None
        if isinstance(asked, bool):
            return asked, None
        return self._context.thinks, None


def conversation(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as the model's encoding takes them: `developer` means system here, and clients' own fields go."""
    out = []
    for place, message in enumerate(messages):
        kept = {
            key: value
            for key, value in message.items()
            if value is not None and key not in ("refusal", "audio")
        }
        kept.pop("function_call", None)
        if kept.get("role") == "developer":
            kept["role"] = "system"
        if isinstance(kept.get("content"), list):
            kept["content"] = [
                _text_part(part, f"messages[{place}].content[{i}]") for i, part in enumerate(kept["content"])
            ]
        if kept.get("reasoning") and kept.get("reasoning_content"):
            kept.pop("reasoning")
        if kept.get("tool_calls") == []:
            kept.pop("tool_calls")
        out.append(kept)
    return out


def _text_part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "refusal":
        return {"type": "text", "text": str(part.get("refusal", ""))}
    raise bad(
        f"{where}: expected a text part; this model reads no images, sound or files.", where, "content-kind"
    )


class ChatFormatter(Choices):
    """How one call's answers look in this dialect."""

    def __init__(self, context: ServingContext, call: GenerationCall, model: str, body: ChatBody):
        named = {
            "id": new_id("chatcmpl-"),
            "created": now(),
            "model": model,
            "system_fingerprint": context.fingerprint,
        }
        head, chunk_head = (
            {**named, "object": kind} for kind in ("chat.completion", "chat.completion.chunk")
        )
        super().__init__(context, [call], body, head, chunk_head)
        self._plain = call.thinking is None
        self._logprobs = bool(body.logprobs)
        self._begun: set[int] = set()
        self._calls_done: set[int] = set()

    def choice(self, index: int, request: Request) -> dict[str, Any]:
        message = parsed(request)
        said: dict[str, Any] = {"role": "assistant", "content": message.content or None, "refusal": None}
        if message.reasoning:
            said["reasoning_content"] = said["reasoning"] = message.reasoning
        if message.tool_calls:
            said["tool_calls"] = [
                {
                    "id": new_id("call_"),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments_json},
                }
                for call in message.tool_calls
            ]
        elif said["content"] is None:
            said["content"] = ""
        choice: dict[str, Any] = {
            "index": index,
            "message": said,
            "finish_reason": _reason(request, bool(message.tool_calls)),
            "logprobs": None,
            "stop_reason": stop_reason(request),
        }
        if self._logprobs:
            content = [
                token_logprob(p, self._context.engine)
                for p in request.logprobs
                if not is_end(p.token_id, request)
            ]
            choice["logprobs"] = {"content": content, "refusal": None}
        if self._body.return_token_ids:
            choice["token_ids"] = list(request.output_ids)
        return choice

    def pieces(self, index: int, told: RequestOutput) -> list[dict[str, Any]]:
        made = []
        if index not in self._begun:
            self._begun.add(index)
            made.append(_delta(index, {"role": "assistant", "content": ""}))
        deltas = self._deltas(index, told.parsed)
        if told.request.sink is None or self._plain:
            text = "".join(token.text for token in told.tokens)
            deltas = [{"content": text}] if text else []
        logprobs = self._chances(told) if self._logprobs else []
        ids = [token.token_id for token in told.tokens if token.token_id is not None]
        if not deltas and (logprobs or (ids and self._body.return_token_ids)):
            deltas = [
                {"content": ""}
            ]  # a token may be half a character; its numbers come with it all the same
        for place, delta in enumerate(deltas):
            choice = _delta(index, delta)
            if place == 0 and logprobs:
                choice["logprobs"] = {"content": logprobs, "refusal": None}
            if place == 0 and self._body.return_token_ids:
                choice["token_ids"] = ids
            made.append(choice)
        return made

    def end(self, index: int, request: Request) -> dict[str, Any]:
        choice = _delta(index, {})
        choice["finish_reason"] = _reason(request, index in self._calls_done)
        choice["stop_reason"] = stop_reason(request)
        return choice

    def _deltas(self, index: int, events: tuple[Event, ...]) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        for event in events:
            if isinstance(event, ContentDelta):
                _join(out, "content", event.text)
            elif isinstance(event, ReasoningDelta):
                _join(out, "reasoning_content", event.text)
            elif isinstance(event, ToolCallStart):
                call_id = new_id("call_")
                function = {"name": event.name, "arguments": ""}
                out.append(
                    {
                        "tool_calls": [
                            {"index": event.index, "id": call_id, "type": "function", "function": function}
                        ]
                    }
                )
            elif isinstance(event, ToolCallDelta):
                out.append(
                    {"tool_calls": [{"index": event.index, "function": {"arguments": event.arguments}}]}
                )
            elif isinstance(event, ToolCallEnd) and event.complete:
                self._calls_done.add(index)
        for delta in out:
            if "reasoning_content" in delta:
                delta["reasoning"] = delta["reasoning_content"]  # clients are split between the two names
        return out

    def _chances(self, told: RequestOutput) -> list[dict[str, Any]]:
        found = [token.logprob for token in told.tokens if not is_end(token.token_id, told.request)]
        return [token_logprob(logprob, self._context.engine) for logprob in found if logprob is not None]


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _join(out: list[dict[str, Any]], kind: str, text: str) -> None:
    if out and kind in out[-1]:
        out[-1][kind] += text
    else:
        out.append({kind: text})


def _reason(request: Request, called: bool) -> str:
    reason = request.finish_reason or "stop"
    return "tool_calls" if called and reason == "stop" else reason
