"""`POST /completion` of llama.cpp's server: plain text completion, complete and streamed.

The prompt is text or token ids. Streamed events carry `content` and `stop`; the last one has the counts and timings,
and no `[DONE]` follows. `n_predict` -1 means up to the end of the context; 0 computes the prompt, so that it is in the
prefix cache, and generates nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.api.driver import RequestOutput
from birkhoff.engine.request import Request
from birkhoff.output import timings_of
from birkhoff.server.api_errors import ApiError
from birkhoff.server.async_engine import ActiveCall
from birkhoff.server.context import Routes, ServingContext
from birkhoff.server.fields import (
    Seed,
    SteeringFields,
    StopString,
    TokenId,
    TopP,
    sampling_fields,
    schema_format,
)
from birkhoff.server.generation import (
    GenerationCall,
    call_warnings,
    parsed_message,
    raise_on_failure,
    stop_reason,
)
from birkhoff.server.sse import format_event
from birkhoff.server.steering_routes import request_edits
from birkhoff.server.stream_formatter import StreamFormatter

Json = dict[str, Any]


class LlamaCompletionBody(SteeringFields):
    without_effect = frozenset(
        "cache_prompt id_slot n_keep samplers repeat_last_n typical_p dynatemp_range dynatemp_exponent penalize_nl "
        "dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_probability "
        "xtc_threshold mirostat mirostat_tau mirostat_eta min_keep t_max_predict_ms timings_per_token n_indent "
        "top_n_sigma n_cache_reuse".split()
    )
    refused: ClassVar[Mapping[str, str]] = {
        "grammar": "a grammar of this form is not read here; use json_schema",
        "image_data": "this model reads no images",
        "input_extra": "this model fills no gaps",
        "lora": "adapters are not loaded here",
    }

    prompt: str | Annotated[list[TokenId], Field(min_length=1)]
    n_predict: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_p: TopP | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Seed | None = None
    stop: Annotated[list[StopString], Field(max_length=16)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    ignore_eos: bool | None = None
    json_schema: dict[str, Any] | None = None
    stream: bool | None = None
    return_tokens: bool | None = None


class LlamaCompletionRoutes(Routes):
    async def create(self, http: HttpRequest) -> Response:
        """Text completion in the format of llama.cpp's server."""
        body, warnings = await self._context.read_body(http, LlamaCompletionBody)
        generation = await self._context.build(http, body, lambda: self._generation(body, warnings))
        formatter = LlamaCompletionFormatter(self._context, body, generation)
        return await self._context.run(http, [generation], formatter, bool(body.stream))

    def _generation(self, body: LlamaCompletionBody, warnings: list[str]) -> GenerationCall:
        context = self._context
        prompt = context.engine.prompt_ids(body.prompt)
        sampling = sampling_fields(body)
        sampling["repetition_penalty"] = body.repeat_penalty
        if body.n_predict is None or body.n_predict < 0:
            sampling["max_tokens"] = context.remaining_context(len(prompt))
        elif body.n_predict:
            sampling["max_tokens"] = body.n_predict
        schema = None if body.json_schema is None else schema_format(body.json_schema)
        return GenerationCall(
            prompt,
            sampling,
            steer=request_edits(body.steering_fields, context.engine),
            mask=context.grammars.from_response_format(schema),
            prompt_only=body.n_predict == 0,
            warnings=warnings,
        )


class LlamaCompletionFormatter(StreamFormatter):
    """Renders answers of `/completion`."""

    def __init__(self, context: ServingContext, body: LlamaCompletionBody, generation: GenerationCall):
        super().__init__(context)
        self._body = body
        self._generation = generation

    def full_response(self, call: ActiveCall) -> Json:
        (request,) = call.requests
        raise_on_failure(request)
        return self._last(request, parsed_message(request).content, list(request.output_ids))

    def output_events(self, index: int, output: RequestOutput) -> Iterable[bytes]:
        text = "".join(token.text for token in output.tokens)
        ids = [token.token_id for token in output.tokens if token.token_id is not None]
        if text or ids:
            counts = {
                "tokens_predicted": len(output.request.output_ids),
                "tokens_evaluated": len(output.request.prompt_ids),
            }
            yield format_event({"index": 0, "content": text, "tokens": ids, "stop": False, **counts})

    def end_events(self, call: ActiveCall) -> Iterable[bytes]:
        return [format_event(self._last(call.requests[0], "", []))]

    def error_event(self, error: ApiError) -> bytes:
        return format_event(error.as_json())

    def _last(self, request: Request, content: str, ids: list[int]) -> Json:
        """A complete answer, or the last event of a stream."""
        timings, word = timings_of(request), stop_reason(request)
        kind = "limit" if request.finish_reason == "length" else "word" if isinstance(word, str) else "eos"
        warnings = call_warnings(self._generation, [request])
        cached, predicted_n = request.cached_tokens or 0, len(request.output_ids)
        return {
            "index": 0,
            "content": content,
            "tokens": ids if self._body.return_tokens else [],
            "id_slot": 0,
            "stop": True,
            "model": self._context.model_name,
            "tokens_predicted": predicted_n,
            "tokens_evaluated": len(request.prompt_ids),
            "tokens_cached": cached,
            "generation_settings": {
                "n_predict": request.max_tokens,
                "temperature": request.params.temperature,
            },
            "prompt": self._context.engine.tokenizer.decode(request.prompt_ids, skip_special=True),
            "truncated": False,
            "stop_type": kind,
            "stopping_word": word if isinstance(word, str) else "",
            "timings": {
                "cache_n": cached,
                "prompt_n": len(request.prompt_ids) - cached,  # those that were computed in prompt_ms
                "prompt_ms": timings["prefill_ms"],
                "predicted_n": predicted_n,
                "predicted_ms": timings["decode_ms"],
                "predicted_per_second": timings["tokens_per_second"],
            },
            **({"warnings": warnings} if warnings else {}),
        }
