"""The engine: requests in, tokens out, a step at a time.

A step is schedule, run, commit, and with speculation guess. There is no thread of our own: whoever waits for a token
drives the engine, for everybody, under one lock; a caller that stops waiting stops costing. A step that fails ends the
requests that were in it, with the error as their reason, and the engine goes on; a step that is interrupted is done
again.

A stream that is thrown away is cancelled by its finalizer, which the garbage collector may run in the middle of a step,
in the very thread that holds the lock or in one that it waits for. So a finalizer takes no lock: `abandon` leaves a
note, and notes are read before and after every step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from birkhoff.byte_size import format_bytes
from birkhoff.config import PAGE_TOKENS
from birkhoff.decode.gpu import Decoder, unsupported_model
from birkhoff.engine.cuda_graphs import CudaGraphs
from birkhoff.engine.gpu_warmup import warm_up
from birkhoff.engine.memory_plan import cache_by_kind, page_bytes, pages_for
from birkhoff.engine.page_files import PageFiles
from birkhoff.engine.prefix import PrefixCache
from birkhoff.engine.request import Request
from birkhoff.engine.runner import ModelOutput, Runner
from birkhoff.engine.sampler import Sampler
from birkhoff.engine.scheduler import ScheduledChunk, Scheduler
from birkhoff.engine.speculation import Speculator
from birkhoff.engine.speculation_controller import SpeculationController
from birkhoff.errors import BirkhoffError, CapacityError, ContextError, EngineClosed
from birkhoff.hooks.plan import Plan
from birkhoff.model.state import State
from birkhoff.model.transformer import Transformer
from birkhoff.offload.placement import Placement


class EngineCore:
    def __init__(
        self,
        model: Transformer,
        *,
        max_requests: int,
        max_context: int,
        num_pages: int,
        max_batch_tokens: int = 2048,
        batch_invariant: bool = False,
        prefix_bytes: int = 0,
        row_bytes: int = 0,
        draft_depth: int = 0,
        draft_always: bool = False,
        files: PageFiles | None = None,
        device: torch.device | str = "cpu",
        placement: Placement | None = None,
    ):
        """`prefix_bytes` is what the prefix cache may use beside pages; without any there is none. `row_bytes` is for
        captured rows of past prompts. `draft_depth` tokens are guessed ahead, while it pays or, with `draft_always`,
        whether it does or not. `files` takes what the prefix cache has no room for. `placement` moves experts
        between steps, where some of them lie in host memory."""
        self.model = model
        self.max_context = max_context
        self.placement = placement
        mtp = draft_depth > 0
        replays = model.numerics.kernels.name == "triton" and unsupported_model(model) is None
        slots = (
            max_requests + replays
        )  # a replayed step fills its spare rows from a slot that nobody else has
        state = State(model.config, slots, num_pages, device, model.numerics.dtype, draft_depth, mtp)
        self.scheduler = Scheduler(max_requests, num_pages, max_batch_tokens, batch_invariant)
        self.runner = Runner(model, state, batch_invariant)
        if replays:
            self.runner.graphs = CudaGraphs(Decoder(model, state), max_requests, max_context)
        if prefix_bytes:
            prefix = PrefixCache(state, self.scheduler.pages, prefix_bytes, row_bytes, batch_invariant, files)
            self.scheduler.prefix = self.runner.prefix = prefix
        self.sampler = Sampler()
        if replays:
            self.sampler.prepare(torch.device(device), model.config.vocab_size)
        self.drafted = self.accepted = 0
        self.pace = SpeculationController() if mtp and not draft_always else None
        # A CPU that others use too holds steps up at random; what a step costs is the processor's time.
        self._clock = time.thread_time if torch.device(device).type == "cpu" else time.perf_counter
        if mtp:
            self.runner.speculator = Speculator(model, state, self.sampler, draft_depth, self.pace)
        self._lock = threading.Lock()
        self._leaving: deque[Request] = deque()  # abandoned, still to be ended
        self._closed = False

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> float:
        """Compile GPU kernels and record decode graphs before the first request; returns the seconds it took.

        Does nothing on a CPU. Must not be called once requests were submitted."""
        graphs = self.runner.graphs
        if graphs is None or self.runner.state.device.type != "cuda":
            return 0.0
        with self._turn():
            return warm_up(self.model, self.runner.state, graphs, self.scheduler.max_batch_tokens, progress)

    def submit(self, *requests: Request) -> None:
        """Queue all requests of one call, or refuse the call if one of them can never run.

        Captures open their files here, after every request was checked; a call that is refused leaves none."""
        for request in requests:
            self._check_fits(request)
        with self._turn():
            self.check_open()
            opened: list[Plan] = []
            try:
                for plan in (request.plan for request in requests if request.plan is not None):
                    plan.open()
                    opened.append(plan)
            except BaseException:
                for plan in opened:
                    plan.close("cancelled", 0)
                raise
            for request in requests:
                self.scheduler.submit(request)

    def check_open(self) -> None:
        if self._closed:
            raise EngineClosed("this engine was closed. Load the model again.")

    def step(self) -> bool:
        """Schedule, run, commit. False when there was nothing to do."""
        with self._turn():
            work = self.scheduler.next()
            if not work:
                return False
            try:
                began = self._clock()
                known = sum(item.request.num_tokens for item in work)
                ran = self._run(work)
                self._commit(work, ran)
                if self.runner.speculator is not None:
                    self._guess(self.runner.speculator, work, ran, began, known)
            except Exception as error:
                self._fail(work, error)
            except BaseException:  # an interrupt: half a step may be in the caches of those who go on
                self.scheduler.recompute(item.request for item in work)
                raise
            return True

    def _run(self, work: list[ScheduledChunk]) -> list[ModelOutput | None]:
        if self.placement is None:
            return self.runner.run(work)
        tokens = [token for item in work for token in item.tokens]
        with self.placement.store.lock:
            self.placement.before_step(tokens, chunk=any(item.stop - item.start > 1 for item in work))
            try:
                return self.runner.run(work)
            finally:
                self.placement.after_step()

    def step_until_output(self, request: Request) -> None:
        """Step until `request` has something to say."""
        while not request.events and not request.done:
            if not self.step() and not request.events and not request.done:
                raise AssertionError(f"request {request.id} waits but nothing can run")

    def cancel(self, request: Request) -> None:
        """End a request at whatever stage it is; harmless when it has ended already."""
        with self._turn():
            self._end(request)

    def request_cancel(self, request: Request) -> None:
        """`cancel` for finalizers: takes no lock and runs nothing; in force before anybody's next step."""
        if not request.done:
            self._leaving.append(request)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The lock, with everybody gone who wanted to leave before it was taken or while it was held."""
        with self._lock:
            self._end_leaving()
            try:
                yield
            finally:
                self._end_leaving()

    def process_cancellations(self) -> None:
        """End those who were abandoned, unless somebody is at work: then that somebody will."""
        if self._leaving and self._lock.acquire(blocking=False):
            try:
                self._end_leaving()
            finally:
                self._lock.release()

    def _end_leaving(self) -> None:
        while self._leaving:
            self._end(self._leaving.popleft())

    def _end(self, request: Request) -> None:
        if not request.done:
            request.finish("cancelled")
            self.scheduler.release(request)

    def close(self) -> None:
        with self._turn():
            self._closed = True
            for request in [*self.scheduler.running, *self.scheduler.waiting]:
                request.finish("cancelled")
                self.scheduler.release(request)
            if self.scheduler.prefix is not None:
                self.scheduler.prefix.close()
        self.runner.close()
        if self.placement is not None:
            self.placement.close()

    def _commit(self, work: list[ScheduledChunk], ran: list[ModelOutput | None]) -> None:
        """Book what was computed, sample where a sequence ends, release what is finished."""
        sampling = []
        for item, made in zip(work, ran):
            if item.draft_tokens and made is not None:
                self._verify(item, made)
                continue
            item.request.computed = item.stop
            self._enter_pages(item.request)
            if made is not None:
                sampling.append((item.request, made.logits[0]))
        for (request, _), drawn in zip(sampling, self.sampler.draw(sampling)):
            if isinstance(drawn, BirkhoffError):
                request.finish("error", error=drawn)
            else:
                request.accept(*drawn)
            if request.done:
                self.scheduler.release(request)

    def _verify(self, item: ScheduledChunk, made: ModelOutput) -> None:
        """Draw behind guesses for as long as they are right; what was computed behind a wrong one does not count."""
        request = item.request
        for drawn in self.sampler.draw_along(request, made.logits, item.draft_tokens):
            if isinstance(drawn, BirkhoffError):
                request.finish("error", error=drawn)
            else:
                request.accept(*drawn)
            if request.done:
                break
        request.computed = request.num_tokens - 1
        request.drafted += len(item.draft_tokens)
        stayed = max(request.num_tokens - item.stop - 1, 0)
        request.accepted += stayed
        self.drafted = self.drafted + len(item.draft_tokens)
        self.accepted = self.accepted + stayed
        request.settle_rows()
        self._enter_pages(request)
        if request.done:
            self.scheduler.release(request)

    def _guess(
        self,
        speculator: Speculator,
        work: list[ScheduledChunk],
        ran: list[ModelOutput | None],
        began: float,
        known: int,
    ) -> None:
        ended = self._clock()  # what a step spends on remembering for later guesses is no cost of plain steps
        guessed = speculator.guess(work, ran) > 0
        if self.pace is not None and all(item.samples_only for item in work):
            tokens = sum(item.request.num_tokens for item in work) - known
            verified = any(item.draft_tokens for item in work)
            self.pace.note(
                len(work), verified, guessed, tokens, (self._clock() if guessed else ended) - began
            )

    def reuse(self) -> dict[str, Any]:
        """Numbers of the prefix cache and of speculation; a part that is off is None."""
        prefix = self.scheduler.prefix
        speculator = self.runner.speculator
        return {
            "prefix": None if prefix is None else prefix.report(),
            "speculation": None
            if speculator is None
            else {
                "depth": speculator.depth,
                "drafted": self.drafted,
                "accepted": self.accepted,
                "pace": "always" if self.pace is None else self.pace.report(),
            },
        }

    def _enter_pages(self, request: Request) -> None:
        if self.scheduler.prefix is not None:
            self.scheduler.prefix.extend(request, self.runner.passed.get(request, ()))

    def _fail(self, work: list[ScheduledChunk], error: Exception) -> None:
        for item in work:
            if not item.request.done:
                item.request.finish("error", error=error)
                self.scheduler.release(item.request)

    def _check_fits(self, request: Request) -> None:
        prompt = len(request.prompt_ids)
        wanted = len(request.prompt_ids) + request.max_tokens
        if wanted > self.max_context:
            raise ContextError(
                f"the prompt has {prompt} tokens and max_tokens is {request.max_tokens}: together {wanted}, the "
                f"context holds {self.max_context}. Shorten the prompt, lower max_tokens, or raise max_context."
            )
        needed = pages_for(request.most_tokens)
        total = self.scheduler.pages.size
        if needed > total:
            config = self.model.config
            item = self.model.numerics.dtype.itemsize
            each = page_bytes(config, item)
            kinds = {
                kind: PAGE_TOKENS * needed * of.per_token for kind, of in cache_by_kind(config, item).items()
            }
            parts = ", ".join(
                f"{format_bytes(count)} in {kind} layers" for kind, count in kinds.items() if count
            )
            raise CapacityError(
                f"this request needs {format_bytes(needed * each)} of cache ({needed} pages), {format_bytes(total * each)} can ever "
                f"be free ({total} pages). It would be {parts}. Shorten it or load with a larger cache_bytes."
            )
