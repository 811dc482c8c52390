"""Who runs in the next step: decoding first, then prefill in shares, then newcomers.

Every request that only waits for its next token gets it in every step. What is left of the token budget is shared
equally among requests with a prompt to read, so that a long prompt cannot starve a short one. A newcomer is admitted
when a slot, the pages of all its known tokens and what its plan reserves are free. When pages run out, the request
admitted last gives its memory back and is recomputed later; the oldest is never disturbed by a younger one, so every
request ends.

With a prefix cache a newcomer starts behind the beginning that it shares with past requests; it takes only the pages
that it does not share.

With `invariant` a request's pieces depend on nothing but itself: fixed chunk borders for its prompt, and outputs one at
a time even when they are recomputed. Pieces cannot be shared out then, so requests with a prompt to read take turns.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from birkhoff.config import PAGE_TOKENS
from birkhoff.engine.id_pool import IdPool
from birkhoff.engine.memory_plan import pages_for
from birkhoff.engine.prefix import PrefixCache
from birkhoff.engine.request import Request


@dataclass(frozen=True)
class ScheduledChunk:
    """Tokens `start..stop` of one request; `samples` when the last of them has no successor yet. Then `draft_tokens` may
    follow, which are computed along and stay if they turn out right."""

    request: Request
    start: int
    stop: int
    draft_tokens: tuple[int, ...] = ()

    @property
    def tokens(self) -> list[int]:
        return [*self.request.tokens(self.start, self.stop), *self.draft_tokens]

    @property
    def samples_only(self) -> bool:
        """Nothing but the next token of a request that has begun to answer."""
        return self.stop - self.start == 1 and self.start >= len(self.request.prompt_ids)

    @property
    def samples(self) -> bool:
        return self.stop == self.request.num_tokens


class Scheduler:
    def __init__(self, slots: int, pages: int, max_batch_tokens: int, invariant: bool = False):
        self.slots = IdPool(slots)
        self.pages = IdPool(pages)
        self.prefix: PrefixCache | None = None
        self.max_batch_tokens = max_batch_tokens
        self.invariant = invariant
        # With requests decoding, a step reads at most this much prompt, so that their next token is not held up.
        self.mixed_prefill = max(1, max_batch_tokens // 4)
        beside = max(1, max_batch_tokens - slots + 1)  # what is left when everybody else decodes
        most = min(self.mixed_prefill, beside, PAGE_TOKENS)
        self.fixed_chunk = 1 << (most.bit_length() - 1)  # a page, or a part of one that ends where it ends
        # by slot: the step that last read of its prompt or admitted it
        self._steps = 0
        self._read_at = [0] * slots
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def next(self) -> list[ScheduledChunk]:
        """The work of one step; empty only when there is none at all."""
        self._steps += 1
        work, budget = self._decoding()
        if work:
            budget = min(budget, self.mixed_prefill)
        self._admit(budget)
        work += self._prefilling(budget)
        return work

    def release(self, request: Request) -> None:
        """Take everything back from a request that has ended, wherever it stands."""
        if request.slot is not None:
            self.running.remove(request)
            if self.prefix is not None and request.finish_reason in ("stop", "length"):
                self.prefix.leave(request)
            self._take_memory(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def recompute(self, requests: Iterable[Request]) -> None:
        """Start over with these, in their order: what the caches hold of them cannot be trusted."""
        doubtful = set(requests)
        for request in [r for r in reversed(self.running) if r in doubtful]:
            if request.done:
                self.release(request)
            else:
                self._preempt(request)

    def _decoding(self) -> tuple[list[ScheduledChunk], int]:
        ready = [
            r for r in self.running if r.num_tokens - r.computed == 1 and r.computed >= len(r.prompt_ids)
        ]
        for request in ready:
            if request.slot is not None:  # may have been preempted for an older one
                self._grow(request, request.num_tokens)
        ready = [r for r in ready if r.slot is not None]
        spare = self.max_batch_tokens - len(ready)
        work = []
        for request in ready:
            draft_tokens = (
                request.draft_tokens
                if len(request.draft_tokens) <= spare and self._room_for_guesses(request)
                else ()
            )
            request.draft_tokens, spare = (), spare - len(draft_tokens)
            work.append(ScheduledChunk(request, request.computed, request.num_tokens, draft_tokens))
        return work, spare

    def _room_for_guesses(self, request: Request) -> bool:
        """Pages for what may not stay are taken when they are free and from nobody."""
        missing = pages_for(request.num_tokens + len(request.draft_tokens)) - len(request.pages)
        more = self.pages.allocate(missing) if missing > 0 else []
        if more:
            request.pages += more
        return more is not None

    def _prefilling(self, budget: int) -> list[ScheduledChunk]:
        reading = [r for r in self.running if r.num_tokens - r.computed > 1 or r.computed < len(r.prompt_ids)]
        if self.invariant:
            reading.sort(key=lambda r: self._read_at[_slot(r)])
        work = []
        for place, request in enumerate(reading):
            share = -(-budget // (len(reading) - place))  # rounded up, so that the oldest gets something
            count = self._piece(request, budget if self.invariant else share)
            if count > 0:
                work.append(ScheduledChunk(request, request.computed, request.computed + count))
                self._read_at[_slot(request)] = self._steps
                budget -= count
        return work

    def _piece(self, request: Request, share: int) -> int:
        left = request.num_tokens - request.computed
        if not self.invariant:
            return min(left, share)
        if request.computed >= len(request.prompt_ids):
            piece = 1
        else:
            border = (request.computed // self.fixed_chunk + 1) * self.fixed_chunk
            piece = min(border, len(request.prompt_ids)) - request.computed
        return piece if piece <= share else 0

    def _admit(self, budget: int) -> None:
        while self.waiting and self.slots.num_free and budget > 0:
            request = self.waiting[0]
            hit = self.prefix.match(request) if self.prefix is not None else None
            shared, copied = (hit.pages, [*hit.copied]) if hit is not None else ([], [])
            self.pages.share(shared + copied)  # before others are taken, which may cost kept ones their place
            own = self.pages.allocate(pages_for(request.num_tokens) - len(shared))
            if own is None:
                self.pages.release(shared + copied)
                return
            if request.plan is not None and not request.plan.reserve():  # rows of steering tables, say
                self.pages.release(shared + copied + own)
                return
            taken = self.slots.allocate(1)
            assert taken is not None
            self.waiting.popleft()
            request.slot = taken[0]
            request.pages = shared + own
            request.computed = 0
            if self.prefix is not None and hit is not None:
                self.prefix.start(request, hit)
            elif request.cached_tokens is None:
                request.cached_tokens = 0
            request.followed = request.computed
            if request.timings.admitted is None:
                request.timings.admitted = time.perf_counter()
            self.running.append(request)
            self._read_at[taken[0]] = self._steps
            budget -= request.num_tokens - request.computed

    def _grow(self, request: Request, tokens: int) -> None:
        """Pages for `tokens` tokens, taken from the youngest when none are free, which may be the request itself."""
        while len(request.pages) < pages_for(tokens):
            more = self.pages.allocate(1)
            if more is not None:
                request.pages += more
                continue
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is request:
                return

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._take_memory(request)
        if self.prefix is not None:
            self.prefix.restart(request)
        request.settle_rows()
        request.computed = 0
        request.draft_tokens = ()
        request.timings.preemptions += 1
        self.waiting.appendleft(request)

    def _take_memory(self, request: Request) -> None:
        self.slots.release([_slot(request)])
        self.pages.release(request.pages)
        request.slot = None
        request.pages = []
        if request.plan is not None:
            request.plan.release()


def _slot(request: Request) -> int:
    assert request.slot is not None
    return request.slot
