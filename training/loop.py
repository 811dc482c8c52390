"""The training loop: feed, step, schedule, measure, save; stops by steps or time.

A run is limited by steps (`Stop(steps=...)`, exactly reproducible) or by seconds (`Stop(seconds=...)`, independent of
machine speed; the clock starts after compilation). State for resuming is saved to `work/state.pt`. In the last tenth,
weights are rounded as they will be stored, and the best weights measured under rounding are shipped.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from birkhoff.atomic_file import atomic_path
from birkhoff.errors import OptionError
from training.feed import Feed
from training.forward import Forward
from training.initial import initialise
from training.liveness import liveness
from training.measure import HeldOut, measure, report
from training.optim import Optimiser
from training.parameters import Store
from training.settings import Settings, moment
from training.step import Step

EAGER_STEPS = 3  # before recording: compilation, library workspaces, autotuning


@dataclass(frozen=True)
class Stop:
    steps: int | None = None
    seconds: float | None = None

    def progress(self, step: int, elapsed: float) -> float:
        return step / self.steps if self.steps else elapsed / (self.seconds or 1.0)


@dataclass
class Log:
    """Writes JSON lines to a file and to the screen."""

    path: Path
    label: str = ""
    lines: list[dict] = field(default_factory=list)

    def write(self, kind: str, **values: object) -> None:
        line = (
            {"kind": kind, "time": round(time.time(), 1)}
            | ({"run": self.label} if self.label else {})
            | values
        )
        self.lines.append(line)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


@dataclass
class Bench:
    """What runs share: compiled forward, rows, held-out text, log."""

    forward: Forward
    feed: Feed
    held_out: list[HeldOut]
    pad: int
    log: Log
    work: Path


@dataclass
class Outcome:
    settings: Settings
    tensors: dict[str, Tensor]  # shipped weights, float32 masters on the CPU
    measured: dict
    steps: int
    seconds: float
    tokens_per_second: float
    alive: list[dict]


class Run:
    def __init__(self, bench: Bench, settings: Settings, stop: Stop):
        if not stop.steps and not stop.seconds:
            raise OptionError("a run needs an end: give --steps or --minutes.")
        self.bench = bench
        self.settings = settings
        self.stop = stop
        self.store = Store(bench.forward.config, bench.forward.device)
        initialise(self.store, settings.seed, settings.spread, settings.mhc_scale, settings.stagger)
        self.optimiser = Optimiser(self.store, settings)
        self.step = Step(bench.forward, self.store, self.optimiser, settings, bench.pad)
        self.done = 0
        self.elapsed = 0.0
        self.rounded = False
        self.best: tuple[float, dict[str, Tensor], dict] | None = None
        self._warm = False
        self._eager_left = EAGER_STEPS
        self._began = self._logged_at = time.monotonic()
        self._logged = 0

    @property
    def progress(self) -> float:
        return self.stop.progress(self.done, self.elapsed)

    def train(
        self, marks: int = 10, log_every: int = 50, save_seconds: float = 90.0, record: bool = True
    ) -> Outcome:
        """Train to the end with `marks` evaluations, the last of them at the end."""
        # One more in the last tenth, where the best shippable weights are.
        goals = sorted({(i + 1) / marks for i in range(marks)} | ({0.95} if marks >= 10 else set()))
        goals = [goal for goal in goals if goal > self.progress]
        self._began = self._logged_at = saved = time.monotonic()
        self._began -= self.elapsed
        while self.progress < 1:
            if not self.rounded and self.progress >= 1 - self.settings.round_share:
                self.rounded = True
                self._eager_left = EAGER_STEPS
                self.step.forget()
                self.bench.log.write("rounding", step=self.done)
            part = self._advance(record)
            if self.done % log_every == 0:
                self._log(part)
            if goals and self.progress >= goals[0]:
                goals = [goal for goal in goals if goal > self.progress]
                self.measure(self.rounded)
                self._logged = self.done
                self._logged_at = time.monotonic()
            if time.monotonic() - saved > save_seconds:
                self.save()
                saved = time.monotonic()
        self._wait()
        if math.isfinite(save_seconds):
            self.save()  # after a later failure, the same command resumes from this state
        return self._finish(self.rounded)

    def _advance(self, record: bool) -> str:
        """Run one step and update the clock; record the step once it has run a few times. Returns the stream used."""
        part = "mixed" if self.progress < self.settings.mixed_share else "core"
        ids, roles = self.bench.feed.batch(part, self.settings.batch)
        self.step.load(ids, roles, moment(self.settings, self.done, self.progress))
        self.step.run(self.rounded)
        self.done += 1
        if self._eager_left:
            self._eager_left -= 1
            if not self._eager_left and record:
                graph = self.step.record(self.rounded)
                self.bench.log.write(
                    "recorded", graph=graph, rounded=self.rounded, error=self.step.graph_error
                )
        if not self._warm:  # compilation and recording are not training time
            self._wait()
            self._began = time.monotonic() - self.elapsed
            self._logged_at = time.monotonic()
            self._logged = self.done
            self._warm = not self._eager_left
        self.elapsed = time.monotonic() - self._began
        return part

    def _log(self, part: str) -> None:
        metrics, now = self.step.read(), time.monotonic()
        tokens = (self.done - self._logged) * self.settings.batch * self.settings.length
        rate = round(tokens / max(now - self._logged_at, 1e-9))
        position = {
            "step": self.done,
            "progress": round(self.progress, 4),
            "part": part,
            "tokens_per_second": rate,
        }
        self.bench.log.write(
            "train", **position, **{name: round(value, 4) for name, value in metrics.items()}
        )
        self._logged = self.done
        self._logged_at = now
        if not all(map(math.isfinite, metrics.values())):
            raise FloatingPointError(f"step {self.done}: {metrics} is not finite. Lower the rates (--set).")

    def measure(self, rounded: bool) -> dict:
        """Evaluate on held-out text; under rounding, keep the best weights."""
        weights = self.store.named(self.store.leaves(self.step.dtype, rounded))
        common = (self.bench.pad, self.settings.batch, self.step.stream_dtype)
        scores = [measure(self.bench.forward, weights, part.rows, *common) for part in self.bench.held_out]
        result = report(self.bench.held_out, scores)
        loss = result["both"]["nats_per_token"]
        self.bench.log.write(
            "held-out", step=self.done, seconds=round(self.elapsed, 1), rounded=rounded, **result
        )
        if self.best is None or (rounded and not self.best[2]["rounded"]) or loss < self.best[0]:
            tensors = {name: tensor.cpu() for name, tensor in self.store.export().items()}
            self.best = (loss, tensors, result | {"rounded": rounded, "step": self.done})
        return result

    def alive(self, rounded: bool, rows: int = 8) -> list[dict]:
        """Measure liveness on rows of the training stream without padding."""
        ids, _ = self.bench.feed.batch("core", 4 * rows)
        full = ids[(ids != self.bench.pad).all(1)][:rows]
        full = ids[:rows] if not len(full) else full
        weights = {
            name: weight.detach()
            for name, weight in self.store.named(self.store.leaves(self.step.dtype, rounded)).items()
        }
        batch = torch.from_numpy(full.astype("int64")).to(self.bench.forward.device)
        result = liveness(weights, batch, self.bench.forward.config, self.step.stream_dtype)
        for entry in result:
            self.bench.log.write("alive", **entry)
        return result

    def save(self) -> None:
        """Save everything needed to resume, in one file that is replaced atomically."""
        path = self.bench.work / "state.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "settings": asdict(self.settings),
            "done": self.done,
            "elapsed": self.elapsed,
            "best": self.best,
            "feed": self.bench.feed.position(),
            "tensors": self.store.export(),
            "optimiser": self.optimiser.state(),
        }
        with atomic_path(path) as partial:
            torch.save(state, partial)

    def resume(self, path: Path) -> None:
        state = torch.load(path, map_location=self.store.device, weights_only=True)
        if state["settings"] != asdict(self.settings):
            raise OptionError(
                f"{path} was saved by a run with other settings. Give the same --set, or another --work."
            )
        self.store.load(state["tensors"])
        self.optimiser.load(state["optimiser"])
        self.done = state["done"]
        self.elapsed = state["elapsed"]
        self.best = state["best"]
        self.bench.feed.seek(state["feed"])
        self.bench.log.write("resumed", step=self.done, seconds=round(self.elapsed, 1))

    def _finish(self, rounded: bool) -> Outcome:
        if self.best is None or self.best[2]["step"] != self.done:
            self.measure(rounded)
        assert self.best is not None
        alive = self.alive(rounded)
        _, tensors, measured = self.best
        rate = self.done * self.settings.batch * self.settings.length / max(self.elapsed, 1e-9)
        self.bench.log.write(
            "finished",
            steps=self.done,
            seconds=round(self.elapsed, 1),
            tokens_per_second=round(rate),
            best_step=measured["step"],
            rounded=rounded,
            nats_per_token=round(self.best[0], 4),
        )
        self.step.forget()
        return Outcome(self.settings, tensors, measured, self.done, self.elapsed, rate, alive)

    def _wait(self) -> None:
        if self.store.device.type == "cuda":
            torch.cuda.synchronize()


def probe(bench: Bench, choices: dict[str, Settings], steps: int) -> list[Outcome]:
    """Compare settings on the same rows and number of steps; best first."""
    outcomes: list[tuple[float, str, Outcome]] = []
    for name, settings in choices.items():
        bench.feed.rewind()
        bench.log.label = name
        run = Run(bench, settings, Stop(steps=steps))
        try:
            outcome = run.train(marks=2, save_seconds=float("inf"))
        except FloatingPointError as error:
            bench.log.write("failed", error=str(error))
            continue
        outcomes.append((outcome.measured["both"]["nats_per_token"], name, outcome))
    bench.log.label = ""
    outcomes.sort(key=lambda entry: entry[0])
    print(probe_table([(name, outcome) for _, name, outcome in outcomes]), file=sys.stderr, flush=True)
    return [outcome for _, _, outcome in outcomes]


def probe_table(outcomes: list[tuple[str, Outcome]]) -> str:
    lines = ["held-out  mtp accept  mean share  write attn  write ffn  tokens/s  setting"]
    for name, outcome in outcomes:
        both, alive = outcome.measured["both"], outcome.alive

        def span(key: str, alive: list[dict] = alive) -> str:
            return f"{min(a[key] for a in alive):.2f}-{max(a[key] for a in alive):.2f}"

        loss = both["nats_per_token"]
        accepted = both["mtp_acceptance"]
        rate = outcome.tokens_per_second
        spans = "   ".join(span(key) for key in ("stream_mean_share", "attn_write", "ffn_write"))
        lines.append(f"{loss:8.4f}  {accepted:10.3f}  {spans}  {rate:8.0f}  {name}")
    return "\n".join(lines)
