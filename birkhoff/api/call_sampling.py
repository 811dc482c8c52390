"""The sampling parameters of one call, from `params` and keywords."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from birkhoff.engine.sampling_params import SamplingParams


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
