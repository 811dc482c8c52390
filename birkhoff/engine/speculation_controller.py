"""Turns speculation on and off by measured speed: tokens per second of drafting steps against plain steps.

A step that verifies draft tokens takes longer than a plain one and yields more tokens when drafts are accepted. Both
depend on the machine, the model, the text and the batch size, so they are measured: for every batch size bucket (1, 2,
up to 4, up to 8, ...) a few drafting and a few plain steps alternate, so that other load on the machine affects both
alike. Then the faster kind is used; the trial ends early when the two are far apart and enough rows were measured.
Drafting that no longer seems faster is put to a new trial, because old measurements are not comparable. Drafting that
was switched off is tried again with a later prompt, after a number of steps that doubles with each failed trial: a
trial requires MTP prefill of every request, which costs time as well.

Only speed is decided here. The sampled tokens do not depend on it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

TRIAL = 24  # steps of each kind before they are compared
TURN = 6  # steps of one kind before the other kind is measured
SURE = 1.25  # speed ratio that ends a trial early, once TRIAL rows of each kind were measured
SETTLE = 1  # steps after a change that are not measured, while caches warm up
PATIENCE = 400  # plain steps before drafting is tried again, the first time
LONGEST = 16  # upper bound of the factor on PATIENCE after repeated failures
RECHECK = 100  # drafting steps before a new trial
MARGIN = 1.03  # speed ratio from which drafting is worth it

Mode = Literal["trying", "guessing", "plain"]


@dataclass
class Rate:
    """Tokens and seconds of the last steps of one kind."""

    steps: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=2 * TRIAL))

    def record(self, tokens: float, seconds: float) -> None:
        self.steps.append((tokens, seconds))

    @property
    def tokens_per_second(self) -> float | None:
        """Mean tokens over the median duration, so that one delayed step does not decide."""
        if not self.steps:
            return None
        seconds = sorted(second for _, second in self.steps)
        mean_tokens = sum(tokens for tokens, _ in self.steps) / len(self.steps)
        return mean_tokens / max(seconds[len(seconds) // 2], 1e-9)


class SpeculationController:
    """One decision per batch size bucket."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}

    def runs_prefill(self, requests: int, has_prompt: bool) -> bool:
        """Whether to run MTP prefill at this batch size. A new prompt may start a new trial."""
        bucket = self._bucket(requests)
        if has_prompt:
            bucket.reconsider()
        return bucket.mode != "plain"

    def should_draft(self, requests: int) -> bool:
        """Whether to draft after this step."""
        return self._bucket(requests).drafts

    def in_trial(self, requests: int) -> bool:
        """Whether this batch size is being measured."""
        return self._bucket(requests).mode == "trying"

    def record(self, requests: int, verified: bool, drafted: bool, tokens: int, seconds: float) -> None:
        """Record a decode step: whether it verified draft tokens, and whether it drafted for the next step."""
        if verified == drafted:  # the first and the last step of a run of drafting are of neither kind
            self._bucket(requests).record(verified, tokens / requests, seconds)

    def report(self) -> dict[str, dict[str, float | str | None]]:
        """Mode and speeds by the largest batch of each bucket."""
        return {
            str(2**key): {
                "mode": bucket.mode,
                "guessing_tokens_per_second": bucket.rates[True].tokens_per_second,
                "plain_tokens_per_second": bucket.rates[False].tokens_per_second,
            }
            for key, bucket in sorted(self._buckets.items())
        }

    def _bucket(self, requests: int) -> _Bucket:
        key = (requests - 1).bit_length()
        return self._buckets.setdefault(key, _Bucket(2**key))


class _Bucket:
    """The decision for one batch size bucket. Tokens are counted per request."""

    def __init__(self, requests: int) -> None:
        self.rates = {True: Rate(), False: Rate()}
        self._min_steps = max(TURN, -(-TRIAL // requests))  # of each kind, before a large difference decides
        self.mode: Mode = "trying"
        self._drafting_turn = True
        self._steps_in_mode = 0
        self._steps_in_turn = 0
        self._failed_trials = 0  # in a row

    @property
    def drafts(self) -> bool:
        return self._drafting_turn if self.mode == "trying" else self.mode == "guessing"

    def record(self, verified: bool, tokens: float, seconds: float) -> None:
        if verified != self.drafts:
            return
        self._steps_in_mode += 1
        self._steps_in_turn += 1
        if self._steps_in_turn > SETTLE:
            self.rates[verified].record(tokens, seconds)
        if self.mode == "trying":
            if self._decided():
                faster = self._drafting_is_faster()
                self._failed_trials = 0 if faster else self._failed_trials + 1
                self._enter("guessing" if faster else "plain")
            elif self._steps_in_turn == SETTLE + TURN:
                self._drafting_turn = not self._drafting_turn
                self._steps_in_turn = 0
        elif self.mode == "guessing" and self._steps_in_mode >= RECHECK and not self._drafting_is_faster():
            self._enter("trying")

    def reconsider(self) -> None:
        """Start a new trial when drafting was off for long enough."""
        patience = PATIENCE * min(2 ** (self._failed_trials - 1), LONGEST)
        if self.mode == "plain" and self._steps_in_mode >= patience:
            self._enter("trying")

    def _decided(self) -> bool:
        measured = min(len(rate.steps) for rate in self.rates.values())
        if not self._min_steps <= measured < TRIAL:
            return measured >= TRIAL
        fast, slow = sorted(rate.tokens_per_second or 0.0 for rate in self.rates.values())[::-1]
        return fast > SURE * slow

    def _drafting_is_faster(self) -> bool:
        drafting = self.rates[True].tokens_per_second
        plain = self.rates[False].tokens_per_second
        assert drafting is not None and plain is not None
        return drafting > MARGIN * plain

    def _enter(self, mode: Mode) -> None:
        if mode == "trying":
            for rate in self.rates.values():
                rate.steps.clear()
        self.mode = mode
        self._drafting_turn = True
        self._steps_in_mode = self._steps_in_turn = 0
