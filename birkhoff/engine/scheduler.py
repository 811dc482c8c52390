"""Decides what the next step computes: decoding first, then prefill chunks, then new requests.

Every request that decodes gets its next token in every step. The rest of the token budget is divided equally among
requests in prefill, so that a long prompt does not starve a short one. A waiting request is admitted when a slot, pages
for all its known tokens and the reservations of its plan are free. When pages run out, the request admitted last is
preempted and recomputed later; an older request is never preempted for a younger one, so every request finishes.

With a prefix cache, a request starts after the prefix that it shares with past requests and allocates only the pages
that it does not share.

With `batch_invariant`, the chunks of a request depend on the request alone: fixed chunk boundaries in the prompt, and
one output token at a time even when recomputing. Such chunks cannot be shrunk, so requests in prefill take turns.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from birkhoff.config import PAGE_TOKENS
from birkhoff.engine.id_pool import IdPool
from birkhoff.engine.prefix import PrefixCache
from birkhoff.engine.request import Request
from birkhoff.model.cache_size import pages_for


@dataclass(frozen=True)
class ScheduledChunk:
    """Tokens `start..stop` of one request, followed by `draft_tokens` to verify."""

    request: Request
    start: int
    stop: int
    draft_tokens: tuple[int, ...] = ()

    @property
    def tokens(self) -> list[int]:
        return [*self.request.tokens(self.start, self.stop), *self.draft_tokens]

    @property
    def is_decode(self) -> bool:
        """Whether the chunk is one output token, not part of the prompt."""
        return self.stop - self.start == 1 and self.start >= len(self.request.prompt_ids)

    @property
    def samples(self) -> bool:
        """Whether the last token has no successor yet, so that one is sampled."""
        return self.stop == self.request.num_tokens and not self.request.prompt_only


class Scheduler:
    def __init__(
        self,
        slots: int,
        pages: int,
        max_batch_tokens: int,
        batch_invariant: bool = False,
        mixed_share: float = 0.25,
    ):
        self.slots = IdPool(slots)
        self.pages = IdPool(pages)
        self.prefix: PrefixCache | None = None
        self.max_batch_tokens = max_batch_tokens
        self.batch_invariant = batch_invariant
        # Prefill tokens in a step that also decodes: bounds the delay of the next token.
        self.mixed_prefill = max(1, int(max_batch_tokens * mixed_share))
        left = max(1, max_batch_tokens - slots + 1)  # when all other requests decode
        limit = min(self.mixed_prefill, left, PAGE_TOKENS)
        self.fixed_chunk = 1 << (limit.bit_length() - 1)  # divides a page
        self._num_steps = 0
        self._last_prefill = [0] * slots  # by slot: the step of the last prefill chunk or of the admission
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> list[ScheduledChunk]:
        """The chunks of the next step; empty only when there are no requests."""
        self._num_steps += 1
        chunks, budget = self._schedule_decode()
        if chunks:
            budget = min(budget, self.mixed_prefill)
        self._admit(budget)
        return chunks + self._schedule_prefill(budget)

    def release(self, request: Request) -> None:
        """Free the memory of a finished request, or remove it from the queue."""
        if request.slot is not None:
            self.running.remove(request)
            if self.prefix is not None and request.finish_reason in ("stop", "length"):
                self.prefix.insert_partial_page(request)
            self._free_memory(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def recompute(self, requests: Iterable[Request]) -> None:
        """Discard the cached state of these requests, which a failed step may have left inconsistent, and requeue
        them in their order."""
        affected = set(requests)
        for request in [r for r in reversed(self.running) if r in affected]:
            if request.done:
                self.release(request)
            else:
                self._preempt(request)

    def _schedule_decode(self) -> tuple[list[ScheduledChunk], int]:
        """One chunk per decoding request, and the token budget that is left."""
        ready = [
            r
            for r in self.running
            if r.num_tokens - r.num_computed_tokens == 1 and r.num_computed_tokens >= len(r.prompt_ids)
        ]
        for request in ready:
            if request.slot is not None:  # not preempted for an older one meanwhile
                self._allocate_pages(request, request.num_tokens)
        ready = [r for r in ready if r.slot is not None]
        budget = self.max_batch_tokens - len(ready)
        chunks = []
        for request in ready:
            draft_tokens = request.draft_tokens
            if len(draft_tokens) > budget or not self.allocate_without_preemption(
                request, request.num_tokens + len(draft_tokens)
            ):
                draft_tokens = ()
            request.draft_tokens = ()
            budget -= len(draft_tokens)
            chunks.append(
                ScheduledChunk(request, request.num_computed_tokens, request.num_tokens, draft_tokens)
            )
        return chunks, budget

    def allocate_without_preemption(self, request: Request, tokens: int) -> bool:
        """Allocate the pages of the first `tokens` tokens if they are free; returns whether the request has them."""
        missing = pages_for(tokens) - len(request.pages)
        pages = self.pages.allocate(missing) if missing > 0 else []
        if pages:
            request.pages += pages
        return pages is not None

    def _schedule_prefill(self, budget: int) -> list[ScheduledChunk]:
        prefilling = [
            r
            for r in self.running
            if r.num_tokens - r.num_computed_tokens > 1 or r.num_computed_tokens < len(r.prompt_ids)
        ]
        if self.batch_invariant:
            prefilling.sort(key=lambda r: self._last_prefill[r.running_slot])
        chunks = []
        for index, request in enumerate(prefilling):
            # Rounded up, so that the oldest gets at least one.
            share = -(-budget // (len(prefilling) - index))
            count = self._chunk_tokens(request, budget if self.batch_invariant else share)
            if count > 0:
                start = request.num_computed_tokens
                chunks.append(ScheduledChunk(request, start, start + count))
                self._last_prefill[request.running_slot] = self._num_steps
                budget -= count
        return chunks

    def _chunk_tokens(self, request: Request, limit: int) -> int:
        """Tokens of the next prefill chunk, at most `limit`; 0 when a fixed chunk does not fit."""
        start = request.num_computed_tokens
        if not self.batch_invariant:
            return min(request.num_tokens - start, limit)
        if start >= len(request.prompt_ids):
            count = 1
        else:
            boundary = (start // self.fixed_chunk + 1) * self.fixed_chunk
            count = min(boundary, len(request.prompt_ids)) - start
        return count if count <= limit else 0

    def _admit(self, budget: int) -> None:
        while self.waiting and self.slots.num_free and budget > 0:
            request = self.waiting[0]
            hit = self.prefix.match(request) if self.prefix is not None else None
            shared, copied = (hit.pages, [*hit.copied]) if hit is not None else ([], [])
            self.pages.share(shared + copied)  # before allocating, which may evict kept pages
            new = self.pages.allocate(pages_for(request.num_tokens) - len(shared))
            if new is None:
                self.pages.release(shared + copied)
                return
            if request.plan is not None and not request.plan.reserve():  # e.g. rows of steering tables
                self.pages.release(shared + copied + new)
                return
            slots = self.slots.allocate(1)
            assert slots is not None
            self.waiting.popleft()
            request.slot = slots[0]
            request.pages = shared + new
            request.num_computed_tokens = 0
            if self.prefix is not None and hit is not None:
                self.prefix.restore(request, hit)
            elif request.cached_tokens is None:
                request.cached_tokens = 0
            request.num_mtp_tokens = request.num_computed_tokens
            if request.timings.admitted is None:
                request.timings.admitted = time.perf_counter()
            self.running.append(request)
            self._last_prefill[slots[0]] = self._num_steps
            budget -= request.num_tokens - request.num_computed_tokens

    def _allocate_pages(self, request: Request, tokens: int) -> None:
        """Allocate pages for `tokens` tokens; preempts the youngest requests, possibly this one, when none are free."""
        while len(request.pages) < pages_for(tokens):
            pages = self.pages.allocate(1)
            if pages is not None:
                request.pages += pages
                continue
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is request:
                return

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._free_memory(request)
        if self.prefix is not None:
            self.prefix.reset(request)
        request.flush_rows()
        request.num_computed_tokens = 0
        request.draft_tokens = ()
        request.timings.preemptions += 1
        self.waiting.appendleft(request)

    def _free_memory(self, request: Request) -> None:
        self.slots.release([request.running_slot])
        self.pages.release(request.pages)
        request.slot = None
        request.pages = []
        if request.plan is not None:
            request.plan.release()
