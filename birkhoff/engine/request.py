"""One request: its prompt and parameters, the tokens generated so far, and its state in the scheduler.

A `Request` maps token ids to token ids; text, if any, is produced by its `TextSink`. `num_computed_tokens` counts the
tokens whose state is in the cache. Everything after them still has to be run: the rest of the prompt, a freshly
sampled token, or tokens that are recomputed after a preemption.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.hooks.plan import Plan
from birkhoff.hooks.results import RequestResults

FinishReason = Literal["stop", "length", "error", "cancelled"]
_request_ids = itertools.count(1)


class TextSink(Protocol):
    """Incremental detokenizer that also matches stop strings."""

    def feed(self, token_id: int) -> tuple[str, bool]:
        """Return the text that is final by now, and whether a stop string was matched."""
        ...

    def finish(self) -> str:
        """Return the text that was held back and turned out not to be a stop string."""
        ...


class TokenMask(Protocol):
    """Constrains the tokens of one request, for structured output. Called once per sampled token."""

    def allowed(self, output_ids: Sequence[int], vocab_size: int) -> torch.Tensor:
        """Booleans [vocab]: the tokens that may follow `output_ids`; at least one is True."""
        ...


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of the chosen token under the model's own distribution, and the most likely alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class TokenEvent:
    """One generated token. The last event has the finish reason and any text held back until then."""

    token_id: int | None
    text: str
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    error: Exception | None = None


@dataclass
class Timings:
    """Times in seconds of the monotonic clock."""

    submitted: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    preemptions: int = 0


@dataclass(eq=False)
class Request:
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    seed: int
    eos_ids: frozenset[int] = frozenset()
    sink: TextSink | None = None
    plan: Plan | None = None
    mask: TokenMask | None = None
    context: str | None = None  # name under which the prompt's pages are kept
    id: str = field(default_factory=lambda: f"r{next(_request_ids)}")

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    events: deque[TokenEvent] = field(default_factory=deque)
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    timings: Timings = field(default_factory=Timings)

    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    cached_tokens: int | None = None  # tokens found in the prefix cache at the first admission
    shared_pages: int = 0
    num_mtp_tokens: int = 0  # leading tokens that the MTP block has processed, without a gap
    draft_tokens: tuple[int, ...] = ()  # to be verified by the next step
    drafted: int = 0
    accepted: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def prompt_only(self) -> bool:
        """Whether the request ends with its prompt: `max_tokens` is 0 and no token is sampled."""
        return self.max_tokens == 0

    @property
    def max_cached_tokens(self) -> int:
        """Maximum number of tokens in the cache; the last sampled token is never run."""
        return len(self.prompt_ids) + max(self.max_tokens - 1, 0)

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def running_slot(self) -> int:
        """The slot of a request that has one."""
        assert self.slot is not None
        return self.slot

    @property
    def results(self) -> RequestResults:
        """What the captures and signals of the request produced."""
        return RequestResults() if self.plan is None else self.plan.results

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens `start..stop` of the prompt and the output as one sequence."""
        prompt_len = len(self.prompt_ids)
        return [
            *self.prompt_ids[start:stop],
            *self.output_ids[max(start - prompt_len, 0) : max(stop - prompt_len, 0)],
        ]

    def append_token(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """Append a sampled token and its event; finishes the request when it meets a stop condition."""
        if self.timings.first_token is None:
            self.timings.first_token = time.perf_counter()
        ends = token_id in self.eos_ids and not self.params.ignore_eos
        ends = ends or token_id in self.params.stop_token_ids
        self.output_ids.append(token_id)
        if logprob is not None:
            self.logprobs.append(logprob)
        text, stopped = ("", False) if self.sink is None or ends else self.sink.feed(token_id)
        reason: FinishReason | None = None
        if ends or stopped:
            reason = "stop"
        elif len(self.output_ids) >= self.max_tokens:
            reason = "length"
        if reason is None:
            self.events.append(TokenEvent(token_id, text, logprob))
        else:
            self.finish(reason, TokenEvent(token_id, text, logprob), flush=not stopped)

    def flush_rows(self) -> None:
        """Deliver captured rows that were waiting for a copy or for verification.

        All tokens but the last are computed; rows after that position belong to rejected draft tokens."""
        if self.plan is not None:
            self.plan.settle(self.num_tokens - 1)

    def finish(
        self,
        reason: FinishReason,
        last: TokenEvent | None = None,
        error: Exception | None = None,
        flush: bool = True,
    ) -> None:
        """End the request. With `flush` the text held back by the sink is part of the last event."""
        rest = self.sink.finish() if self.sink is not None and flush else ""
        last = last or TokenEvent(None, "")
        self.finish_reason = reason
        self.error = error
        self.timings.finished = time.perf_counter()
        if self.plan is not None:
            self.plan.finish(reason, self.num_tokens)
        self.events.append(TokenEvent(last.token_id, last.text + rest, last.logprob, reason, error))
