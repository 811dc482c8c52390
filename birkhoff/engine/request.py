"""What one caller wants, and how far it has come.

A `Request` is tokens in and tokens out; text, when there is any, passes through the `TextSink` its caller gave it.
`computed` counts the tokens whose state is in the cache: everything beyond it is still to be run, whether it is prompt,
a freshly sampled token, or tokens recomputed after the request had to give its memory back.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.hooks.plan import Plan
from birkhoff.hooks.results import RequestResults

FinishReason = Literal["stop", "length", "error", "cancelled"]
_numbers = itertools.count(1)


class TextSink(Protocol):
    """Turns token ids into text as they come and knows the stop strings."""

    def feed(self, token_id: int) -> tuple[str, bool]:
        """The text that is certain by now, and whether a stop string has been met."""
        ...

    def finish(self) -> str:
        """What was held back and turned out not to be a stop string."""
        ...


class TokenMask(Protocol):
    """Says what may come next, for answers that must have a form. Asked for every step of its request alone."""

    def allowed(self, output_ids: Sequence[int], vocab_size: int) -> torch.Tensor:
        """Booleans [vocab]: the tokens that may follow these; never none of them."""
        ...


@dataclass(frozen=True)
class TokenLogprob:
    """The chosen token's log-probability under the model's own distribution, and the most likely alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class TokenEvent:
    """One token of a stream. The last event carries the reason and any text held back until then."""

    token_id: int | None
    text: str
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    error: Exception | None = None


@dataclass
class Timings:
    """Seconds on the monotonic clock."""

    submitted: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    preemptions: int = 0


@dataclass(eq=False)
class Request:
    prompt_ids: tuple[int, ...]
    options: SamplingParams
    max_tokens: int
    seed: int
    eos_ids: frozenset[int] = frozenset()
    sink: TextSink | None = None
    plan: Plan | None = None
    mask: TokenMask | None = None
    context: str | None = None  # a name under which the pages of the prompt are kept
    id: str = field(default_factory=lambda: f"r{next(_numbers)}")

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    events: deque[TokenEvent] = field(default_factory=deque)
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    timings: Timings = field(default_factory=Timings)

    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    cached_tokens: int | None = None  # how many of the first tokens were known when it was admitted
    shared_pages: int = 0
    followed: int = 0  # how many of the first tokens MTP has read along, without a hole
    draft_tokens: tuple[int, ...] = ()  # tokens that may come next, to be verified with the next step
    drafted: int = 0
    accepted: int = 0
    settle: Callable[[int], None] | None = None  # hands out captured rows that had to wait

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def most_tokens(self) -> int:
        """How long the sequence in the cache can ever get; the last token sampled is never run."""
        return len(self.prompt_ids) + self.max_tokens - 1

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def results(self) -> RequestResults:
        """What the captures and signals of the request produced."""
        return RequestResults() if self.plan is None else self.plan.results

    def tokens(self, start: int, stop: int) -> list[int]:
        """Prompt and output as one sequence, from `start` to `stop`."""
        border = len(self.prompt_ids)
        return [
            *self.prompt_ids[start:stop],
            *self.output_ids[max(start - border, 0) : max(stop - border, 0)],
        ]

    def accept(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """Book one sampled token and tell whoever listens; may end the request."""
        if self.timings.first_token is None:
            self.timings.first_token = time.perf_counter()
        ends = token_id in self.eos_ids and not self.options.ignore_eos
        ends = ends or token_id in self.options.stop_token_ids
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

    def settle_rows(self) -> None:
        """The last token is the only one that is not computed: rows behind the one before it belong to nobody."""
        settle = self.settle
        self.settle = None
        if settle is not None:
            settle(self.num_tokens - 1)

    def finish(
        self,
        reason: FinishReason,
        last: TokenEvent | None = None,
        error: Exception | None = None,
        flush: bool = True,
    ) -> None:
        """End the request; what the sink held back is text after all, unless a stop string was met."""
        rest = self.sink.finish() if self.sink is not None and flush else ""
        last = last or TokenEvent(None, "")
        self.finish_reason = reason
        self.error = error
        self.timings.finished = time.perf_counter()
        self.settle_rows()
        if self.plan is not None:
            self.plan.close(reason, self.num_tokens)
        self.events.append(TokenEvent(last.token_id, last.text + rest, last.logprob, reason, error))
