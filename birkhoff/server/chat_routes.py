"""`POST /v1/chat/completions`, complete and streamed.

The conversation is encoded with the model's own chat format; reasoning, content and tool calls are separated as the
output is parsed. Streams follow OpenAI's rules: the first chunk of a choice carries the role; `finish_reason` is set
once, in the last chunk of a choice; the id and name of a tool call are sent once, followed by pieces of its arguments;
usage, if requested, is the only chunk without choices; `[DONE]` ends the stream. An error after the first byte is an
event with an `error` object. The concatenated deltas equal the message of the unstreamed response; a tool call that
`max_tokens` cuts off is part of both, with what there is of its arguments and the `finish_reason` `length`. As in
DeepSeek's API, `logprobs.reasoning_content` has the tokens of the reasoning with its end marker, and `logprobs.content`
all others; with a chunk come the numbers of the tokens that were generated for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.api.driver import RequestOutput
from birkhoff.engine.request import Request, TokenLogprob
from birkhoff.server.api_errors import bad_request
from birkhoff.server.body import RequestBody
from birkhoff.server.chat_prompt import REASONING_EFFORTS, ReasoningEffort, encode_chat, normalize_messages
from birkhoff.server.choices import ChoicesFormatter
from birkhoff.server.context import Routes, ServingContext
from birkhoff.server.fields import (
    MessageList,
    PositiveInt,
    ResponseFormat,
    SamplingFields,
    ToolList,
    refuse_verbosity,
)
from birkhoff.server.generation import (
    GenerationCall,
    in_reasoning,
    is_eos,
    new_id,
    now,
    parsed_message,
    stop_reason,
    token_logprob,
)
from birkhoff.text.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)


class Thinking(RequestBody):
    without_effect = frozenset({"budget_tokens", "display"})

    type: Literal["enabled", "disabled", "adaptive"]


class TemplateArguments(RequestBody):
    """`chat_template_kwargs` of servers that render a template: two names of the same switch."""

    thinking: bool | None = None
    enable_thinking: bool | None = None


class ChatBody(SamplingFields):
    messages: MessageList
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: ToolList | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateArguments | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    modalities: list[str] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    skip_special_tokens: bool | None = None


class ChatRoutes(Routes):
    async def create(self, http: HttpRequest) -> Response:
        """OpenAI's chat completions API, with fields for capture, steering and signals."""
        body, warnings = await self._context.read_body(http, ChatBody)
        generation = await self._context.build(http, body, lambda: self._generation(body, warnings))
        model = self._context.check_model(body.model)
        formatter = ChatFormatter(self._context, generation, model, body)
        return await self._context.run(http, [generation], formatter, bool(body.stream), body.request_id)

    def _generation(self, body: ChatBody, warnings: list[str]) -> GenerationCall:
        context = self._context
        if body.modalities not in (None, ["text"]):
            raise bad_request("modalities: this model speaks text only. Leave it out.", "modalities")
        refuse_verbosity(body.verbosity, "verbosity")
        continue_final = bool(body.continue_final_message)
        if body.skip_special_tokens is False:
            raise bad_request(
                "skip_special_tokens can only be true here. Leave it out.", "skip_special_tokens"
            )
        if body.add_generation_prompt not in (None, not continue_final):
            raise bad_request(
                "add_generation_prompt can only be the opposite of continue_final_message here. Leave it out.",
                "add_generation_prompt",
            )
        thinking, effort = self._reasoning(body)
        prompt = encode_chat(
            context,
            normalize_messages(body.messages),
            thinking=thinking,
            effort=effort,
            tools=body.tools,
            tool_choice=body.tool_choice,
            single_call=body.parallel_tool_calls is False,
            response_format=body.response_format,
            refuse_both=True,
            continue_final=continue_final,
        )
        sampling = body.sampling_arguments(context.settings.max_choices)
        if body.max_completion_tokens is not None:
            sampling["max_tokens"] = body.max_completion_tokens
        elif body.max_tokens is None:
            sampling["max_tokens"] = context.remaining_context(len(prompt.ids))
        if body.logprobs:
            sampling["logprobs"] = body.top_logprobs or 0
        elif body.top_logprobs:
            raise bad_request("top_logprobs needs logprobs to be true.", "top_logprobs")
        warnings = [*warnings, *body.warnings]
        return prompt.generation(sampling, warnings, **context.interp_arguments(body))

    def _reasoning(self, body: ChatBody) -> tuple[bool, str | None]:
        """Whether to think, and with which effort.

        Taken from the first that is set of `reasoning_effort`, `thinking` and `chat_template_kwargs`, else the
        model's default; a message that is continued has no reasoning."""
        if body.reasoning_effort is not None:
            return REASONING_EFFORTS[body.reasoning_effort]
        if body.thinking is not None:
            return body.thinking.type != "disabled", None
        template = body.chat_template_kwargs
        if template is not None:
            thinking = template.enable_thinking if template.thinking is None else template.thinking
            if thinking is not None:
                return thinking, None
        return self._context.thinks_by_default and not body.continue_final_message, None


class ChatFormatter(ChoicesFormatter):
    """Renders `chat.completion` objects and `chat.completion.chunk` events."""

    def __init__(self, context: ServingContext, generation: GenerationCall, model: str, body: ChatBody):
        shared = {
            "id": new_id("chatcmpl-"),
            "created": now(),
            "model": model,
            "system_fingerprint": context.fingerprint,
        }
        head, chunk_head = (
            {**shared, "object": kind} for kind in ("chat.completion", "chat.completion.chunk")
        )
        super().__init__(context, [generation], body, head, chunk_head)
        self._is_plain_text = generation.thinking is None
        self._with_logprobs = bool(body.logprobs)
        self._started: set[int] = set()  # choices whose first chunk was sent
        self._with_tool_calls: set[int] = set()  # choices that completed a tool call
        self._streamed_tokens: Counter[int] = Counter()  # by choice

    def choice(self, index: int, request: Request) -> dict[str, Any]:
        parsed = parsed_message(request)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content or None, "refusal": None}
        if parsed.reasoning:
            message["reasoning_content"] = message["reasoning"] = parsed.reasoning
        calls = [*parsed.tool_calls, *([parsed.incomplete_call] if parsed.incomplete_call else [])]
        if calls:
            message["tool_calls"] = [
                {
                    "id": new_id("call_"),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments_json},
                }
                for call in calls
            ]
        elif message["content"] is None:
            message["content"] = ""
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "finish_reason": _finish_reason(request, bool(parsed.tool_calls)),
            "logprobs": None,
            "stop_reason": stop_reason(request),
        }
        if self._with_logprobs:
            choice["logprobs"] = self._logprobs(request, request.logprobs)
        if self._body.return_token_ids:
            choice["token_ids"] = list(request.output_ids)
        return choice

    def chunk_choices(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        choices = []
        if index not in self._started:
            self._started.add(index)
            choices.append(_chunk_choice(index, {"role": "assistant", "content": ""}))
        deltas = self._deltas(index, output.parsed)
        if output.request.sink is None or self._is_plain_text:
            text = "".join(token.text for token in output.tokens)
            deltas = [{"content": text}] if text else []
        ids = [token.token_id for token in output.tokens if token.token_id is not None]
        logprobs = None
        if self._with_logprobs and ids:
            entries = [token.logprob for token in output.tokens if token.logprob is not None]
            logprobs = self._logprobs(output.request, entries, self._streamed_tokens[index])
            self._streamed_tokens[index] += len(ids)
        if not deltas and (_any_logprobs(logprobs) or (ids and self._body.return_token_ids)):
            deltas = [
                {"content": ""}
            ]  # an incomplete character has no text yet, but its numbers are sent now
        for position, delta in enumerate(deltas):
            choice = _chunk_choice(index, delta)
            if position == 0 and _any_logprobs(logprobs):
                choice["logprobs"] = logprobs
            if position == 0 and self._body.return_token_ids:
                choice["token_ids"] = ids
            choices.append(choice)
        return choices

    def empty_choice(self, index: int) -> dict[str, Any]:
        return _chunk_choice(index, {})

    def final_choice(self, index: int, request: Request) -> dict[str, Any]:
        choice = _chunk_choice(index, {})
        choice["finish_reason"] = _finish_reason(request, index in self._with_tool_calls)
        choice["stop_reason"] = stop_reason(request)
        return choice

    def _deltas(self, index: int, events: tuple[Event, ...]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for event in events:
            if isinstance(event, ContentDelta):
                _append_text(deltas, "content", event.text)
            elif isinstance(event, ReasoningDelta):
                _append_text(deltas, "reasoning_content", event.text)
            elif isinstance(event, ToolCallStart):
                start = {"index": event.index, "id": new_id("call_"), "type": "function"}
                deltas.append({"tool_calls": [{**start, "function": {"name": event.name, "arguments": ""}}]})
            elif isinstance(event, ToolCallDelta):
                deltas.append(
                    {"tool_calls": [{"index": event.index, "function": {"arguments": event.arguments}}]}
                )
            elif isinstance(event, ToolCallEnd) and event.complete:
                self._with_tool_calls.add(index)
        for delta in deltas:
            if "reasoning_content" in delta:
                delta["reasoning"] = delta["reasoning_content"]  # clients use either name
        return deltas

    def _logprobs(self, request: Request, entries: Sequence[TokenLogprob], first: int = 0) -> dict[str, Any]:
        """`logprobs` of the tokens from index `first` on: those of the reasoning have a list of their own."""
        parts: dict[str, list[dict[str, Any]]] = {"content": [], "reasoning_content": []}
        for index, entry in enumerate(entries, first):
            if not is_eos(entry.token_id, request):
                part = "reasoning_content" if in_reasoning(request, index) else "content"
                parts[part].append(token_logprob(entry, self._context.engine))
        if not parts["reasoning_content"]:
            del parts["reasoning_content"]
        return {"refusal": None, **parts}


def _chunk_choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _any_logprobs(logprobs: dict[str, Any] | None) -> bool:
    return logprobs is not None and any(logprobs.values())


def _append_text(deltas: list[dict[str, Any]], key: str, text: str) -> None:
    """Extend the last delta if it has the same key, else add one."""
    if deltas and key in deltas[-1]:
        deltas[-1][key] += text
    else:
        deltas.append({key: text})


def _finish_reason(request: Request, has_tool_calls: bool) -> str:
    reason = request.finish_reason or "stop"
    return "tool_calls" if has_tool_calls and reason == "stop" else reason
