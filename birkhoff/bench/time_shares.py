"""Breakdown of the time of a decode step.

Inside the model a tap is the clock: it is called at every site, so the time between two calls belongs to the part of
the layer between them, without changes to the model. Around the model, the runner and the sampler of an engine are
wrapped in stopwatches; the rest of a step is the overhead of the engine.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import torch

from birkhoff.bench.baselines import OurEngine, OurModel, Tokens
from birkhoff.bench.report import significant
from birkhoff.hooks import sites
from birkhoff.hooks.edit import Routing
from birkhoff.hooks.sites import Site
from birkhoff.hooks.tap import NoTap, Reads

# The part of a layer that precedes each site; sites without an entry follow the work of a mixer.
PART = {
    sites.POST_ATTN: "attention",
    sites.ATTN_HEAD_OUT: "attention",
    sites.MOE_ROUTER_LOGITS: "experts",
    sites.MOE_TOPK: "experts",
    sites.MLP_OUT: "experts",
}


class ClockTap(NoTap):
    """A tap that only measures time."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.last = 0.0
        self.started = False

    def start(self) -> None:
        self.seconds.clear()
        self.last = time.perf_counter()
        self.started = False

    def mark(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] += now - self.last
        self.last = now

    def __call__(self, site: Site, x: torch.Tensor) -> torch.Tensor:
        self.see(site)
        return x

    def part(
        self, site: Site, x: torch.Tensor, reads: Reads | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.see(site)
        return x, x

    def route(
        self, site: Site, ids: torch.Tensor, weights: torch.Tensor, routing: Routing
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.see(site)
        return ids, weights

    def see(self, site: Site, *parts: torch.Tensor) -> None:
        # before the first site: batch, embedding, phases
        self.mark(PART.get(site, "mhc") if self.started else "other")
        self.started = True

    def at(self, layer: int) -> ClockTap:
        return self


class Stopwatch:
    """Wraps a part of the engine and times one of its methods."""

    def __init__(self, inner: Any, call: str):
        self._inner = inner
        self._call = call
        self.seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if name != self._call:
            return attribute

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = attribute(*arguments)
            self.seconds.append(time.perf_counter() - began)
            return result

        return timed


def model_shares(baseline: OurModel, clock: ClockTap, prompts: list[Tokens], steps: int) -> dict[str, float]:
    """Milliseconds of each part of the model in the median decode step; `head` is the last norm and the logits."""
    tokens = baseline.prefill(prompts)
    rows: list[dict[str, float]] = []
    for _ in range(steps):
        clock.start()
        tokens = baseline.step(tokens)
        clock.mark("head")
        rows.append(dict(clock.seconds))
    return {part: _median_ms([row.get(part, 0.0) for row in rows]) for part in rows[0]}


def engine_shares(baseline: OurEngine, prompts: list[Tokens], steps: int) -> dict[str, float]:
    """Milliseconds of the model, the sampler and the rest of the engine in the median decode step."""
    core = baseline.core
    tokens = baseline.prefill(prompts)
    runner = Stopwatch(core.runner, "run")
    sampler = Stopwatch(core.sampler, "sample")
    core.runner = runner
    core.sampler = sampler  # type: ignore[assignment]
    try:
        total = []
        for _ in range(steps):
            began = time.perf_counter()
            tokens = baseline.step(tokens)
            total.append(time.perf_counter() - began)
    finally:
        core.runner = runner._inner
        core.sampler = sampler._inner
    engine = [
        step_seconds - model_seconds - sampling_seconds
        for step_seconds, model_seconds, sampling_seconds in zip(total, runner.seconds, sampler.seconds)
    ]
    return {
        "model": _median_ms(runner.seconds),
        "sampling": _median_ms(sampler.seconds),
        "engine": _median_ms(engine),
    }


def _median_ms(seconds: list[float]) -> float:
    return significant(1e3 * torch.tensor(seconds, dtype=torch.float64).median().item())
