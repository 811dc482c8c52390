"""The engine core: requests in, tokens out, one step at a time.

A step is schedule, run, commit, and with speculation draft; on a GPU a step may be launched before its predecessor is
committed (`run_ahead.py`). The engine has no thread of its own (`request_loop.py`). A step that fails
ends the requests in it with the error; a step that is interrupted is done again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from birkhoff.byte_size import format_bytes
from birkhoff.config import PAGE_TOKENS
from birkhoff.decode.gpu import Decoder, unsupported_model
from birkhoff.engine.cuda_graphs import CudaGraphs
from birkhoff.engine.draft_chain import DraftChain, PendingSamples
from birkhoff.engine.gpu_warmup import warm_up
from birkhoff.engine.language_model import LanguageModel
from birkhoff.engine.page_files import PageFiles
from birkhoff.engine.prefix import PrefixCache
from birkhoff.engine.request import Request
from birkhoff.engine.request_loop import RequestLoop
from birkhoff.engine.run_ahead import LaunchedStep, RunAhead
from birkhoff.engine.runner import ModelOutput, Runner, StepRunner
from birkhoff.engine.sampler import Sampled, Sampler
from birkhoff.engine.scheduler import ScheduledChunk, Scheduler
from birkhoff.engine.speculation import Speculator
from birkhoff.engine.speculation_controller import SpeculationController
from birkhoff.errors import BirkhoffError, CapacityError, LogitsError
from birkhoff.hooks.plan import Plan
from birkhoff.model.cache_size import cache_by_kind, page_bytes, pages_for
from birkhoff.model.state import State
from birkhoff.model.transformer import Transformer
from birkhoff.offload.placement import Placement
from birkhoff.offload.read_gate import BackgroundReader


class EngineCore(RequestLoop):
    """Owns the model, its state, the scheduler, the runner and the sampler.

    Up to `max_requests` requests run at once, each of up to `max_context` tokens, in a cache of `num_pages` pages. A
    step computes up to `max_batch_tokens` tokens. With `batch_invariant` no request affects the bits of another.
    `prefix_bytes` is the memory for snapshots of the prefix cache; 0 disables it. `row_bytes` is for captured rows of
    past prompts. `draft_depth` tokens are drafted per step while it is faster, or always with `draft_always`. `files`
    stores pages that the prefix cache evicts. `placement` moves experts between steps when some of them are in host
    memory. A model that is not ours comes with a `runner`; prefix cache, speculation and placement are for ours."""

    def __init__(
        self,
        model: LanguageModel,
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
        runner: StepRunner | None = None,
    ):
        super().__init__(max_context)
        self.model = model
        self.placement = placement
        # A GPU reads a quarter of a chunk in half its time: prompts would take twice as long beside decoding requests.
        mixed_share = 1.0 if isinstance(model, Transformer) and _uses_graphs(model) else 0.25
        self.scheduler = Scheduler(max_requests, num_pages, max_batch_tokens, batch_invariant, mixed_share)
        self.sampler = Sampler()
        self.drafted = self.accepted = 0
        self.speculator: Speculator | None = None
        self.controller: SpeculationController | None = None
        # On a shared CPU, wall time varies with other processes; the cost of a step is its processor time.
        self._clock = time.thread_time if torch.device(device).type == "cpu" else time.perf_counter
        self._run_ahead: RunAhead | None = None
        self._launched: LaunchedStep | None = None  # runs on the device; its tokens have not been read
        self._ending: deque[LaunchedStep] = deque()  # the same of prompts whose requests end with that token
        self._own: Runner | None = None  # the runner, if the model is ours
        self._reader: BackgroundReader | None = None  # reads experts while requests are served
        if runner is None:
            assert isinstance(model, Transformer), "a model that is not ours has a runner"
            runner = self._own = self._make_runner(
                model, max_requests, num_pages, batch_invariant, draft_depth, draft_always, device
            )
            if prefix_bytes:
                state, pages = self._own.state, self.scheduler.pages
                prefix = PrefixCache(state, pages, prefix_bytes, row_bytes, batch_invariant, files)
                self.scheduler.prefix = self._own.prefix = prefix
        self.runner: Any = runner  # a StepRunner; callers reach the parts of our own runner through it

    @property
    def max_requests(self) -> int:
        return self.scheduler.slots.size

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "batch_invariant": self.scheduler.batch_invariant,
            "max_requests": self.max_requests,
            "max_batch_tokens": self.scheduler.max_batch_tokens,
        }

    def _make_runner(
        self,
        model: Transformer,
        max_requests: int,
        num_pages: int,
        batch_invariant: bool,
        draft_depth: int,
        draft_always: bool,
        device: torch.device | str,
    ) -> Runner:
        mtp = draft_depth > 0
        uses_graphs = _uses_graphs(model)
        slots = max_requests + uses_graphs  # graphs pad their rows with a slot that no request has
        # Always drafting leaves no plain step that could run ahead.
        runs_ahead = (
            uses_graphs and not (mtp and draft_always) and self.placement is None and not batch_invariant
        )
        lookback = max(draft_depth, int(runs_ahead))  # tokens that may be computed and then discarded
        state = State(model.config, slots, num_pages, device, model.numerics.dtype, lookback, mtp)
        runner = Runner(model, state, batch_invariant)
        if uses_graphs:
            runner.graphs = CudaGraphs(Decoder(model, state), max_requests, self.max_context)
            self.sampler.prepare(torch.device(device), model.config.vocab_size)
        if mtp:
            self.controller = None if draft_always else SpeculationController()
            chain = None if runner.graphs is None else DraftChain(runner.graphs, self.sampler, draft_depth)
            self.speculator = Speculator(model, state, self.sampler, draft_depth, self.controller, chain)
            runner.speculator = self.speculator
        if runs_ahead:
            self._run_ahead = RunAhead(self.scheduler, runner, self.sampler, self.controller)
        return runner

    def kernel_fallbacks(self) -> list[str]:
        """What runs in place of GPU kernels that the model or the GPU does without, in words; nothing on a CPU."""
        runner = self._own
        if runner is None or runner.graphs is None or runner.state.device.type != "cuda":
            return []
        return runner.graphs.decoder.fallbacks()

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> float:
        """Compile GPU kernels and record decode graphs before the first request; returns the seconds it took.

        Does nothing on a CPU. Must not be called once requests were submitted."""
        runner = self._own
        if runner is None or runner.graphs is None or runner.state.device.type != "cuda":
            return 0.0
        with self._locked():
            budget = self.scheduler.max_batch_tokens
            chain = None if self.speculator is None else self.speculator.chain
            return warm_up(runner.model, runner.state, runner.graphs, budget, progress, chain)

    def read_experts_in_background(self, reader: BackgroundReader) -> None:
        """Serve while `reader` reads experts in host memory: steps wait for those they need, and decode steps run
        without graphs until all are there. Called after `warm_up`, before the first request."""
        assert self.placement is not None and self._own is not None
        self._reader = reader
        self.placement.store.read_gate = self._own.read_gate = reader.gate

    def submit(self, *requests: Request) -> None:
        """Queue all requests of one call; raises when one of them can never run, and queues none.

        Captures open their files here, after every request was checked; a refused call leaves no open file."""
        for request in requests:
            self._check_fits(request)
        with self._locked():
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

    def step(self) -> bool:
        """Schedule, run, commit. Returns False when there was nothing to do.

        A step on a GPU may be left running: the next call launches its successor before it commits it."""
        with self._locked():
            launched = self._launched
            self._launched = None
            if launched is not None:
                with self._handling_errors(launched.requests):
                    assert self._run_ahead is not None
                    started = self._clock()
                    following = self._run_ahead.following(launched)
                    self._commit_launched(launched)
                    self._launched = following
                    if self.controller is not None:  # counts the plain steps until drafting is tried again
                        count = len(launched.requests)
                        self.controller.record(count, False, False, count, self._clock() - started)
                return True
            if any(request.output_ids for request in self.scheduler.running):
                self._commit_ending(len(self._ending))  # decoding requests may need their pages
            ending = len(self._ending)
            chunks = self.scheduler.schedule()
            if chunks:
                with self._handling_errors([chunk.request for chunk in chunks]):
                    self._run_step(chunks)
            self._commit_ending(ending)  # the device has something to do meanwhile
            return bool(chunks) or ending > 0

    def _run_step(self, chunks: list[ScheduledChunk]) -> None:
        """Run scheduled chunks, and commit them unless their tokens can be read later."""
        started = self._clock()
        num_tokens = sum(chunk.request.num_tokens for chunk in chunks)
        outputs = self._run(chunks)
        ahead = self._run_ahead
        if ahead is not None and ahead.accepts(chunks):
            self._launched = ahead.launch(chunks, outputs)
            return
        if ahead is not None and ahead.ends(chunks):
            launched = ahead.launch(chunks, outputs)
            for chunk in chunks:
                self._advance(chunk)
            self._ending.append(launched)
            return
        speculator = self.speculator
        pending = None if speculator is None else speculator.launch(chunks, outputs)
        self._commit(chunks, outputs, pending)
        if speculator is not None:
            self._draft(speculator, chunks, outputs, pending, started, num_tokens)

    @contextmanager
    def _handling_errors(self, requests: Sequence[Request]) -> Iterator[None]:
        """An error in a step ends its requests; after an interrupt they are computed again."""
        try:
            yield
        except Exception as error:
            for request in requests:
                if not request.done:
                    request.finish("error", error=error)
                    self.scheduler.release(request)
        except BaseException:  # an interrupt: the caches may hold half a step
            for request in requests:
                if request.plan is not None:  # rows of a token that was never read
                    request.plan.settle(request.num_tokens)
            self.scheduler.recompute(requests)
            raise

    def _run(self, chunks: list[ScheduledChunk]) -> list[ModelOutput | None]:
        runner: StepRunner = self.runner
        if self.placement is None:
            return runner.run(chunks)
        tokens = [token for chunk in chunks for token in chunk.tokens]
        with self.placement.store.lock:
            self.placement.before_step(tokens, chunk=any(chunk.stop - chunk.start > 1 for chunk in chunks))
            try:
                return runner.run(chunks)
            finally:
                self.placement.after_step()

    def _cancel(self, request: Request) -> None:
        if not request.done:
            request.finish("cancelled")
            self.scheduler.release(request)

    def close(self) -> None:
        """Cancel all requests, write kept pages to disk and stop helper threads."""
        with self._locked():
            self._closed = True
            for request in [*self.scheduler.running, *self.scheduler.waiting]:
                self._cancel(request)
            if self.scheduler.prefix is not None:
                self.scheduler.prefix.close()
        self.runner.close()
        if self._reader is not None:
            self._reader.close()
        if self.placement is not None:
            self.placement.close()

    def _commit(
        self,
        chunks: list[ScheduledChunk],
        outputs: list[ModelOutput | None],
        pending: PendingSamples | None = None,
    ) -> None:
        """Record computed tokens, sample where a sequence ends, release finished requests.

        Samples that were launched already are `pending`."""
        sampling = []
        for chunk, output in zip(chunks, outputs):
            request = chunk.request
            if chunk.draft_tokens and output is not None:
                samples = (
                    self.sampler.verify(request, output.logits, chunk.draft_tokens)
                    if pending is None
                    else pending.samples(request)
                )
                self._verify(chunk, samples)
                continue
            self._advance(chunk)
            if output is not None:
                sampling.append((request, output.logits[0]))
        sampled_tokens = (
            self.sampler.sample(sampling)
            if pending is None
            else [pending.samples(request)[0] for request, _ in sampling]
        )
        for (request, _), sampled in zip(sampling, sampled_tokens):
            self._append(request, sampled)
            if request.done:
                self.scheduler.release(request)

    def _advance(self, chunk: ScheduledChunk) -> None:
        """Record that the tokens of a chunk are computed. A request for its prompt alone ends with the prompt."""
        request = chunk.request
        request.num_computed_tokens = chunk.stop
        self._insert_pages(request)
        if request.prompt_only and chunk.stop == request.num_tokens:
            request.finish("length")
            self.scheduler.release(request)

    def _commit_ending(self, count: int) -> None:
        """Read the tokens of the first `count` steps of prompts, with which their requests end."""
        for _ in range(count):
            step = self._ending.popleft()
            with self._handling_errors(step.requests):
                self._commit_launched(step)

    def _commit_launched(self, step: LaunchedStep) -> None:
        """Read the tokens of a launched step. Requests that ended meanwhile have no use for theirs."""
        for request, position, sampled in zip(step.requests, step.positions, step.sample.read()):
            if not request.done:
                request.num_computed_tokens = position + 1
                self._insert_pages(request)
                self._append(request, sampled)
                if request.done:
                    self.scheduler.release(request)

    def _append(self, request: Request, sampled: Sampled | BirkhoffError) -> None:
        if isinstance(sampled, BirkhoffError):
            request.finish("error", error=sampled)
        else:
            request.append_token(*sampled)

    def _verify(self, chunk: ScheduledChunk, samples: list[Sampled | LogitsError]) -> None:
        """Append the samples up to the first that differs from its draft token; state computed after a wrong draft
        token is discarded."""
        request = chunk.request
        for sampled in samples:
            self._append(request, sampled)
            if request.done:
                break
        request.num_computed_tokens = request.num_tokens - 1
        accepted = max(request.num_tokens - chunk.stop - 1, 0)
        request.drafted += len(chunk.draft_tokens)
        request.accepted += accepted
        self.drafted += len(chunk.draft_tokens)
        self.accepted += accepted
        request.flush_rows()
        self._insert_pages(request)
        if request.done:
            self.scheduler.release(request)

    def _draft(
        self,
        speculator: Speculator,
        chunks: list[ScheduledChunk],
        outputs: list[ModelOutput | None],
        pending: PendingSamples | None,
        started: float,
        num_tokens: int,
    ) -> None:
        """Draft tokens for the next step and record the speed of this one. `num_tokens`: before the step."""
        committed = self._clock()  # MTP prefill without drafting is no cost of a plain step
        drafted = speculator.draft(chunks, outputs, pending) > 0
        if self.controller is not None and all(chunk.is_decode for chunk in chunks):
            new_tokens = sum(chunk.request.num_tokens for chunk in chunks) - num_tokens
            verified = any(chunk.draft_tokens for chunk in chunks)
            seconds = (self._clock() if drafted else committed) - started
            self.controller.record(len(chunks), verified, drafted, new_tokens, seconds)

    def reuse(self) -> dict[str, Any]:
        """Statistics of the prefix cache and of speculation; a part that is off is None."""
        prefix = self.scheduler.prefix
        speculator = self.speculator
        speculation = None
        if speculator is not None:
            speculation = {
                "depth": speculator.depth,
                "drafted": self.drafted,
                "accepted": self.accepted,
                "pace": "always" if self.controller is None else self.controller.report(),
            }
        return {"prefix": None if prefix is None else prefix.report(), "speculation": speculation}

    def _insert_pages(self, request: Request) -> None:
        if self.scheduler.prefix is not None and self._own is not None:
            snapshots = self._own.boundary_snapshots.get(request, ())
            self.scheduler.prefix.insert_pages(request, snapshots)

    def _check_fits(self, request: Request) -> None:
        self.check_context(len(request.prompt_ids), request.max_tokens)
        needed = pages_for(request.max_cached_tokens)
        total = self.scheduler.pages.size
        if needed > total:
            raise CapacityError(
                f"this request needs {self._cache_of(needed)}. Shorten it or load with a larger cache_bytes."
            )

    def _cache_of(self, needed: int) -> str:
        """The cache that a request needs and what there is, in bytes for a model whose cache is ours."""
        total = self.scheduler.pages.size
        if self._own is None:
            return f"{needed} pages of {PAGE_TOKENS} tokens, {total} can ever be free"
        config, item_bytes = self._own.model.config, self._own.model.numerics.dtype.itemsize
        each = page_bytes(config, item_bytes)
        by_kind = {
            kind: PAGE_TOKENS * needed * cache.per_token
            for kind, cache in cache_by_kind(config, item_bytes).items()
        }
        parts = ", ".join(
            f"{format_bytes(count)} in {kind} layers" for kind, count in by_kind.items() if count
        )
        return (
            f"{format_bytes(needed * each)} of cache ({needed} pages), "
            f"{format_bytes(total * each)} can ever be free ({total} pages). It would be {parts}"
        )


def _uses_graphs(model: Transformer) -> bool:
    """Whether decode steps of the model are recorded as CUDA graphs."""
    return model.numerics.kernels.name == "triton" and unsupported_model(model) is None
