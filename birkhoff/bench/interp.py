"""What looking costs: the engine with nothing to look at, with captures that wait, and with captures that take rows.

    plain         the runner has no taps to arm: what the engine would be without this feature
    idle          the engine as it is, and no request asks for anything
    waiting       every request carries a capture that wants nothing of the steps that are timed
    one hook      streams entering one layer, every token, to memory
    all streams   streams before attention and experts of every layer and at the end, every token, to memory
    files         the same to files; `stored` rows say how fast they became durable, beside what the disk can do
    ready         rows that are there already, to files: how fast they become durable when no model has to make them

All take turns within every round, in alternating order, and a ratio is the median over rounds of ratios within a
round. The disk's own rate is measured in the same rounds and place: the same bytes in one file, written and synced.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import birkhoff
from birkhoff.bench.baselines import OurEngine, Tokens
from birkhoff.bench.report import facts, significant, summary
from birkhoff.capture.planner import CapturePlanner
from birkhoff.capture.spec.request import Capture
from birkhoff.convert.synth import synth
from birkhoff.engine.request import Request
from birkhoff.engine.runner import Runner
from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.errors import CaptureWriteError, OptionError
from birkhoff.hooks.plan import Plan, SiteRows

Row = dict[str, Any]
Progress = Callable[[int, int], None]
Stored = tuple[int, float, float]  # bytes, seconds until durable, seconds of the bare disk
PHASES = ("prefill", "decode")
STREAMS = {"mhc_streams_pre_attn": "all", "mhc_streams_pre_mlp": "all", "mhc_streams_final": "all"}
CONTENDERS = ("plain", "idle", "waiting", "one hook", "all streams", "files")


@dataclass(frozen=True)
class InterpSetting:
    """What is measured; every row repeats it."""

    prompt_tokens: int = 256
    steps: int = 64
    rounds: int = 5
    batch: int = 4  # at nano's size a round stores 134 MB, in memory and in files
    threads: int = 2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise OptionError(f"{name} is {value}, expected a positive whole number.")


class UntappedRunner(Runner):
    """A runner that never looks whether anybody wants something."""

    def _arm(self, *_: Any) -> None:
        return None


class CapturingEngine(OurEngine):
    """Our engine with requests that carry a capture, or none."""

    def __init__(
        self,
        engine: birkhoff.Engine,
        setting: InterpSetting,
        name: str,
        wish: Capture | None,
        root: Path | None,
    ):
        super().__init__(engine.model, setting.batch, setting.prompt_tokens, setting.steps)
        self.name = name
        self._wish = wish
        self._began = 0.0
        self.prompt_tokens = setting.prompt_tokens
        self._schema = engine.schema
        self._capture_planner = CapturePlanner(
            engine.schema, engine.config.num_hidden_layers, "", root, overload_policy="block"
        )
        if name == "plain":
            self.core.runner = UntappedRunner(engine.model, self.core.runner.state)

    def prefill(self, prompts: list[Tokens]) -> Tokens:
        for request in self._requests:
            self.core.cancel(request)
        options = SamplingParams(temperature=0, max_tokens=self.steps + 1, ignore_eos=True)
        self._began = time.perf_counter()
        self._requests = [
            Request(tuple(ids), options, options.max_tokens, seed=0, plan=self._plan(ids)) for ids in prompts
        ]
        for request in self._requests:
            self.core.submit(request)
        return self.step([])

    def _plan(self, ids: Tokens) -> Plan | None:
        return (
            None if self._wish is None else self._capture_planner.plan(self._wish, tuple(ids), self.steps + 1)
        )

    def settle(self) -> tuple[int, float]:
        """Bytes that were stored for the last prompts, and seconds from their start until all of them were durable."""
        assert all(request.done for request in self._requests)
        return self._stored([request.plan for request in self._requests if request.plan is not None]), (
            time.perf_counter() - self._began
        )

    def drain(self, requests: int) -> tuple[int, float]:
        """The same for so many prompts whose rows are there already, in pieces as a prompt is read."""
        assert self._wish is not None
        count, piece = 4 * self.prompt_tokens, self.prompt_tokens
        ids = tuple(range(count))
        made = {hook: torch.randn(piece, *self._schema[hook].logical_shape) for hook in self._wish.hooks}
        began = time.perf_counter()
        plans = [self._capture_planner.plan(self._wish, ids, 1) for _ in range(requests)]
        for plan in plans:
            plan.open()
        for start in range(0, count, piece):
            places = ids[start : start + piece]
            for plan in plans:
                (job,) = plan.jobs
                for hook, layer in job.keys:
                    job.deliver(SiteRows(hook, layer, made[hook], places, places, piece))
        for plan in plans:
            plan.close("length", count + 1)
        return self._stored(plans), time.perf_counter() - began

    def _stored(self, plans: list[Plan]) -> int:
        stored = 0
        for plan in plans:
            (capture,) = plan.results.captures
            result = capture.result()
            if result.status != "ok":
                raise CaptureWriteError(
                    f"a capture of the benchmark failed: {result.error}. Is the disk full?"
                )
            stored += result.bytes
        return stored

    def close(self) -> None:
        self.core.close()
        self._capture_planner.close()


def bench_interp(
    model: str | Path | None = None,
    setting: InterpSetting | None = None,
    *,
    disk: str | Path | None = None,
    progress: Progress | None = None,
) -> Iterator[Row]:
    """Measure a checkpoint, or a random one of nano's size. `disk` is where files go: a temporary place without."""
    setting = setting or InterpSetting()
    threads = torch.get_num_threads()
    torch.set_num_threads(setting.threads)
    try:
        with tempfile.TemporaryDirectory(prefix="birkhoff-bench-", dir=disk) as folder:
            given = Path(folder) / "nano" if model is None else model
            if model is None:
                synth(given, "nano")
            with birkhoff.load(given, device="cpu", max_requests=1) as engine:
                yield from _measure(engine, setting, Path(folder), model, progress)
    finally:
        torch.set_num_threads(threads)


def _measure(
    engine: birkhoff.Engine,
    setting: InterpSetting,
    folder: Path,
    model: str | Path | None,
    progress: Progress | None,
) -> Iterator[Row]:
    config = engine.config
    drawn = torch.randint(
        config.vocab_size, (setting.batch, setting.prompt_tokens), generator=torch.Generator().manual_seed(0)
    )
    everybody = _contenders(engine, setting, folder)
    seconds: dict[str, dict[str, list[float]]] = {
        who.name: {phase: [] for phase in PHASES} for who in everybody
    }
    stores: list[Stored] = []
    drains: list[Stored] = []
    try:
        for number in range(-1, setting.rounds):  # the first round only warms up
            for who in everybody if number % 2 else reversed(everybody):
                read, written = _round(who, drawn.tolist(), setting.steps)
                if number >= 0:
                    seconds[who.name]["prefill"].append(read)
                    seconds[who.name]["decode"].append(written / setting.steps)
                if who.name == "files":
                    stored, durable = who.settle()
                    bare = _bare_disk(folder, stored)
                    stores += [(stored, durable, bare)] if number >= 0 else []
                    stored, durable = who.drain(len(drawn))
                    bare = _bare_disk(folder, stored)
                    drains += [(stored, durable, bare)] if number >= 0 else []
            if progress is not None:
                progress(number + 2, setting.rounds + 1)
    finally:
        for who in everybody:
            who.close()
    common = {
        "bench": "interp",
        "model": "synth nano" if model is None else str(model),
        "shape": {
            "layers": config.num_hidden_layers,
            "hidden": config.hidden_size,
            "streams": config.hc_mult,
        },
        "dtype": engine.settings["dtype"],
        **{name: value for name, value in vars(setting).items() if name != "threads"},
        **facts(),
    }
    for phase in PHASES:
        for name in CONTENDERS:
            own, plain = seconds[name][phase], seconds["plain"][phase]
            ratio = summary([one / other for one, other in zip(own, plain)])
            ms = summary([1e3 * value for value in own])
            yield common | {"kind": "cost", "phase": phase, "contender": name, "ms": ms, "times_plain": ratio}
    for name, times in (("files", stores), ("ready", drains)):
        rates = {
            "stored_mb_per_s": summary([count / durable / 1e6 for count, durable, _ in times]),
            "disk_mb_per_s": summary([count / bare / 1e6 for count, _, bare in times]),
            "share_of_disk": summary([bare / durable for _, durable, bare in times]),
        }
        yield common | {"kind": "stored", "contender": name, "stored_bytes": times[0][0], **rates}


def _contenders(engine: birkhoff.Engine, setting: InterpSetting, folder: Path) -> list[CapturingEngine]:
    middle = engine.config.num_hidden_layers // 2
    wishes: dict[str, Capture | None] = {
        "plain": None,
        "idle": None,
        # Between the places that are timed: the prompt's first token is taken in the step that reads it.
        "waiting": Capture({"mhc_streams_pre_attn": [middle]}, positions=[0]),
        "one hook": Capture({"mhc_streams_pre_attn": [middle]}, positions="all"),
        "all streams": Capture(STREAMS, positions="all"),
        "files": Capture(STREAMS, positions="all", returns="file", layout="sharded"),
    }
    return [
        CapturingEngine(engine, setting, name, wish, folder / "captures" if name == "files" else None)
        for name, wish in wishes.items()
    ]


def _round(who: CapturingEngine, prompts: list[Tokens], steps: int) -> tuple[float, float]:
    """Seconds of reading the prompts and of writing the answers, once."""
    began = time.perf_counter()
    tokens = who.prefill(prompts)
    read = time.perf_counter()
    for _ in range(steps):
        tokens = who.step(tokens)
    return read - began, time.perf_counter() - read


def _bare_disk(folder: Path, count: int) -> float:
    """Seconds to write so many bytes to one file and sync it."""
    block, path = os.urandom(1 << 20), folder / "bare"
    began = time.perf_counter()
    with path.open("wb", buffering=0) as stream:
        for start in range(0, count, len(block)):
            stream.write(block[: count - start])
        os.fsync(stream.fileno())
    taken = significant(time.perf_counter() - began, 9)
    path.unlink()
    return taken
