"""Cost of serving: a server process under load, compared with the engine alone.

The engine runs first, a batch of distinct answers in its own process; then the server, for the given time, with as many
clients, each sending a new request when its answer has ended; then the engine again, since the speed of a machine
drifts; then ten times as many clients as there are slots. Answers are distinct because equal ones are cheaper: their
tokens use the same experts. Reported are the time to the first token and between tokens as seen by clients, tokens per
second relative to the engine, by wall time and by CPU time, the resident memory of the server over the run with the
size of its prefix cache, and whether every request ended.

The prefix cache grows until it is full. It is therefore filled first, with short prompts that are not repeated, for at
most the duration of the run; `pages_before` reports how far that got. From then on memory should not grow.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from birkhoff.bench.hostile import HostileTraffic
from birkhoff.bench.load_generator import LoadResult, run_load
from birkhoff.bench.report import Progress, facts, significant, summary

PROMPT = "Tell me a story about a fox."
MAX_FILL_SECONDS = 150.0
SERIES_SECONDS = 30.0  # between the points of a series

ENGINE = """
import sys, time, birkhoff
streams, tokens, rounds, cache_bytes = map(int, sys.argv[2:])
more = {"cache_bytes": cache_bytes} if cache_bytes else {}
engine = birkhoff.load(sys.argv[1], max_requests=streams, **more)
prompt = engine.encode_chat([{"role": "user", "content": %r}])
def once(seed):
    began, spent = time.perf_counter(), time.process_time()
    outputs = engine.generate(prompt, n=streams, max_tokens=tokens, ignore_eos=True, seed=seed)
    outputs = outputs if isinstance(outputs, list) else [outputs]
    tokens_made = sum(len(output.token_ids) for output in outputs)
    return tokens_made / (time.perf_counter() - began), (time.process_time() - spent) * 1e3 / tokens_made
once(0)
for seed in range(rounds):
    print(*once(seed + 1))
"""


@dataclass(frozen=True)
class ServeSetting:
    seconds: float = 60.0
    streams: int = 8
    tokens: int = 128
    threads: int = 1
    cache_bytes: int = 0  # 0: the default of the model
    hostile: bool = False  # a soak of hostile bodies at the end


def bench_serve(
    model: str, setting: ServeSetting, progress: Progress | None = None
) -> Iterator[dict[str, Any]]:
    """One row for the engine, one for the streams, one for the overload, and with `hostile` one for that."""
    common = {
        **facts(),
        "bench": "serve",
        "model": model,
        "streams": setting.streams,
        "tokens": setting.tokens,
    }
    if setting.cache_bytes:
        common["cache_bytes"] = setting.cache_bytes
    environment = {**os.environ, "OMP_NUM_THREADS": str(setting.threads)}
    engine_runs = [_engine_alone(model, setting, environment)]
    with _ServerProcess(model, setting, environment) as server:
        _fill(server, setting, min(MAX_FILL_SECONDS, setting.seconds))
        _streams(server, setting, min(10.0, setting.seconds))  # warm-up
        pages_before = server.metric("birkhoff_prefix_pages")
        memory = [(0.0, server.resident_bytes())]
        began = time.monotonic()
        server_cpu = server.cpu_seconds()
        client_cpu = time.process_time()

        def tick() -> None:
            passed = time.monotonic() - began
            memory.append((passed, server.resident_bytes()))
            if progress is not None:
                progress(int(min(passed, setting.seconds)), int(setting.seconds))

        result = _streams(server, setting, setting.seconds, tick)
        elapsed = time.monotonic() - began
        server_cpu = server.cpu_seconds() - server_cpu
        client_cpu, idle = time.process_time() - client_cpu, server.idle()
        memory.append((elapsed, server.resident_bytes()))
        engine_runs.append(_engine_alone(model, setting, environment))
        engine, cpu_ms = (sum(values) / len(engine_runs) for values in zip(*engine_runs))
        yield {
            **common,
            "kind": "engine",
            "tokens_per_s": [significant(rate) for rate, _ in engine_runs],
            "cpu_ms_per_token": [significant(ms) for _, ms in engine_runs],
        }
        generated = max(result.tokens, 1)
        rate = generated / elapsed
        yield {
            **common,
            "kind": "streams",
            "seconds": significant(elapsed),
            "tokens_per_s": significant(rate),
            "share_of_engine": significant(rate / engine),
            "cpu_ms_per_token": significant(server_cpu * 1e3 / generated),
            "cpu_share_of_engine": significant(cpu_ms * generated / (server_cpu * 1e3)),
            "callers_cpu_ms_per_token": significant(client_cpu * 1e3 / generated),
            "answers": result.ended,
            "failed": result.failed,
            "first_token_ms": spread(result.first),
            "between_tokens_ms": spread(result.between),
            "resident_bytes": _memory_course(memory),
            "prefix": {
                "pages_before": pages_before,
                **{
                    name: server.metric(f"birkhoff_prefix_{name}") for name in ("pages", "bytes", "evictions")
                },
            },
            "everything_ended": idle,
        }
        yield {**common, "kind": "overload", **_overload(server, setting)}
        if setting.hostile:
            yield {**common, "kind": "hostile", **_hostile(server, setting)}


def _engine_alone(model: str, setting: ServeSetting, environment: dict[str, str]) -> tuple[float, float]:
    """Tokens per second, and milliseconds of CPU time per token."""
    arguments = (setting.streams, setting.tokens, 3, setting.cache_bytes)
    command = [sys.executable, "-c", ENGINE % PROMPT, model, *map(str, arguments)]
    completed = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=600, check=True
    )
    rates, cpu = zip(*(map(float, line.split()) for line in completed.stdout.splitlines()))
    return summary(rates)["median"], summary(cpu)["median"]


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values) or [float("nan")]
    return {
        name: significant(ordered[min(int(len(ordered) * share), len(ordered) - 1)])
        for name, share in (("p50", 0.5), ("p95", 0.95))
    }


def _memory_course(memory: list[tuple[float, int]]) -> dict[str, Any]:
    """Resident bytes at the start, half-way, at the end and in between; and their growth in the second half:
    maximum, and per minute by linear regression."""
    second_half = memory[len(memory) // 2 :]
    mean = [sum(values) / len(second_half) for values in zip(*second_half)]
    covariance = sum((at - mean[0]) * (resident - mean[1]) for at, resident in second_half)
    variance = sum((at - mean[0]) ** 2 for at, _ in second_half)
    marks = itertools.takewhile(lambda mark: mark <= memory[-1][0], itertools.count(0.0, SERIES_SECONDS))
    return {
        "before": memory[0][1],
        "half": second_half[0][1],
        "after": memory[-1][1],
        "later_growth": max(resident for _, resident in second_half) - second_half[0][1],
        "later_growth_per_minute": round(60 * covariance / variance) if variance else 0,
        "series": [next(resident for at, resident in memory if at >= mark) for mark in marks],
    }


class _ServerProcess:
    """`birkhoff serve` in its own process."""

    def __init__(self, model: str, setting: ServeSetting, environment: dict[str, str]):
        command = [sys.executable, "-m", "birkhoff", "serve", "--model", model]
        command += f"--port 0 --log off --max-requests {setting.streams} --max-connections 256".split()
        if setting.cache_bytes:
            command += ["--cache-bytes", str(setting.cache_bytes)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        assert self.process.stdout is not None
        match = re.match(r"http://([\d.]+):(\d+)", self.process.stdout.readline())
        if match is None:
            raise OSError("the server did not start. What it says: birkhoff serve")
        self.address = match[1], int(match[2])

    def __enter__(self) -> _ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def get(self, path: str) -> bytes:
        with closing(HTTPConnection(*self.address, timeout=120)) as connection:
            connection.request("GET", path)
            return connection.getresponse().read()

    def idle(self, seconds: float = 30) -> bool:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if not json.loads(self.get("/slots"))["requests"]:
                return True
            time.sleep(0.1)
        return False

    def metric(self, name: str) -> float:
        """One series of `/metrics`."""
        match = re.search(rf"^{name}(?:_total)? (\S+)$".encode(), self.get("/metrics"), re.MULTILINE)
        return float(match[1]) if match else float("nan")

    def cpu_seconds(self) -> float:
        """CPU time of all threads, user and system; less affected by other load than wall time."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def _bodies(setting: ServeSetting, until: float = float("inf")) -> Iterator[dict[str, Any]]:
    """Request bodies with distinct seeds, until the time `until`."""
    for seed in itertools.count(time.monotonic_ns() % 2**40):
        if time.monotonic() >= until:
            return
        messages = [{"role": "user", "content": PROMPT}]
        yield {"messages": messages, "max_tokens": setting.tokens, "seed": seed, "ignore_eos": True}


def _fill(server: _ServerProcess, setting: ServeSetting, seconds: float) -> None:
    """Send distinct short prompts, a page or two each, until the prefix cache evicts pages or the time is up."""
    until, generator = time.monotonic() + seconds, random.Random(0)

    def bodies() -> Iterator[dict[str, Any]]:
        while time.monotonic() < until:
            words = " ".join(str(generator.randrange(1000, 10000)) for _ in range(40))
            yield {"messages": [{"role": "user", "content": words}], "max_tokens": 1}

    while time.monotonic() < until and not server.metric("birkhoff_prefix_evictions"):
        run_load(server.address, itertools.islice(bodies(), 8 * setting.streams), setting.streams)


def _streams(
    server: _ServerProcess, setting: ServeSetting, seconds: float, tick: Callable[[], None] = lambda: None
) -> LoadResult:
    """Every client repeats requests until the time is up and finishes its last answer."""
    return run_load(server.address, _bodies(setting, time.monotonic() + seconds), setting.streams, tick)


def _hostile(server: _ServerProcess, setting: ServeSetting) -> dict[str, Any]:
    """Hostile bodies beside one honest client for as long as the streams ran, and the memory before and after."""
    before = server.resident_bytes()
    memory = [(0.0, before)]
    began = time.monotonic()
    with HostileTraffic(server.address) as traffic:
        honest = run_load(
            server.address,
            _bodies(setting, began + setting.seconds),
            1,
            lambda: memory.append((time.monotonic() - began, server.resident_bytes())),
        )
    idle = server.idle()
    memory.append((time.monotonic() - began, server.resident_bytes()))
    return {
        "requests": traffic.statuses.total(),
        "statuses": {str(status): count for status, count in sorted(traffic.statuses.items())},
        "slowest_refusal_ms": significant(traffic.slowest_refusal * 1e3),
        "honest_answers": honest.ended,
        "honest_failed": honest.failed,
        "honest_first_token_ms": spread(honest.first),
        "resident_bytes": _memory_course(memory),
        "everything_ended": idle,
    }


def _overload(server: _ServerProcess, setting: ServeSetting) -> dict[str, Any]:
    """Ten times as many clients as slots at once; then one more, which must be served."""
    clients = 10 * setting.streams
    result = run_load(server.address, itertools.islice(_bodies(setting), clients), clients)
    idle = server.idle()
    last = run_load(server.address, itertools.islice(_bodies(setting), 1), 1)
    recovered = idle and last.ended == 1 and not last.failed
    return {"callers": clients, "statuses": result.statuses, "failed": result.failed, "recovered": recovered}
