"""Fields that several routes share: sampling, and everything about looking inside and steering.

Names and bounds are those of the wire. Bounds on fan-out (`n`, `stop`, `logit_bias`, ...) stand here, so that a call
that asks for too much is refused before anything is made of it; what a value means is checked by the sampler's own
options, with its own messages.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from birkhoff.server.api_errors import bad
from birkhoff.server.body import RequestBody, StrictBody

Stop = Annotated[str, Field(min_length=1, max_length=64)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
MOST_UNKNOWN = 64

IGNORED = frozenset(
    {
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "verbosity",
        "prediction",
        "functions",
        "function_call",
        "user",
        "metadata",
        "cache_salt",
        "chat_template_kwargs",
        "include",
        "truncation",
        "background",
        "text",
        "context_management",
        "inference_geo",
        "container",
        "mcp_servers",
        "betas",
        "cache_control",
    }
)
QUIET = frozenset(
    {"user", "metadata", "chat_template_kwargs", "cache_salt", "include"}
)  # taken, or nobody's loss
REFUSED = {
    "audio": "this model has no voice",
    "web_search_options": "this server opens no connections",
    "chat_template": "a template is code, and a call brings none",
    "best_of": "ask for n answers and choose",
    "prompt_logprobs": "ask /v1/completions with echo and logprobs",
}
EXTENSIONS = (
    "capture",
    "capture_wait",
    "steering_vectors",
    "prefill_steering_vectors",
    "decode_steering_vectors",
    "steering_name",
    "sae_clamp_specs",
    "sae_full_reconstruction_specs",
    "interventions",
    "signals",
    "baseline",
)


class InterpFields(RequestBody):
    """The extension fields, as they come; their own rooms read them."""

    capture: dict[str, Any] | None = None
    capture_wait: bool = False
    steering_vectors: dict[str, Any] | None = None
    prefill_steering_vectors: dict[str, Any] | None = None
    decode_steering_vectors: dict[str, Any] | None = None
    steering_name: Name | dict[str, Any] | None = None
    sae_clamp_specs: list[Any] | None = None
    sae_full_reconstruction_specs: list[Any] | None = None
    interventions: Annotated[list[Any], Field(max_length=64)] | None = None
    signals: Annotated[list[Name], Field(max_length=32)] | Literal["all"] | bool | None = None
    baseline: bool = False

    @property
    def steers(self) -> dict[str, Any]:
        """The steering fields that were given."""
        names = [
            name
            for name in EXTENSIONS
            if "steering" in name or name.startswith("sae_") or name == "interventions"
        ]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


class StreamOptions(RequestBody):
    include_usage: bool | None = None


class Sampling(InterpFields):
    model: Annotated[str, Field(max_length=512)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=64)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    context: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=300)] | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] | None = None
    return_token_ids: bool | None = None
    return_prompt_text: bool | None = None
    return_progress: bool | None = None

    def options(self, most_choices: int) -> dict[str, Any]:
        """The keywords of `generate`; those that were not given are left to its defaults."""
        if self.n is not None and self.n > most_choices:
            raise bad(f"n is {self.n}, this server gives at most {most_choices} answers at a time.", "n")
        names = (
            "max_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "n",
            "seed",
            "stop",
            "stop_token_ids",
            "min_tokens",
            "ignore_eos",
            "context",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "logit_bias",
        )
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


class JsonSchemaFormat(StrictBody):
    name: Annotated[str, Field(max_length=64)] | None = None
    description: Annotated[str, Field(max_length=4096)] | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(StrictBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


def schema_format(schema: dict[str, Any]) -> ResponseFormat:
    return ResponseFormat.model_validate({"type": "json_schema", "json_schema": {"schema": schema}})


def notices(body: RequestBody, strict: bool) -> list[str]:
    """What to say about fields we do not know; those that would change the answer are refused."""
    unknown = body.unknown
    if len(unknown) > MOST_UNKNOWN:
        raise bad(
            f"the body has {len(unknown)} fields that nobody knows. Remove them.", code="fields-unknown"
        )
    said = []
    for name in unknown:
        shown = name[:64]
        if name in REFUSED and getattr(body, name) not in (None, {}, []):
            raise bad(f"{shown} is not served: {REFUSED[name]}. Leave it out.", shown, "field-refused")
        if name not in IGNORED and strict:
            raise bad(
                f"{shown!a} is no field of this call, and X-Strict asks for exactness. Remove it.",
                code="field-unknown",
            )
        if name not in QUIET and (name not in IGNORED or getattr(body, name) is not None):
            said.append(f"{shown!a} was ignored.")
    return said


def flattened(fields: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A literal `extra_body`, which clients are meant to spread themselves, spread here."""
    if "extra_body" not in fields:
        return fields, []
    extra = fields["extra_body"]
    if not isinstance(extra, dict):
        raise bad("extra_body: expected an object.", "extra_body")
    outer = {key: value for key, value in fields.items() if key != "extra_body"}
    for key in extra:
        if key in outer:
            raise bad(
                f"{key[:64]!a} stands both in the body and in extra_body. Give it once.",
                "extra_body",
                "json-key-twice",
            )
    return {**outer, **extra}, ["extra_body was spread: its fields belong to the top level."]
