"""Whether guessing pays, measured: tokens per second of steps that verify guesses beside steps that do not.

A step that verifies guesses costs more than a plain one and brings more tokens when guesses are right. How much of
each depends on the machine, the model, the text and how many requests decode together, so nothing is assumed: for
every size of batch (1, 2, up to 4, up to 8, ...) a few guessing and a few plain steps take turns, so that whatever
else the machine does meets both alike, and then the better of the two goes on; at once when they are far apart and
many requests had their say. Numbers are only compared with others of the same time: guessing that seems to pay no more
is tried again beside plain steps. What was switched off is tried again with a later prompt, when many steps have
passed, and twice as many each time it fails: a trial needs the MTP block to have read every request's prompt from its
start, which costs time too.

Only speed is decided here. Which tokens come out does not depend on it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

TRIAL = 24  # steps of each kind before they are compared
TURN = 6  # steps of one kind before the other has its turn
SURE = 1.25  # times apart after a turn of each, with TRIAL rows of requests in it: nothing more to learn
SETTLE = 1  # steps after a change that do not count: caches warm up
PATIENCE = 400  # plain steps before guessing is tried again, the first time
LONGEST = 16  # times as many, at most, when it failed again and again
RECHECK = 100  # guessing steps before it may be put to the test again
MARGIN = 1.03  # times faster it must be to be worth its while

Mode = Literal["trying", "guessing", "plain"]


@dataclass
class Rate:
    """Tokens and seconds of the last steps of one kind."""

    steps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=2 * TRIAL))

    def note(self, tokens: int, seconds: float) -> None:
        self.steps.append((tokens, seconds))

    @property
    def tokens_per_second(self) -> float | None:
        """By the median second per step, so that one step that the machine held up does not decide."""
        if not self.steps:
            return None
        seconds = sorted(second for _, second in self.steps)
        return (
            sum(tokens for tokens, _ in self.steps) / len(self.steps) / max(seconds[len(seconds) // 2], 1e-9)
        )


class SpeculationController:
    """One decision per size of batch."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}

    def follows(self, requests: int, reads_prompt: bool) -> bool:
        """Whether MTP should read along with so many requests; a new prompt is the time to try again what was switched
        off."""
        size = self._size(requests)
        if reads_prompt:
            size.reconsider()
        return size.mode != "plain"

    def draft_tokens(self, requests: int) -> bool:
        """Whether that many requests should guess now."""
        return self._size(requests).draft_tokens

    def trying(self, requests: int) -> bool:
        """Whether it is still open what pays for that many requests."""
        return self._size(requests).mode == "trying"

    def note(self, requests: int, verified: bool, guessed: bool, tokens: int, seconds: float) -> None:
        """One step of nothing but decoding; `guessed` when it also made guesses for the next."""
        if verified == guessed:  # steps that only begin or only end guessing are neither kind
            self._size(requests).note(verified, tokens / requests, seconds)

    def report(self) -> dict[str, dict[str, float | str | None]]:
        """By the largest batch of each size: what goes on and how fast each kind of step was."""
        return {
            str(2**key): {
                "mode": size.mode,
                "guessing_tokens_per_second": size.rates[True].tokens_per_second,
                "plain_tokens_per_second": size.rates[False].tokens_per_second,
            }
            for key, size in sorted(self._sizes.items())
        }

    def _size(self, requests: int) -> _Size:
        key = (requests - 1).bit_length()
        return self._sizes.setdefault(key, _Size(2**key))


class _Size:
    """The decision for batches of about one size. Tokens are counted per request."""

    def __init__(self, requests: int) -> None:
        self.rates = {True: Rate(), False: Rate()}
        self._soonest = max(
            TURN, -(-TRIAL // requests)
        )  # steps of each kind before a large difference decides
        self.mode: Mode = "trying"
        self._guesses_turn = True
        self._in_mode = 0
        self._in_turn = 0
        self._failed = 0  # trials one after the other

    @property
    def draft_tokens(self) -> bool:
        return self._guesses_turn if self.mode == "trying" else self.mode == "guessing"

    def note(self, verified: bool, tokens: float, seconds: float) -> None:
        if verified != self.draft_tokens:
            return
        self._in_mode = self._in_mode + 1
        self._in_turn = self._in_turn + 1
        if self._in_turn > SETTLE:
            self.rates[verified].note(tokens, seconds)  # type: ignore[arg-type]
        if self.mode == "trying":
            if self._decided():
                pays = self._pays()
                self._failed = 0 if pays else self._failed + 1
                self._enter("guessing" if pays else "plain")
            elif self._in_turn == SETTLE + TURN:
                self._guesses_turn = not self._guesses_turn
                self._in_turn = 0
        elif self.mode == "guessing" and self._in_mode >= RECHECK and not self._pays():
            self._enter("trying")

    def reconsider(self) -> None:
        if self.mode == "plain" and self._in_mode >= PATIENCE * min(2 ** (self._failed - 1), LONGEST):
            self._enter("trying")

    def _decided(self) -> bool:
        seen = min(len(rate.steps) for rate in self.rates.values())
        if not self._soonest <= seen < TRIAL:
            return seen >= TRIAL
        fast, slow = sorted(rate.tokens_per_second or 0.0 for rate in self.rates.values())[::-1]
        return fast > SURE * slow

    def _pays(self) -> bool:
        guessing = self.rates[True].tokens_per_second
        plain = self.rates[False].tokens_per_second
        assert guessing is not None and plain is not None
        return guessing > MARGIN * plain

    def _enter(self, mode: Mode) -> None:
        if mode == "trying":
            for rate in self.rates.values():
                rate.steps.clear()
        self.mode = mode
        self._guesses_turn = True
        self._in_mode = self._in_turn = 0
