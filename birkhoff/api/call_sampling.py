"""The keywords of one call of `generate` or `chat`: its sampling parameters, and the types of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from birkhoff.api.prompts import Captures
from birkhoff.engine.sampling_params import AnswerKwargs, SamplingParams
from birkhoff.steering.resolver import Steering
from birkhoff.text.chat_format import Tools


@dataclass(frozen=True)
class CallSampling:
    """Sampling parameters of one call. A default `max_tokens` is lowered to what the context leaves; a given one that
    does not fit is an error."""

    params: SamplingParams
    max_tokens_given: bool

    @classmethod
    def of(cls, params: SamplingParams | None, keywords: Mapping[str, Any]) -> CallSampling:
        merged = SamplingParams.from_kwargs(params, **keywords)
        given = keywords.get("max_tokens") is not None or merged.max_tokens != SamplingParams.max_tokens
        return cls(merged, given)


class GenerateKwargs(AnswerKwargs, total=False):
    """The keywords of `Engine.generate` besides `n`, for its types."""

    context: str | None
    params: SamplingParams | None
    capture: Captures
    steer: Steering
    signals: Any
    baseline: bool


class ChatKwargs(GenerateKwargs, total=False):
    """The keywords of `Engine.chat` besides `n`, for its types."""

    thinking: bool
    effort: str | None
    tools: Tools
