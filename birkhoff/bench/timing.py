"""How benchmarks time things: calls on a GPU and on a CPU, CUDA graphs, kernels by class, and rounds of generation."""

from __future__ import annotations

import gc
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from birkhoff.bench.baselines import Baseline, Tokens

Call = Callable[[], Any]


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Use `count` PyTorch threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def release_memory() -> None:
    """Collect garbage and return cached GPU memory to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait for what was launched on a GPU; nothing elsewhere."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cuda_seconds(call: Call, count: int, warm: int = 0) -> list[float]:
    """Seconds of each of `count` calls by CUDA events, after `warm` untimed calls; every call is awaited."""
    for _ in range(warm):
        call()
    spans = []
    for _ in range(count):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        spans.append(begin.elapsed_time(end) / 1e3)
    return spans


def milliseconds(call: Call, device: torch.device, count: int = 20, warm: int = 4) -> list[float]:
    """Milliseconds of each of `count` consecutive calls; on a GPU by CUDA events without waiting in between, which
    hides the host time."""
    if device.type != "cuda":
        spans = []
        for _ in range(warm + count):
            began = time.perf_counter()
            call()
            spans.append((time.perf_counter() - began) * 1e3)
        return spans[warm:]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(warm + count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in zip(events[warm:], events[warm + 1 :])]


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def capture_graph(call: Call, warm: int = 1) -> torch.cuda.CUDAGraph:
    """Capture `call` as a CUDA graph after `warm` calls on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def graph_us(calls: Sequence[Call], count: int = 15) -> float:
    """Median microseconds of one of `calls`, captured in one CUDA graph and replayed `count` times."""

    def run() -> None:
        for call in calls:
            call()

    graph = capture_graph(run)
    graph.replay()
    return median(cuda_seconds(graph.replay, count)) * 1e6 / len(calls)


def kernel_times(call: Call) -> list[tuple[str, float]]:
    """Name and microseconds of every kernel that `call` launches."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as log:
        call()
        torch.cuda.synchronize()
    return [(event.name, event.device_time) for event in log.events() if event.device_type.name == "CUDA"]


def times_by_class(
    kernels: Sequence[tuple[str, float]], classes: Mapping[str, str], other: str
) -> dict[str, tuple[float, int]]:
    """Microseconds and launches by class, largest first; `classes` maps prefixes of kernel names to classes, of which
    the longest match counts."""
    spent: defaultdict[str, list[float]] = defaultdict(list)
    for name, us in kernels:
        prefix = max((prefix for prefix in classes if name.startswith(prefix)), key=len, default=None)
        spent[other if prefix is None else classes[prefix]].append(us)
    sums = {kind: (sum(values), len(values)) for kind, values in spent.items()}
    return dict(sorted(sums.items(), key=lambda item: -item[1][0]))


def generation_seconds(baseline: Baseline, prompts: list[Tokens], steps: int) -> tuple[float, float]:
    """Seconds of prefill of `prompts` and of `steps` decode steps."""
    began = time.perf_counter()
    tokens = baseline.prefill(prompts)
    prefilled = time.perf_counter()
    for _ in range(steps):
        tokens = baseline.step(tokens)
    return prefilled - began, time.perf_counter() - prefilled


def disk_seconds(folder: Path, count: int) -> float:
    """Seconds to write `count` bytes to one file and sync it."""
    block, path = os.urandom(1 << 20), folder / "bare"
    began = time.perf_counter()
    with path.open("wb", buffering=0) as stream:
        for start in range(0, count, len(block)):
            stream.write(block[: count - start])
        os.fsync(stream.fileno())
    spent = time.perf_counter() - began
    path.unlink()
    return spent
