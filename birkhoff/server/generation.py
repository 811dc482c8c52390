"""A generation call, independent of the HTTP API it came through, and the fields that responses share.

Each route translates its own wire format into a `GenerationCall`; from there on OpenAI's and Anthropic's clients are
handled alike. The requests of a call are its choices, followed with `baseline` by their unsteered twins, which use the
same seed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from birkhoff.engine.request import Request, TokenLogprob, TokenMask
from birkhoff.server.api_errors import ApiError, to_api_error
from birkhoff.text.events import ParsedMessage
from birkhoff.text.output_stream import ChatStream

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine

MIN_LOGPROB = -9999.0  # JSON has no minus infinity


@dataclass
class GenerationCall:
    prompt: list[int]
    sampling: dict[str, Any]
    thinking: bool | None = None  # None: plain text, not a chat
    tools: list[dict[str, Any]] | None = None  # those shown to the model
    steer: Any = None
    capture: dict[str, Any] | None = None
    capture_wait: bool = False
    signals: Any = None
    baseline: bool = False
    mask: Callable[[], TokenMask] | None = None
    forced_call: bool = False  # the mask is the grammar of tool calls
    prompt_logprobs: bool = (
        False  # the response has those of the prompt, which take a forward pass of their own
    )
    prompt_only: bool = False  # no token is sampled
    warnings: list[str] = field(default_factory=list)

    def requests(self, engine: Engine) -> list[Request]:
        """Build the engine requests: the choices, then their unsteered twins if `baseline` is set."""
        sampling = dict(self.sampling)
        if self.baseline and sampling.get("seed") is None:
            sampling["seed"] = secrets.randbits(63)  # shared by the choices and their twins
        shared: dict[str, Any] = {
            "thinking": self.thinking,
            "tools": self.tools,
            "mask": self.mask,
            "forced_call": self.forced_call,
            "signals": self.signals or None,
            "prompt_only": self.prompt_only,
        }
        requests = engine.requests(self.prompt, steer=self.steer, capture=self.capture, **shared, **sampling)
        if self.baseline:
            requests += engine.requests(self.prompt, **shared, **sampling)
        return requests


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def now() -> int:
    return int(time.time())


def raise_on_failure(request: Request) -> None:
    """Raise the error of a request that failed or was cancelled."""
    if request.finish_reason == "error":
        steered = request.plan is not None and bool(request.plan.edits)
        raise to_api_error(request.error or RuntimeError("the engine stopped"), steered)
    if request.finish_reason == "cancelled":
        raise ApiError(499, "this answer was cancelled.", code="cancelled")


def parsed_message(request: Request) -> ParsedMessage:
    """The message of a finished request: reasoning, content and tool calls, or content only for plain text."""
    if isinstance(request.sink, ChatStream):
        return request.sink.message()
    return ParsedMessage(content=request.sink.text if request.sink else "")  # type: ignore[attr-defined]


def stop_reason(request: Request) -> str | int | None:
    """The stop string or stop token id that ended the output, or None."""
    matched: str | None = getattr(request.sink, "matched", None)
    if matched is not None or request.finish_reason != "stop":
        return matched
    last = request.output_ids[-1]
    return last if last in request.params.stop_token_ids else None


def generation_warnings(request: Request) -> list[str]:
    """Deviations of a finished output from the chat format, and why its grammar could not be followed."""
    warnings = [problem.message for problem in parsed_message(request).problems]
    grammar_problem: str = getattr(request.mask, "problem", "")
    return [*warnings, grammar_problem] if grammar_problem else warnings


def call_warnings(generation: GenerationCall, requests: Sequence[Request]) -> list[str]:
    """Warnings about the fields of a call and about its finished requests."""
    return [
        *generation.warnings,
        *(warning for request in requests for warning in generation_warnings(request)),
    ]


def usage(requests: Sequence[Request], choices: int = 1) -> dict[str, Any]:
    """OpenAI's `usage` object of one or several prompts with `choices` requests each: tokens of a prompt are counted
    once, completion tokens over all choices."""
    first_choices = requests[::choices]
    prompt = sum(len(request.prompt_ids) for request in first_choices)
    completion = sum(len(request.output_ids) for request in requests)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(request.cached_tokens or 0 for request in first_choices)
        },
        "completion_tokens_details": {
            "reasoning_tokens": sum(getattr(request.sink, "reasoning_tokens", 0) for request in requests)
        },
    }


def token_logprob(entry: TokenLogprob, engine: Engine) -> dict[str, Any]:
    """One entry of `logprobs.content`."""

    def token_json(token_id: int, logprob: float) -> dict[str, Any]:
        piece = engine.tokenizer.piece(token_id)
        return {
            "token": piece.decode("utf-8", "replace"),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": list(piece),
        }

    top = [token_json(token, logprob) for token, logprob in entry.top]
    return {**token_json(entry.token_id, entry.logprob), "top_logprobs": top}


def in_reasoning(request: Request, index: int) -> bool:
    """Whether a generated token belongs to the reasoning of a chat, its end marker included."""
    flags: Sequence[bool] = getattr(request.sink, "reasoning_flags", ())
    return index < len(flags) and flags[index]


def is_eos(token_id: int | None, request: Request) -> bool:
    """Whether a token is the end-of-sequence marker, which is not part of the output text."""
    return token_id in request.eos_ids
