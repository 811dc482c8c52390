"""Ollama's API: `/api/chat` and `/api/generate`, complete and as lines of JSON.

Answers are streamed unless `stream` is false. `options` are Ollama's names of the sampling options; those that place a
model in memory have no effect here, where the model is already loaded, and are listed in `warnings` of the last line. A
model may be named `NAME:latest`. Errors are `{"error": TEXT}`.

A call without a prompt or messages is Ollama's way to load a model, and with `keep_alive` 0 to unload it. It is
answered as Ollama does, once the model is loaded; the model stays in memory in both cases.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.api.driver import RequestOutput
from birkhoff.engine.request import Request
from birkhoff.errors import quoted
from birkhoff.output import timings_of
from birkhoff.server.api_errors import ApiError, bad_request
from birkhoff.server.async_engine import ActiveCall
from birkhoff.server.body import RequestBody
from birkhoff.server.chat_prompt import REASONING_EFFORTS, encode_chat, normalize_messages
from birkhoff.server.context import Routes, ServingContext
from birkhoff.server.fields import (
    ModelName,
    ResponseFormat,
    Seed,
    SteeringFields,
    StopString,
    ToolList,
    TopP,
    sampling_fields,
    schema_format,
)
from birkhoff.server.generation import GenerationCall, call_warnings, parsed_message, raise_on_failure
from birkhoff.server.ollama_models import timestamp
from birkhoff.server.reply import json_response
from birkhoff.server.steering_routes import request_edits
from birkhoff.server.stream_formatter import StreamFormatter
from birkhoff.text.events import ContentDelta, ParsedMessage, ReasoningDelta

Json = dict[str, Any]
NDJSON = "application/x-ndjson"
_DURATION_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|ms|s|m|h)")


class OllamaOptions(RequestBody):
    without_effect = frozenset(
        "num_ctx num_batch num_gpu main_gpu num_thread num_keep use_mmap use_mlock numa low_vram f16_kv vocab_only "
        "repeat_last_n tfs_z typical_p mirostat mirostat_eta mirostat_tau penalize_newline logits_all".split()
    )

    num_predict: Annotated[int, Field(ge=-2, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Seed | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None

    def sampling_arguments(self) -> Json:
        """The options that are set, as keyword arguments of `Engine.requests`. -1 and -2 tokens mean no limit."""
        sampling = sampling_fields(self)
        if self.num_predict is not None and self.num_predict > 0:
            sampling["max_tokens"] = self.num_predict
        if self.repeat_penalty is not None:
            sampling["repetition_penalty"] = self.repeat_penalty
        return sampling


class OllamaFields(SteeringFields):
    without_effect = frozenset({"keep_alive"})

    model: ModelName | None = None
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high"] | None = None


class OllamaChatBody(OllamaFields):
    messages: Annotated[list[dict[str, Any]], Field(max_length=4096)] | None = None
    tools: ToolList | None = None


class OllamaGenerateBody(OllamaFields):
    refused: ClassVar[Mapping[str, str]] = {
        "context": "send the whole conversation to /api/chat",
        "suffix": "this model fills no gaps",
        "template": "a template is code, and a call brings none",
        "images": "this model reads no images",
    }

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None


class OllamaRoutes(Routes):
    async def chat(self, http: HttpRequest) -> Response:
        """Ollama's chat API; streams lines of JSON."""
        body, warnings = await self._context.read_body(http, OllamaChatBody)
        if not body.messages:
            return self._load(body, {"message": {"role": "assistant", "content": ""}}, warnings)
        messages = [_chat_message(message, index) for index, message in enumerate(body.messages)]
        return await self._run(http, body, messages, body.tools, "message", warnings)

    async def generate(self, http: HttpRequest) -> Response:
        """Ollama's generate API: one prompt in the chat format, or as it is with `raw`."""
        body, warnings = await self._context.read_body(http, OllamaGenerateBody)
        if not body.prompt:
            return self._load(body, {"response": ""}, warnings)
        if body.raw and (body.system or body.think or body.format):
            raise bad_request("raw: a raw prompt has no system text, thinking or format.", "raw")
        system = [{"role": "system", "content": body.system}] if body.system else []
        messages = None if body.raw else [*system, {"role": "user", "content": body.prompt}]
        return await self._run(http, body, messages, None, "response", warnings)

    def _load(self, body: OllamaFields, part: Json, warnings: list[str]) -> Response:
        """The answer to a call that only loads or unloads the model: one object, also if `stream` is set."""
        model = self._context.check_model(body.model)
        self._context.engine  # noqa: B018  raises while the model is being loaded
        reason = "unload" if _keep_alive_seconds(body) == 0 else "load"
        line = {"model": model, "created_at": timestamp(datetime.datetime.now(datetime.UTC)), **part}
        end: Json = {"done": True, "done_reason": reason}
        return json_response(line | end | ({"warnings": warnings} if warnings else {}))

    async def _run(
        self,
        http: HttpRequest,
        body: OllamaFields,
        messages: list[Json] | None,
        tools: list[Json] | None,
        field: str,
        warnings: list[str],
    ) -> Response:
        context = self._context
        model = context.check_model(body.model)
        _keep_alive_seconds(body)  # refuses what is no duration
        generation = await context.build(
            http, body, lambda: self._generation(body, messages, tools, warnings)
        )
        formatter = OllamaFormatter(context, generation, model, field)
        return await context.run(http, [generation], formatter, body.stream, media_type=NDJSON)

    def _generation(
        self, body: OllamaFields, messages: list[Json] | None, tools: list[Json] | None, warnings: list[str]
    ) -> GenerationCall:
        context = self._context
        thinking, effort = context.thinks_by_default, None
        if isinstance(body.think, str):
            thinking, effort = REASONING_EFFORTS[body.think]
        elif body.think is not None:
            thinking = body.think
        sampling = body.options.sampling_arguments() if body.options is not None else {}
        steer = request_edits(body.steering_fields, context.engine)
        if messages is None:
            assert isinstance(body, OllamaGenerateBody)
            ids = context.engine.prompt_ids(body.prompt or "")
            sampling.setdefault("max_tokens", context.remaining_context(len(ids)))
            return GenerationCall(ids, sampling, steer=steer, warnings=warnings)
        chat = encode_chat(
            context,
            normalize_messages(messages),
            thinking=thinking,
            effort=effort,
            tools=tools,
            tool_choice=None,
            single_call=False,
            response_format=_response_format(body.format),
        )
        sampling.setdefault("max_tokens", context.remaining_context(len(chat.ids)))
        return chat.generation(sampling, steer=steer, warnings=warnings)


class OllamaFormatter(StreamFormatter):
    """Renders answers of `/api/chat` (in the field `message`) and `/api/generate` (in `response`)."""

    ping = b""  # lines of JSON have no heartbeat

    def __init__(self, context: ServingContext, generation: GenerationCall, model: str, field: str):
        super().__init__(context)
        self._generation = generation
        self._model = model
        self._field = field
        self._plain = generation.thinking is None  # a raw completion, which is not parsed

    def full_response(self, call: ActiveCall) -> Json:
        (request,) = call.requests
        raise_on_failure(request)
        parsed = parsed_message(request)
        part = self._part(parsed.content, parsed.reasoning, _tool_calls(parsed))
        return self._line(part) | self._end(request)

    def output_events(self, index: int, output: RequestOutput) -> Iterable[bytes]:
        content = "".join(event.text for event in output.parsed if isinstance(event, ContentDelta))
        thinking = "".join(event.text for event in output.parsed if isinstance(event, ReasoningDelta))
        if self._plain:
            content = "".join(token.text for token in output.tokens)
        if content or thinking:
            yield _encode(self._line(self._part(content, thinking)) | {"done": False})

    def end_events(self, call: ActiveCall) -> Iterable[bytes]:
        (request,) = call.requests
        calls = _tool_calls(parsed_message(request))
        if calls:
            yield _encode(self._line(self._part("", "", calls)) | {"done": False})
        yield _encode(self._line(self._part("", "")) | self._end(request))

    def error_event(self, error: ApiError) -> bytes:
        return _encode({"error": error.message})

    def _part(self, content: str, thinking: str | None, calls: list[Json] | None = None) -> Json:
        """The fields that hold a piece of the answer."""
        thought = {"thinking": thinking} if thinking else {}
        if self._field == "response":
            return {"response": content, **thought}
        message = {"role": "assistant", "content": content, **thought}
        return {"message": message | ({"tool_calls": calls} if calls else {})}

    def _line(self, part: Json) -> Json:
        return {"model": self._model, "created_at": timestamp(datetime.datetime.now(datetime.UTC)), **part}

    def _end(self, request: Request) -> Json:
        """The fields of the last line: why it ended, token counts, and durations in nanoseconds."""
        timings, warnings = timings_of(request), call_warnings(self._generation, [request])

        def nanoseconds(*names: str) -> int:
            return round(sum(float(timings[name] or 0) for name in names) * 1e6)

        return {
            "done": True,
            "done_reason": request.finish_reason,
            "total_duration": nanoseconds("queue_ms", "prefill_ms", "decode_ms"),
            "load_duration": 0,
            "prompt_eval_count": len(request.prompt_ids),
            "prompt_eval_duration": nanoseconds("prefill_ms"),
            "eval_count": len(request.output_ids),
            "eval_duration": nanoseconds("decode_ms"),
            **({"warnings": warnings} if warnings else {}),
        }


def _keep_alive_seconds(body: OllamaFields) -> float | None:
    """`keep_alive`, which is seconds or a text such as "5m" and "1h30m", as in Go; None if it is not set."""
    value = (body.model_extra or {}).get("keep_alive")
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return value
    text = value.removeprefix("-").removeprefix("+") if isinstance(value, str) and len(value) < 64 else ""
    if text == "0":
        return 0.0
    parts = _DURATION_PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise bad_request(
            f"keep_alive is {quoted(value, 40)}, expected seconds or a duration such as 5m or 1h30m.",
            "keep_alive",
        )
    seconds = sum(float(number) * _DURATION_UNITS[unit] for number, unit in parts)
    return -seconds if value.startswith("-") else seconds


def _chat_message(message: Json, index: int) -> Json:
    """One of Ollama's messages in OpenAI's form: arguments of tool calls as text, thinking as reasoning."""
    if message.get("images"):
        raise bad_request(
            f"messages[{index}].images: this model reads no images.", f"messages[{index}].images"
        )
    fields = {key: value for key, value in message.items() if key not in ("images", "thinking", "tool_name")}
    if message.get("thinking"):
        fields["reasoning_content"] = message["thinking"]
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        fields["tool_calls"] = [_tool_call(call, f"messages[{index}].tool_calls") for call in calls]
    return fields


def _tool_call(call: Any, where: str) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise bad_request(f"{where}: expected objects with a function.", where)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    return {"type": "function", "function": {**function, "arguments": text}}


def _tool_calls(parsed: ParsedMessage) -> list[Json]:
    return [
        {"function": {"name": call.name, "arguments": orjson.loads(call.arguments_json)}}
        for call in parsed.tool_calls
    ]


def _response_format(value: str | dict[str, Any] | None) -> ResponseFormat | None:
    if not value:
        return None
    if isinstance(value, dict):
        return schema_format(value)
    return ResponseFormat.model_validate({"type": "json_object"})


def _encode(line: Json) -> bytes:
    return orjson.dumps(line) + b"\n"
