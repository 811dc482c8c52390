"""Request fields that several routes share: sampling, capture, steering and response format.

Names and bounds are those of the wire. Bounds on fan-out (`n`, `stop`, `logit_bias`, ...) are set here, so that
oversized calls are refused before any work is done; the meaning of a value is checked by `SamplingParams`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import Field

from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.server.api_errors import bad_request
from birkhoff.server.body import RequestBody, StrictBody

StopString = Annotated[str, Field(min_length=1, max_length=64)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
ModelName = Annotated[str, Field(max_length=512)]
PositiveInt = Annotated[int, Field(ge=1, lt=2**31)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Temperature = Annotated[float, Field(ge=0, le=2)]  # the range of OpenAI's APIs
TopP = Annotated[float, Field(gt=0, le=1)]
MessageList = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=4096)]
ToolList = Annotated[list[dict[str, Any]], Field(max_length=128)]
ModuleName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
# Fields of OpenAI's APIs without effect here: nothing is stored or shared between callers, and there is one tier.
OPENAI_WITHOUT_EFFECT = frozenset(
    "store service_tier prompt_cache_key prompt_cache_retention safety_identifier user metadata".split()
)
# Sampling options that a body passes on by name. Every dialect has a form of its own for `logprobs`.
SAMPLING = [each.name for each in fields(SamplingParams) if each.name != "logprobs"]
REFUSED = {
    "audio": "this model has no voice",
    "web_search_options": "this server opens no connections",
    "chat_template": "a template is code, and a call brings none",
    "best_of": "ask for n answers and choose",
    "prompt_logprobs": "ask /v1/completions with echo and logprobs",
    "functions": "use tools",
    "function_call": "use tool_choice",
}


class SteeringFields(RequestBody):
    """The steering fields of a call; parsed by `steering/steering_fields.py`."""

    steering_vectors: dict[str, Any] | None = None
    prefill_steering_vectors: dict[str, Any] | None = None
    decode_steering_vectors: dict[str, Any] | None = None
    steering_clamps: dict[str, Any] | None = None
    prefill_steering_clamps: dict[str, Any] | None = None
    decode_steering_clamps: dict[str, Any] | None = None
    steering_name: Name | dict[str, Any] | None = None
    sae_clamp_specs: list[Any] | None = None
    sae_full_reconstruction_specs: list[Any] | None = None
    interventions: Annotated[list[Any], Field(max_length=64)] | None = None

    @property
    def steering_fields(self) -> dict[str, Any]:
        """The steering fields that are set."""
        return self.given(SteeringFields.model_fields)


class InterpFields(SteeringFields):
    """The extension fields for capture, steering and signals; parsed by the packages they belong to."""

    capture: dict[str, Any] | None = None
    capture_wait: bool = False
    signals: Annotated[list[Name], Field(max_length=32)] | Literal["all"] | bool | None = None
    baseline: bool = False


class StreamOptions(RequestBody):
    without_effect = frozenset({"include_obfuscation"})

    include_usage: bool | None = None


class SamplingFields(InterpFields):
    without_effect = OPENAI_WITHOUT_EFFECT | {"prediction", "cache_salt"}
    refused = REFUSED

    model: ModelName | None = None
    max_tokens: PositiveInt | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=64)] | None = None
    seed: Seed | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=4)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    context: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=300)] | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] | None = None
    return_token_ids: bool | None = None
    return_prompt_text: bool | None = None
    return_progress: bool | None = None

    @property
    def warnings(self) -> list[str]:
        """What is set and has no effect beside the other fields."""
        progress = self.return_progress and not self.stream
        return ["return_progress has no effect without stream."] if progress else []

    def sampling_arguments(self, max_choices: int) -> dict[str, Any]:
        """The fields that are set, as keyword arguments of `Engine.requests`."""
        if self.n is not None and self.n > max_choices:
            raise bad_request(
                f"n is {self.n}, this server gives at most {max_choices} answers at a time.", "n"
            )
        if self.stream_options is not None and not self.stream:
            raise bad_request(
                "stream_options is about streams. Set stream to true or leave it out.", "stream_options"
            )
        return sampling_fields(self)


class JsonSchemaFormat(StrictBody):
    name: Annotated[str, Field(max_length=64)] | None = None
    description: Annotated[str, Field(max_length=4096)] | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(StrictBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


def sampling_fields(body: RequestBody) -> dict[str, Any]:
    """The sampling options of a body that are set, as keyword arguments of `Engine.requests`."""
    return body.given(name for name in SAMPLING if name in type(body).model_fields)


def refuse_baseline(body: InterpFields) -> None:
    """For routes whose response has no place for the unsteered twin."""
    if body.baseline:
        raise bad_request("baseline has no place in this dialect. Use /v1/chat/completions.", "baseline")


def refuse_verbosity(value: str | None, path: str) -> None:
    if value not in (None, "medium"):
        raise bad_request(f"{path}: this model has one verbosity. Ask for a length in the prompt.", path)


def schema_format(schema: dict[str, Any]) -> ResponseFormat:
    return ResponseFormat.model_validate({"type": "json_schema", "json_schema": {"schema": schema}})


def spread_extra_body(body: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Merge a literal `extra_body` object into the top level, where clients should have put its fields.

    Returns the fields and a warning if there was one."""
    if "extra_body" not in body:
        return body, []
    extra = body["extra_body"]
    if not isinstance(extra, dict):
        raise bad_request("extra_body: expected an object.", "extra_body")
    outer = {key: value for key, value in body.items() if key != "extra_body"}
    for key in extra:
        if key in outer:
            raise bad_request(
                f"{key[:64]!a} stands both in the body and in extra_body. Give it once.",
                "extra_body",
                "json-key-twice",
            )
    return {**outer, **extra}, ["extra_body was spread: its fields belong to the top level."]
