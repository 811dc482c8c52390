"""What serving costs: a real server process, eight streams at a time, beside the engine's own rate.

The engine alone answers first, a batch of as many different answers in a process of its own; then the server, for as
long as was asked, with as many callers, each asking again when its answer has ended; then the engine again, since a
machine's speed drifts; then ten times as many callers as there is room for. Answers differ because equal ones are
cheaper: their tokens go to the same experts. Reported are the time to the first token and between tokens as callers saw
them, tokens per second as a share of the engine's, by the clock and by processor time, the server's resident memory
over the run with what its prefix cache holds, and whether every request ended.

A prefix cache grows until it is full. So it is filled first, with short prompts nobody asks again, for at most as long
as the run itself; `pages_before` says how far that came. From there on memory has no reason to grow.
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

from birkhoff.bench.load_generator import Seen, call_all
from birkhoff.bench.report import facts, significant, summary

PROMPT = "Tell me a story about a fox."
MOST_FILLING = 150.0  # seconds
SERIES = 30.0  # seconds between the points of a series
Advance = Callable[[int, int], None]

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
    cache_bytes: int = 0  # 0: what the model is given by default


def bench_serve(
    model: str, setting: ServeSetting, progress: Advance | None = None
) -> Iterator[dict[str, Any]]:
    """One line for the engine, one for the streams, one for the overload."""
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
    alone = [_engine_alone(model, setting, environment)]
    with _Server(model, setting, environment) as server:
        _fill(server, setting, min(MOST_FILLING, setting.seconds))
        _streams(server, setting, min(10.0, setting.seconds))  # warm: callers and kernels are ready
        filled = server.number("birkhoff_prefix_pages")
        memory = [(0.0, server.resident_bytes())]
        began = time.monotonic()
        spent = server.cpu_seconds()
        own = time.process_time()

        def tick() -> None:
            passed = time.monotonic() - began
            memory.append((passed, server.resident_bytes()))
            if progress is not None:
                progress(int(min(passed, setting.seconds)), int(setting.seconds))

        seen = _streams(server, setting, setting.seconds, tick)
        elapsed = time.monotonic() - began
        spent = server.cpu_seconds() - spent
        own, idle = time.process_time() - own, server.idle()
        memory.append((elapsed, server.resident_bytes()))
        alone.append(_engine_alone(model, setting, environment))
        engine, cpu_ms = (sum(each) / len(alone) for each in zip(*alone))
        yield {
            **common,
            "kind": "engine",
            "tokens_per_s": [significant(rate) for rate, _ in alone],
            "cpu_ms_per_token": [significant(ms) for _, ms in alone],
        }
        made = max(seen.tokens, 1)
        rate = made / elapsed
        yield {
            **common,
            "kind": "streams",
            "seconds": significant(elapsed),
            "tokens_per_s": significant(rate),
            "share_of_engine": significant(rate / engine),
            "cpu_ms_per_token": significant(spent * 1e3 / made),
            "cpu_share_of_engine": significant(cpu_ms * made / (spent * 1e3)),
            "callers_cpu_ms_per_token": significant(own * 1e3 / made),
            "answers": seen.ended,
            "failed": seen.failed,
            "first_token_ms": _spread(seen.first),
            "between_tokens_ms": _spread(seen.between),
            "resident_bytes": _course(memory),
            "prefix": {
                "pages_before": filled,
                **{
                    name: server.number(f"birkhoff_prefix_{name}") for name in ("pages", "bytes", "evictions")
                },
            },
            "everything_ended": idle,
        }
        yield {**common, "kind": "overload", **_overload(server, setting)}


def _engine_alone(model: str, setting: ServeSetting, environment: dict[str, str]) -> tuple[float, float]:
    """Tokens per second, and milliseconds of processor time per token."""
    numbers = (setting.streams, setting.tokens, 3, setting.cache_bytes)
    words = [sys.executable, "-c", ENGINE % PROMPT, model, *map(str, numbers)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=600, check=True)
    rates, cpu = zip(*(map(float, line.split()) for line in done.stdout.splitlines()))
    return summary(rates)["median"], summary(cpu)["median"]


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values) or [float("nan")]
    return {
        name: significant(ordered[min(int(len(ordered) * share), len(ordered) - 1)])
        for name, share in (("p50", 0.5), ("p95", 0.95))
    }


def _course(memory: list[tuple[float, int]]) -> dict[str, Any]:
    """Resident bytes at the beginning, half-way, at the end and in between; and how they grow in the second half: at
    most, and by the minute."""
    later = memory[len(memory) // 2 :]
    middle = [sum(each) / len(later) for each in zip(*later)]
    moved = sum((at - middle[0]) * (held - middle[1]) for at, held in later)
    spread = sum((at - middle[0]) ** 2 for at, _ in later)
    marks = itertools.takewhile(lambda mark: mark <= memory[-1][0], itertools.count(0.0, SERIES))
    return {
        "before": memory[0][1],
        "half": later[0][1],
        "after": memory[-1][1],
        "later_growth": max(held for _, held in later) - later[0][1],
        "later_growth_per_minute": round(60 * moved / spread) if spread else 0,
        "series": [next(held for at, held in memory if at >= mark) for mark in marks],
    }


class _Server:
    """`birkhoff serve` in a process of its own."""

    def __init__(self, model: str, setting: ServeSetting, environment: dict[str, str]):
        words = [
            sys.executable,
            "-m",
            "birkhoff",
            "serve",
            "--model",
            model,
            "--port",
            "0",
            "--log",
            "off",
            "--max-requests",
            str(setting.streams),
            "--max-connections",
            "256",
        ]
        if setting.cache_bytes:
            words += ["--cache-bytes", str(setting.cache_bytes)]
        self.process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        assert self.process.stdout is not None
        found = re.match(r"http://([\d.]+):(\d+)", self.process.stdout.readline())
        if found is None:
            raise OSError("the server did not start. What it says: birkhoff serve")
        self.address = found[1], int(found[2])

    def __enter__(self) -> _Server:
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

    def number(self, name: str) -> float:
        """One series of `/metrics`."""
        found = re.search(rf"^{name}(?:_total)? (\S+)$".encode(), self.get("/metrics"), re.MULTILINE)
        return float(found[1]) if found else float("nan")

    def cpu_seconds(self) -> float:
        """Of all its threads, computing and writing; on a busy machine this says more than the clock."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def _bodies(setting: ServeSetting, until: float = float("inf")) -> Iterator[dict[str, Any]]:
    """Calls for answers that differ from all others, until the time is up."""
    for seed in itertools.count(time.monotonic_ns() % 2**40):
        if time.monotonic() >= until:
            return
        messages = [{"role": "user", "content": PROMPT}]
        yield {"messages": messages, "max_tokens": setting.tokens, "seed": seed, "ignore_eos": True}


def _fill(server: _Server, setting: ServeSetting, seconds: float) -> None:
    """Short prompts of their own, a page or two each, until the prefix cache puts out old ones or the time is up."""
    until, pick = time.monotonic() + seconds, random.Random(0)

    def bodies() -> Iterator[dict[str, Any]]:
        while time.monotonic() < until:
            numbers = " ".join(str(pick.randrange(1000, 10000)) for _ in range(40))
            yield {"messages": [{"role": "user", "content": numbers}], "max_tokens": 1}

    while time.monotonic() < until and not server.number("birkhoff_prefix_evictions"):
        call_all(server.address, itertools.islice(bodies(), 8 * setting.streams), setting.streams)


def _streams(
    server: _Server, setting: ServeSetting, seconds: float, tick: Callable[[], None] = lambda: None
) -> Seen:
    """Each caller asks again and again until the time is up, and lets its last answer end."""
    return call_all(server.address, _bodies(setting, time.monotonic() + seconds), setting.streams, tick)


def _overload(server: _Server, setting: ServeSetting) -> dict[str, Any]:
    """Ten times as many callers as slots at once; then one more, who must be served."""
    callers = 10 * setting.streams
    seen = call_all(server.address, itertools.islice(_bodies(setting), callers), callers)
    idle = server.idle()
    after = call_all(server.address, itertools.islice(_bodies(setting), 1), 1)
    recovered = idle and after.ended == 1 and not after.failed
    return {"callers": callers, "statuses": seen.statuses, "failed": seen.failed, "recovered": recovered}
