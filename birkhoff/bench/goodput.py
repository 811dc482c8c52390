"""Goodput of a GPU engine with arriving requests, beside the time that its kernels need for the same work.

The kernels' own time is measured in the same run: the decode graph of every batch size, and one prefill chunk of the
largest size. Requests carry no text: what is measured is scheduling, launching, sampling and bookkeeping.

- `share_of_kernels`: the time that these kernels take for all tokens of the run (prompts in full chunks; one decode
  step per output token, at the batch sizes that result when all prompts are read first) divided by the elapsed time.
  Requests that arrive at 0.8 of the capacity take at least 1 / 0.8 of that time, so 0.8 is the most it can be there.
- `share_while_busy`: the time of the decode steps that were run, at their own batch sizes, and of the prompts in full
  chunks, divided by the time in which there was a request to work on. This is the share that the host leaves to
  the kernels, at any arrival rate.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from birkhoff.bench.report import Row, facts, significant
from birkhoff.bench.synthetic import random_on_device
from birkhoff.bench.timing import cuda_seconds, median
from birkhoff.config import V4Config
from birkhoff.convert.presets import preset
from birkhoff.engine.cuda_graphs import ROWS
from birkhoff.engine.engine import EngineCore
from birkhoff.engine.request import Request
from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.hooks.tap import NoTap
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.cache_size import pages_for

RATES = (0.8, 1.2)  # above 1 requests wait for each other, as in a server at its limit


@dataclass(frozen=True)
class GoodputSetting:
    """`requests` prompts and answers, of lengths drawn uniformly from the given ranges."""

    requests: int = 64
    prompt_tokens: tuple[int, int] = (256, 4096)
    output_tokens: tuple[int, int] = (64, 512)
    temperature: float = 1.0
    seed: int = 0

    def make(self, vocab_size: int, run: int = 0) -> list[Request]:
        """The requests of a run: the same lengths in every run, other tokens, so that no prefix is cached."""
        draw = random.Random(self.seed)
        tokens_of_run = random.Random(f"{self.seed} {run}")
        made = []
        for index in range(self.requests):
            length = draw.randint(*self.prompt_tokens)
            prompt = tuple(tokens_of_run.randrange(vocab_size) for _ in range(length))
            tokens = draw.randint(*self.output_tokens)
            params = SamplingParams(temperature=self.temperature, max_tokens=tokens, ignore_eos=True)
            made.append(Request(prompt, params, tokens, seed=index))
        return made


@dataclass
class RunProgress:
    """Milliseconds to the first token of each request and between tokens, requests decoded in each step, and the
    seconds in which no request was there."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    decoded: list[int] = field(default_factory=list)
    idle_seconds: float = 0.0


class KernelTimes:
    """Seconds of decode steps by batch size, and of one prefill chunk; measured with random tokens."""

    def __init__(self, core: EngineCore, context: int = 1024, rounds: int = 7):
        graphs, model = core.runner.graphs, core.runner.model
        assert graphs is not None, "this engine has no decode graphs"
        state, slot = core.runner.state, graphs.scratch_slot
        vocab_size = model.config.vocab_size
        self.chunk_tokens = min(core.scheduler.max_batch_tokens, core.max_context)
        state.give_pages(slot, list(range(min(pages_for(self.chunk_tokens), state.num_pages))))
        generator = torch.Generator().manual_seed(1)

        def tokens(count: int) -> list[int]:
            ids: list[int] = torch.randint(vocab_size, (count,), generator=generator).tolist()
            return ids

        with torch.inference_mode():
            batch = Batch.of([SequenceChunk(slot, 0, tokens(self.chunk_tokens))], state.device)
            chunk = cuda_seconds(lambda: model.run(batch, state, NoTap()), rounds, warm=2)
            self.chunk_seconds = median(chunk)
            self.step_seconds = {}
            largest = next(rows for rows in ROWS if rows >= min(graphs.scratch_slot, ROWS[-1]))
            for rows in (size for size in ROWS if size <= largest):
                ids, positions = tokens(rows), [context - 1] * rows
                graphs.step(ids, positions, [slot] * rows)
                _, graph = graphs._find_plain(rows, context)
                assert graph is not None
                self.step_seconds[rows] = median(cuda_seconds(graph.replay, 4 * rounds, warm=3))
        state.page_table.zero_()

    def step(self, rows: int) -> float:
        """Seconds of a step with this many rows, interpolated between measured sizes."""
        sizes = sorted(self.step_seconds)
        return float(np.interp(rows, sizes, [self.step_seconds[size] for size in sizes]))

    def work(self, requests: Sequence[Request]) -> float:
        """Seconds that the kernels need for all prompts and answers."""
        # The first token comes with the prompt.
        lengths = sorted(request.max_tokens - 1 for request in requests)
        decoding = 0.0
        done = 0
        for index, length in enumerate(lengths):
            decoding += (length - done) * self.step(len(lengths) - index)
            done = length
        return self.prompts(requests) + decoding

    def prompts(self, requests: Sequence[Request]) -> float:
        """Seconds that the kernels need for all prompts, in full chunks."""
        tokens = sum(len(request.prompt_ids) for request in requests)
        return tokens / self.chunk_tokens * self.chunk_seconds

    def row(self) -> Row:
        return {
            "chunk_tokens": self.chunk_tokens,
            "chunk_ms": significant(self.chunk_seconds * 1e3),
            "step_ms": {rows: significant(seconds * 1e3) for rows, seconds in self.step_seconds.items()},
        }


def run_at_once(core: EngineCore, requests: Sequence[Request]) -> tuple[float, RunProgress]:
    """All requests submitted at once; one thread steps the engine."""
    return _run(core, requests, [0.0] * len(requests))


def run_arrivals(core: EngineCore, requests: Sequence[Request], rate: float) -> tuple[float, RunProgress]:
    """Requests arrive as a Poisson process with `rate` per second."""
    draw = random.Random(7)
    times, now = [], 0.0
    for _ in requests:
        times.append(now)
        now += draw.expovariate(rate)
    return _run(core, requests, times)


def _run(core: EngineCore, requests: Sequence[Request], times: Sequence[float]) -> tuple[float, RunProgress]:
    progress = RunProgress()
    began = time.perf_counter()
    pending = list(zip(times, requests))
    seen = {request: (0, began + at) for at, request in pending}
    active: list[Request] = []
    while pending or active:
        now = time.perf_counter()
        while pending and began + pending[0][0] <= now:
            active.append(pending.pop(0)[1])
            core.submit(active[-1])
        if not active:
            time.sleep(max(0.0, began + pending[0][0] - time.perf_counter()))
            progress.idle_seconds += time.perf_counter() - now
            continue
        core.step()
        now = time.perf_counter()
        decoded = 0
        for request in active:
            count, last = seen[request]
            if len(request.output_ids) > count:
                decoded += count > 0  # the first token comes with the prompt
                spans = progress.first if count == 0 else progress.between
                spans.append((now - last) * 1e3)
                seen[request] = (len(request.output_ids), now)
        progress.decoded.append(decoded)
        active = [request for request in active if not request.done]
    return time.perf_counter() - began, progress


def run_threads(core: EngineCore, requests: Sequence[Request]) -> float:
    """One thread per request, each of which submits and waits, as callers of `Engine.generate` do."""

    def call(request: Request) -> None:
        core.submit(request)
        core.step_until_done(request)

    threads = [threading.Thread(target=call, args=(request,)) for request in requests]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def measure(core: EngineCore, setting: GoodputSetting, rates: Sequence[float] = ()) -> Iterator[Row]:
    """Rows for all requests at once, for one thread per request, and for Poisson arrivals at `RATES`, shares of the
    rate that the kernels could sustain; or for arrivals at these `rates` alone."""
    kernels = KernelTimes(core)
    vocab_size = core.model.config.vocab_size
    common = facts() | {"bench": "goodput", "layers": core.model.config.num_hidden_layers, **kernels.row()}

    def row(kind: str, requests: Sequence[Request], seconds: float, progress: RunProgress | None) -> Row:
        assert all(request.finish_reason == "length" for request in requests), "a request failed"
        work = kernels.work(requests)
        made = sum(len(request.output_ids) for request in requests)
        parts: Row = {}
        if progress is not None:
            as_run = kernels.prompts(requests) + sum(kernels.step(rows) for rows in progress.decoded if rows)
            parts["share_while_busy"] = significant(as_run / (seconds - progress.idle_seconds))
            parts["first_ms"] = _percentiles(progress.first)
            parts["between_ms"] = _percentiles(progress.between)
        return common | {
            "kind": kind,
            "requests": len(requests),
            "prompt_tokens": sum(len(request.prompt_ids) for request in requests),
            "output_tokens": made,
            "seconds": significant(seconds),
            "output_tokens_per_second": significant(made / seconds),
            "kernel_seconds": significant(work),
            "share_of_kernels": significant(work / seconds),
            **parts,
        }

    capacity = setting.requests / kernels.work(setting.make(vocab_size))
    if not rates:
        for run, kind in ((10, "arrivals after load"), (11, "arrivals again")):
            requests = setting.make(vocab_size, run)
            yield row(kind, requests, *run_arrivals(core, requests, capacity / 2))
        for run, kind in enumerate(("at once, first time", "at once")):
            requests = setting.make(vocab_size, run)
            yield row(kind, requests, *run_at_once(core, requests))
        requests = setting.make(vocab_size, 2)
        yield row("threads", requests, run_threads(core, requests), None)
    for run, share in enumerate(rates or RATES, start=3):
        requests = setting.make(vocab_size, run)
        rate = share * capacity
        yield row(f"arrivals at {share:g} of capacity", requests, *run_arrivals(core, requests, rate)) | {
            "requests_per_second": significant(rate)
        }


def _percentiles(values: Sequence[float]) -> Row:
    ordered = np.sort(np.array(values))
    return {f"p{p}": significant(float(np.percentile(ordered, p))) for p in (50, 95, 99, 100)}


def random_core(config: V4Config, distinct: int, max_requests: int, max_batch_tokens: int) -> EngineCore:
    """An engine over random weights on the GPU, warmed up."""
    device = torch.device("cuda")
    model = random_on_device(config, device, distinct=distinct, kernels="triton")
    max_context = 8192
    core = EngineCore(
        model,
        max_requests=max_requests,
        max_context=max_context,
        num_pages=max_requests * pages_for(max_context // 2),
        max_batch_tokens=max_batch_tokens,
        device=device,
    )
    core.warm_up()
    return core


def bench_goodput(
    layers: int = 43,
    distinct: int = 36,
    setting: GoodputSetting | None = None,
    max_requests: int = 64,
    max_batch_tokens: int = 4096,
    rates: Sequence[float] = (),
) -> Iterator[Row]:
    """The rows of `measure` for random weights of full width."""
    core = random_core(preset("flash", layers, False), distinct, max_requests, max_batch_tokens)
    for row in measure(core, setting or GoodputSetting(), rates):
        yield row | {"layers_with_own_experts": min(distinct, layers)}
    core.close()
