"""Cost of capture: the engine without taps, with idle captures, and with captures that take rows.

    plain         the runner has no taps: the engine without this feature
    idle          the engine as it is; no request has a capture
    waiting       every request has a capture that takes nothing from the timed steps
    one hook      streams entering one layer, every token, to memory
    all streams   streams before attention and experts of every layer and at the end, every token, to memory
    files         the same to files; `stored` rows report how fast they became durable, next to the speed of the disk
    ready         rows that exist already, to files: how fast they become durable without a model producing them

All alternate within every round, in reversed order every other round; a ratio is the median over rounds of ratios
within a round. The speed of the disk is measured in the same rounds and directory: the same bytes written to one file
and synced.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import birkhoff
from birkhoff.bench.baselines import OurEngine, Tokens
from birkhoff.bench.report import Progress, Row, check_positive, checkpoint, facts, stream_shape, summary
from birkhoff.bench.timing import disk_seconds, generation_seconds, torch_threads
from birkhoff.capture.planner import CapturePlanner
from birkhoff.capture.spec.request import Capture
from birkhoff.engine.runner import Runner
from birkhoff.errors import CaptureWriteError
from birkhoff.hooks.plan import Plan, SiteRows

StoreTimes = tuple[int, float, float]  # bytes, seconds until durable, seconds of the disk alone
PHASES = ("prefill", "decode")
STREAMS = {"mhc_streams_pre_attn": "all", "mhc_streams_pre_mlp": "all", "mhc_streams_final": "all"}
CONTENDERS = ("plain", "idle", "waiting", "one hook", "all streams", "files")


@dataclass(frozen=True)
class InterpSetting:
    """Parameters, repeated in every row."""

    prompt_tokens: int = 256
    steps: int = 64
    rounds: int = 5
    batch: int = 4  # at the size of nano a round stores 134 MB
    threads: int = 2

    def __post_init__(self) -> None:
        check_positive(self)


class UntappedRunner(Runner):
    """A runner that never arms taps."""

    def _arm(self, *_: Any) -> None:
        return None


class CapturingEngine(OurEngine):
    """The engine with requests that have a capture, or none."""

    def __init__(
        self,
        engine: birkhoff.Engine,
        setting: InterpSetting,
        name: str,
        capture: Capture | None,
        root: Path | None,
    ):
        super().__init__(engine.v4_model, setting.batch, setting.prompt_tokens, setting.steps)
        self.name = name
        self._capture = capture
        self.prompt_tokens = setting.prompt_tokens
        self._schema = engine.schema
        self._capture_planner = CapturePlanner(
            engine.schema, engine.config.num_hidden_layers, "", root, overload_policy="block"
        )
        if name == "plain":
            self.core.runner = UntappedRunner(engine.v4_model, self.core.runner.state)

    def _plan(self, index: int, ids: Tokens) -> Plan | None:
        if self._capture is None:
            return None
        return self._capture_planner.plan(self._capture, tuple(ids), self.steps + 1)

    def finish(self) -> tuple[int, float]:
        """Bytes stored for the last prompts, and seconds from their start until all of them were durable."""
        assert all(request.done for request in self._requests)
        return self._stored([request.plan for request in self._requests if request.plan is not None]), (
            time.perf_counter() - self.began
        )

    def store_ready_rows(self, requests: int) -> tuple[int, float]:
        """As `finish`, for `requests` prompts whose rows exist already, delivered in chunks as in prefill."""
        assert self._capture is not None
        count, chunk = 4 * self.prompt_tokens, self.prompt_tokens
        ids = tuple(range(count))
        rows = {hook: torch.randn(chunk, *self._schema[hook].logical_shape) for hook in self._capture.hooks}
        began = time.perf_counter()
        plans = [self._capture_planner.plan(self._capture, ids, 1) for _ in range(requests)]
        for plan in plans:
            plan.open()
        for start in range(0, count, chunk):
            positions = ids[start : start + chunk]
            for plan in plans:
                (job,) = plan.jobs
                for hook, layer in job.keys:
                    job.deliver(SiteRows(hook, layer, rows[hook], positions, positions))
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
    """Measure a checkpoint; by default random weights of nano's size. `disk`: directory for files (default:
    temporary)."""
    setting = setting or InterpSetting()
    with (
        torch_threads(setting.threads),
        tempfile.TemporaryDirectory(prefix="birkhoff-bench-", dir=disk) as folder,
    ):
        path, name = checkpoint(model, folder)
        with birkhoff.load(path, device="cpu", max_requests=1) as engine:
            yield from _measure(engine, setting, Path(folder), name, progress)


def _measure(
    engine: birkhoff.Engine, setting: InterpSetting, folder: Path, model: str, progress: Progress | None
) -> Iterator[Row]:
    config = engine.v4_model.config
    prompts = torch.randint(
        config.vocab_size, (setting.batch, setting.prompt_tokens), generator=torch.Generator().manual_seed(0)
    )
    contenders = _contenders(engine, setting, folder)
    seconds: dict[str, dict[str, list[float]]] = {
        contender.name: {phase: [] for phase in PHASES} for contender in contenders
    }
    file_times: list[StoreTimes] = []
    ready_times: list[StoreTimes] = []
    try:
        for round_index in range(-1, setting.rounds):  # the first round is a warm-up
            for contender in contenders if round_index % 2 else reversed(contenders):
                prefill_seconds, decode_seconds = generation_seconds(
                    contender, prompts.tolist(), setting.steps
                )
                if round_index >= 0:
                    seconds[contender.name]["prefill"].append(prefill_seconds)
                    seconds[contender.name]["decode"].append(decode_seconds / setting.steps)
                if contender.name == "files":
                    stored, durable_seconds = contender.finish()
                    alone = disk_seconds(folder, stored)
                    file_times += [(stored, durable_seconds, alone)] if round_index >= 0 else []
                    stored, durable_seconds = contender.store_ready_rows(len(prompts))
                    alone = disk_seconds(folder, stored)
                    ready_times += [(stored, durable_seconds, alone)] if round_index >= 0 else []
            if progress is not None:
                progress(round_index + 2, setting.rounds + 1)
    finally:
        for contender in contenders:
            contender.close()
    common = {
        "bench": "interp",
        "model": model,
        "shape": stream_shape(config),
        "dtype": engine.settings["dtype"],
        **{name: value for name, value in vars(setting).items() if name != "threads"},
        **facts(),
    }
    for phase in PHASES:
        for name in CONTENDERS:
            contender_seconds, plain = seconds[name][phase], seconds["plain"][phase]
            ratio = summary([own / plain_ for own, plain_ in zip(contender_seconds, plain)])
            ms = summary([1e3 * value for value in contender_seconds])
            yield common | {"kind": "cost", "phase": phase, "contender": name, "ms": ms, "times_plain": ratio}
    for name, times in (("files", file_times), ("ready", ready_times)):
        rates = {
            "stored_mb_per_s": summary(
                [count / durable_seconds / 1e6 for count, durable_seconds, _ in times]
            ),
            "disk_mb_per_s": summary([count / disk_seconds / 1e6 for count, _, disk_seconds in times]),
            "share_of_disk": summary(
                [disk_seconds / durable_seconds for _, durable_seconds, disk_seconds in times]
            ),
        }
        yield common | {"kind": "stored", "contender": name, "stored_bytes": times[0][0], **rates}


def _contenders(engine: birkhoff.Engine, setting: InterpSetting, folder: Path) -> list[CapturingEngine]:
    middle = engine.config.num_hidden_layers // 2
    captures: dict[str, Capture | None] = {
        "plain": None,
        "idle": None,
        # Only the first token of the prompt, captured in prefill.
        "waiting": Capture({"mhc_streams_pre_attn": [middle]}, positions=[0]),
        "one hook": Capture({"mhc_streams_pre_attn": [middle]}, positions="all"),
        "all streams": Capture(STREAMS, positions="all"),
        "files": Capture(STREAMS, positions="all", returns="file", layout="sharded"),
    }
    return [
        CapturingEngine(engine, setting, name, capture, folder / "captures" if name == "files" else None)
        for name, capture in captures.items()
    ]
