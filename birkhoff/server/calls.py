"""A call in no dialect: what is to be run, and the requests that run it.

Routes read their own wire and make a `GenerationCall`; from here on OpenAI's and Anthropic's clients are the same. The choices
come first among its requests; with `baseline` their unsteered twins follow, drawn from the same seed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from birkhoff.engine.request import Request, TokenLogprob, TokenMask
from birkhoff.server.api_errors import ApiError, problem_of
from birkhoff.text.events import ParsedMessage
from birkhoff.text.markers import END_THINK
from birkhoff.text.output_stream import ChatStream

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine


@dataclass
class GenerationCall:
    prompt: list[int]
    sampling: dict[str, Any]
    thinking: bool | None = None  # None: plain text
    steer: Any = None
    capture: dict[str, Any] | None = None
    capture_wait: bool = False
    signals: Any = None
    baseline: bool = False
    mask: Callable[[], TokenMask] | None = None
    mark: str = ""
    warnings: list[str] = field(default_factory=list)

    def requests(self, engine: Engine) -> list[Request]:
        sampling = dict(self.sampling)
        if self.baseline and sampling.get("seed") is None:
            sampling["seed"] = secrets.randbits(63)  # both twins draw from it
        shared: dict[str, Any] = {
            "thinking": self.thinking,
            "mask": self.mask,
            "signals": self.signals or None,
        }
        made = engine.requests(
            self.prompt, steer=self.steer, capture=self.capture, mark=self.mark, **shared, **sampling
        )
        if self.baseline:
            made += engine.requests(self.prompt, **shared, **sampling)
        return made


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def now() -> int:
    return int(time.time())


def check_end(request: Request) -> None:
    """Raise what ended a request that did not end well."""
    if request.finish_reason == "error":
        steered = request.plan is not None and bool(request.plan.edits)
        raise problem_of(request.error or RuntimeError("the engine stopped"), steered)
    if request.finish_reason == "cancelled":
        raise ApiError(499, "this answer was cancelled.", code="cancelled")


def parsed(request: Request) -> ParsedMessage:
    """What an ended answer says."""
    if isinstance(request.sink, ChatStream):
        return request.sink.message()
    return ParsedMessage(content=request.sink.text if request.sink else "")  # type: ignore[attr-defined]


def stop_reason(request: Request) -> str | int | None:
    """The stop string, or the stop token, that ended the answer."""
    matched = getattr(request.sink, "matched", None)
    if matched is not None or request.finish_reason != "stop":
        return matched
    last = request.output_ids[-1]
    return last if last in request.options.stop_token_ids else None


def problems(request: Request) -> list[str]:
    """What is odd about an ended answer: where it left the chat format, and where the form asked for was lost."""
    found = [problem.message for problem in parsed(request).problems]
    lost = getattr(request.mask, "problem", "")
    return [*found, lost] if lost else found


def usage(requests: Sequence[Request], call: GenerationCall, engine: Engine) -> dict[str, Any]:
    """Tokens of a call: its prompt once, all its answers."""
    prompt = len(requests[0].prompt_ids)
    completion = sum(len(request.output_ids) for request in requests)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached(requests[0])},
        "completion_tokens_details": {
            "reasoning_tokens": sum(reasoning_tokens(each, call, engine) for each in requests)
        },
    }


def cached(request: Request) -> int:
    return request.cached_tokens or 0


def reasoning_tokens(request: Request, call: GenerationCall, engine: Engine) -> int:
    if not call.thinking:
        return 0
    end = engine.tokenizer.markers.get(END_THINK)
    ids = request.output_ids
    return ids.index(end) + 1 if end in ids else len(ids)


def token_logprob(found: TokenLogprob, engine: Engine) -> dict[str, Any]:
    """One entry of `logprobs.content`."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        piece = engine.tokenizer.piece(token_id)
        # JSON has no minus infinity; a token that cannot be drawn is as unlikely as a double can say.
        return {
            "token": piece.decode("utf-8", "replace"),
            "logprob": max(logprob, -9999.0),
            "bytes": list(piece),
        }

    top = [entry(token, logprob) for token, logprob in found.top]
    return {**entry(found.token_id, found.logprob), "top_logprobs": top}


def is_end(token_id: int | None, request: Request) -> bool:
    """Whether a token is the end marker, which is no part of what was said."""
    return token_id in request.eos_ids
