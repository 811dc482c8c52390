"""What serving costs: a real server process, eight streams at a time, beside the engine's own rate.

The engine alone answers first, a batch of the same size in a process of its own; then the server, for as long as was
asked, with as many clients, each asking again when its answer has ended; then ten times as many clients as there is
room for. Reported are the time to the first token and between tokens as clients saw them, tokens per second as a share
of the engine's, by the clock and by processor time, the server's resident memory over the run, and whether every
request ended. Everything is spoken over a socket with the standard library, so that the client takes as little of the
machine as it can.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from birkhoff.bench.report import facts, significant, summary

PROMPT = "Tell me a story about a fox."
Advance = Callable[[int, int], None]

ENGINE = """
import sys, time, birkhoff
streams, tokens, rounds = map(int, sys.argv[2:])
engine = birkhoff.load(sys.argv[1], max_requests=streams)
prompt = engine.encode_chat([{"role": "user", "content": %r}])
def once():
    began, spent = time.perf_counter(), time.process_time()
    outputs = engine.generate([prompt] * streams, max_tokens=tokens, ignore_eos=True, seed=1)
    tokens_made = sum(len(output.token_ids) for output in outputs)
    return tokens_made / (time.perf_counter() - began), (time.process_time() - spent) * 1e3 / tokens_made
once()
for _ in range(rounds):
    print(*once())
"""


@dataclass(frozen=True)
class Setting:
    seconds: float = 60.0
    streams: int = 8
    tokens: int = 128
    threads: int = 1


@dataclass
class Seen:
    """What one client saw."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    tokens: int = 0
    ended: int = 0
    failed: list[str] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)


def bench_serve(model: str, setting: Setting, progress: Advance | None = None) -> Iterator[dict[str, Any]]:
    """One line for the engine, one for the streams, one for the overload."""
    common = {**facts(), "bench": "serve", "model": model, "streams": setting.streams, "tokens": setting.tokens}
    environment = {**os.environ, "OMP_NUM_THREADS": str(setting.threads)}
    alone = [_engine_alone(model, setting, environment)]
    with _Server(model, setting, environment) as server:
        _clients(server, setting, min(10.0, setting.seconds))  # warm: caches fill, clients and kernels are ready
        memory = [server.resident_bytes()]
        began, spent = time.monotonic(), server.cpu_seconds()
        seen = _clients(server, setting, setting.seconds, lambda: memory.append(server.resident_bytes()), progress)
        elapsed, spent = time.monotonic() - began, server.cpu_seconds() - spent
        idle = server.idle()
        alone.append(_engine_alone(model, setting, environment))
        engine, cpu_ms = (sum(each) / len(alone) for each in zip(*alone))
        yield {**common, "kind": "engine", "tokens_per_s": [significant(rate) for rate, _ in alone],
               "cpu_ms_per_token": [significant(ms) for _, ms in alone]}  # fmt: skip
        made = sum(each.tokens for each in seen)
        rate = made / elapsed
        yield {
            **common, "kind": "streams", "seconds": significant(elapsed), "tokens_per_s": significant(rate),
            "share_of_engine": significant(rate / engine), "cpu_ms_per_token": significant(spent * 1e3 / max(made, 1)),
            "cpu_share_of_engine": significant(cpu_ms * max(made, 1) / (spent * 1e3)),
            "answers": sum(each.ended for each in seen),
            "failed": [text for each in seen for text in each.failed],
            "first_token_ms": _spread([ms for each in seen for ms in each.first]),
            "between_tokens_ms": _spread([ms for each in seen for ms in each.between]),
            "resident_bytes": {"before": memory[0], "half": memory[len(memory) // 2], "after": memory[-1]},
            "everything_ended": idle,
        }  # fmt: skip
        yield {**common, "kind": "overload", **_overload(server, setting)}


def _engine_alone(model: str, setting: Setting, environment: dict[str, str]) -> tuple[float, float]:
    """Tokens per second, and milliseconds of processor time per token."""
    words = [sys.executable, "-c", ENGINE % PROMPT, model, str(setting.streams), str(setting.tokens), "3"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=600, check=True)
    rates, cpu = zip(*(map(float, line.split()) for line in done.stdout.splitlines()))
    return summary(rates)["median"], summary(cpu)["median"]


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values) or [float("nan")]
    return {
        name: significant(ordered[min(int(len(ordered) * share), len(ordered) - 1)])
        for name, share in (("p50", 0.5), ("p95", 0.95))
    }


class _Server:
    """`birkhoff serve` in a process of its own."""

    def __init__(self, model: str, setting: Setting, environment: dict[str, str]):
        words = [sys.executable, "-m", "birkhoff", "serve", "--model", model, "--port", "0", "--log", "off",
                 "--max-requests", str(setting.streams), "--max-connections", "256"]  # fmt: skip
        self.process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        assert self.process.stdout is not None
        found = re.match(r"http://([\d.]+):(\d+)", self.process.stdout.readline())
        if found is None:
            raise OSError("the server did not start. What it says: birkhoff serve")
        self.host, self.port = found[1], int(found[2])

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def open(self) -> HTTPConnection:
        return HTTPConnection(self.host, self.port, timeout=120)

    def idle(self, seconds: float = 30) -> bool:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with closing(self.open()) as connection:
                connection.request("GET", "/slots")
                if not json.load(connection.getresponse())["requests"]:
                    return True
            time.sleep(0.1)
        return False

    def cpu_seconds(self) -> float:
        """Of all its threads, computing and writing; on a busy machine this says more than the clock."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def _clients(
    server: _Server,
    setting: Setting,
    seconds: float,
    tick: Callable[[], Any] | None = None,
    progress: Advance | None = None,
) -> list[Seen]:
    """Each client asks again and again until the time is up, and lets its last answer end."""
    until, seen = time.monotonic() + seconds, [Seen() for _ in range(setting.streams)]

    def client(mine: Seen, number: int) -> None:
        round_ = 0
        while time.monotonic() < until:
            _stream(server, setting, mine, 1000 * number + round_)
            round_ += 1

    threads = [threading.Thread(target=client, args=(mine, place)) for place, mine in enumerate(seen)]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    while any(thread.is_alive() for thread in threads):
        threads[0].join(1.0)
        if tick is not None:
            tick()
        if progress is not None:
            progress(int(min(time.monotonic() - began, seconds)), int(seconds))
        for thread in threads:
            thread.join(0.01)
    return seen


def _body(setting: Setting, seed: int) -> bytes:
    asked = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": setting.tokens, "seed": seed}
    return json.dumps({**asked, "ignore_eos": True, "stream": True, "return_token_ids": True}).encode()


def _stream(server: _Server, setting: Setting, mine: Seen, seed: int) -> None:
    """One answer; a chunk that names token ids is a token, or a few that came together."""
    connection = server.open()
    began = last = time.perf_counter()
    try:
        connection.request("POST", "/v1/chat/completions", _body(setting, seed), {"content-type": "application/json"})
        answer = connection.getresponse()
        mine.statuses[answer.status] = mine.statuses.get(answer.status, 0) + 1
        if answer.status != 200:
            answer.read()
            return
        first, done = True, False
        while line := answer.readline():
            if line.startswith(b'data: {"error"'):
                mine.failed.append(line.decode()[:200])
            done = done or line.startswith(b"data: [DONE]")
            if b'"token_ids":[' in line and b'"delta":{' in line:
                now = time.perf_counter()
                (mine.first if first else mine.between).append((now - (began if first else last)) * 1e3)
                first, last = False, now
            found = re.search(rb'"output_tokens":(\d+)', line)
            mine.tokens += int(found[1]) if found else 0
        mine.ended += done
        if not done:
            mine.failed.append("the stream broke off")
    except OSError as error:
        mine.failed.append(repr(error))
    finally:
        connection.close()


def _overload(server: _Server, setting: Setting) -> dict[str, Any]:
    """Ten times as many callers as slots at once; then one more, who must be served."""
    seen = [Seen() for _ in range(10 * setting.streams)]
    threads = [threading.Thread(target=_stream, args=(server, setting, mine, place)) for place, mine in enumerate(seen)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statuses: dict[int, int] = {}
    for mine in seen:
        for status, count in mine.statuses.items():
            statuses[status] = statuses.get(status, 0) + count
    after = Seen()
    idle = server.idle()
    _stream(server, setting, after, 1)
    failed = [text for mine in seen for text in mine.failed]
    return {"callers": len(seen), "statuses": statuses, "failed": failed, "recovered": idle and after.ended == 1}
