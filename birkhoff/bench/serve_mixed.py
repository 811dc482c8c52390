"""Serving mixed traffic: plain, steered and captured answers as streams over HTTP, compared with the engine alone.

One process makes the engine, from a checkpoint or with random weights of full width on a GPU. It first runs the traffic
by itself (`run_engine`): as many requests at a time as there will be clients, a new one whenever one has ended, on one
thread. Then it serves the same engine, and clients send the same kind of traffic over HTTP. Reported are the time to
the first token and between tokens as clients see them, tokens per second relative to the engine alone, and the share of
time in which the GPU was busy, as its driver counts it. Every prompt is new: nothing comes from the prefix cache.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from birkhoff.api.engine import Engine
from birkhoff.api.load import load
from birkhoff.bench.goodput import random_core
from birkhoff.bench.load_generator import LoadResult, run_load
from birkhoff.bench.report import Row, facts, significant
from birkhoff.bench.serve import spread
from birkhoff.convert.presets import preset
from birkhoff.embedded import EMBEDDED
from birkhoff.engine.request import Request
from birkhoff.text.chat_format import V4Chat
from birkhoff.text.prompt_texts import load_prompt_texts
from birkhoff.text.tokenizer import Tokenizer

VECTOR = "bench"
NANO = EMBEDDED / "nano"
BUSY_MS = 200  # between samples of the GPU's utilization

CHILD = """
import json, sys
from birkhoff.bench.serve_mixed import MixedSetting, engine_alone, make_engine
from birkhoff.server.process import serve
from birkhoff.server.server_settings import ServerSettings
setting = MixedSetting(**json.loads(sys.argv[1]))
engine = make_engine(setting)
print(json.dumps(engine_alone(engine, setting)), flush=True)
settings = ServerSettings(port=0, log="off", max_connections=4 * setting.streams, max_queue=4 * setting.streams)
raise SystemExit(serve(settings, lambda: engine, lambda url: print(url, flush=True), {"model": engine.name}))
"""


@dataclass(frozen=True)
class MixedSetting:
    """`steered` and `captured` are shares of the requests. Answers have half to one and a half times `tokens`."""

    model: str | None = None  # None: random weights of `layers` layers, on a GPU
    device: str = "cuda"
    layers: int = 43
    distinct: int = 36
    seconds: float = 20.0
    streams: int = 64
    tokens: int = 128
    prompt_words: int = 128  # random numbers of four digits
    steered: float = 0.3
    captured: float = 0.1


def make_engine(setting: MixedSetting) -> Engine:
    """The engine to measure, with a random vector under the name `VECTOR`."""
    if setting.model is not None:
        engine = load(
            setting.model,
            device=setting.device,
            max_requests=setting.streams,
            max_batch_tokens=4096,
            max_context=min(8192, 4 * (setting.tokens + 8 * setting.prompt_words)),
        )
    else:
        config = preset("flash", setting.layers, False)
        core = random_core(config, setting.distinct, setting.streams, 4096)
        tokenizer = Tokenizer.from_file(NANO, vocab_size=config.vocab_size)
        chat = V4Chat(tokenizer, load_prompt_texts(NANO, None), config.max_position_embeddings)
        engine = Engine(core, tokenizer, chat, f"random flash, {setting.layers} layers")
    width = engine.config.hidden_size
    engine.modules[VECTOR] = torch.randn(width, generator=torch.Generator().manual_seed(0)) * width**-0.5
    return engine


def bodies(setting: MixedSetting, layers: int, until: float) -> Iterator[dict[str, Any]]:
    """Bodies of chat completions, until the time `until`; some are steered, some captured, as the shares say."""
    draw = random.Random(time.monotonic_ns())
    layer = layers // 2
    for number in itertools.count():
        if time.monotonic() >= until:
            return
        words = " ".join(str(draw.randrange(1000, 10000)) for _ in range(setting.prompt_words))
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": words}],
            "max_tokens": draw.randint(max(setting.tokens // 2, 1), setting.tokens * 3 // 2),
            "seed": number,
            "ignore_eos": True,
        }
        share = (number * 0.618034) % 1.0  # spread evenly over the requests
        if share < setting.steered:
            site = {"hook": "mhc_streams_pre_attn", "layers": [layer]}
            body["interventions"] = [{"op": "add", "at": site, "vector": f"@{VECTOR}", "streams": "all"}]
        elif share < setting.steered + setting.captured:
            body["capture"] = {"memory": {"hooks": {"mlp_out": [layer]}, "positions": "all_generated"}}
        yield body


def request_of(engine: Engine, body: dict[str, Any]) -> Request:
    """The request that a server makes of a body."""
    steering = {name: body[name] for name in ("interventions",) if name in body}
    sampling = {name: body[name] for name in ("max_tokens", "seed", "ignore_eos")}
    (request,) = engine.requests(
        engine.encode_chat(body["messages"]),
        steer=engine.edits_from_json(steering) if steering else None,
        capture=body.get("capture"),
        thinking=False,
        **sampling,
    )
    return request


def run_engine(engine: Engine, work: Iterator[dict[str, Any]], concurrency: int) -> LoadResult:
    """The counterpart of `run_load` without a server: one thread submits and steps."""
    result, core = LoadResult(), engine._core
    running: dict[Request, tuple[int, float]] = {}  # tokens seen, and when
    exhausted = False
    while running or not exhausted:
        while not exhausted and len(running) < concurrency:
            body = next(work, None)
            if body is None:
                exhausted = True
                break
            began = time.perf_counter()
            request = request_of(engine, body)
            core.submit(request)
            running[request] = (0, began)
        if not running:
            break
        core.step()
        now = time.perf_counter()
        for request, (count, last) in list(running.items()):
            made = len(request.output_ids)
            if made > count:
                (result.first if count == 0 else result.between).append((now - last) * 1e3)
                running[request] = (made, now)
            if request.done:
                result.ended += 1
                result.tokens += made
                if request.error is not None:
                    result.failed.append(str(request.error))
                del running[request]
    return result


def engine_alone(engine: Engine, setting: MixedSetting) -> Row:
    """The traffic of the setting without a server, after a short warm-up."""
    layers = engine.config.num_hidden_layers
    run_engine(engine, bodies(setting, layers, time.monotonic() + min(3.0, setting.seconds)), setting.streams)
    began = time.monotonic()
    with GpuBusy(setting.device) as busy:
        result = run_engine(engine, bodies(setting, layers, began + setting.seconds), setting.streams)
    return _row(result, time.monotonic() - began, busy) | {"layers": layers}


class GpuBusy:
    """Samples the utilization that the driver reports: the share of time in which some kernel ran."""

    def __init__(self, device: str):
        self.samples: list[float] = []
        self._process: subprocess.Popen[str] | None = None
        self._command = shutil.which("nvidia-smi") if device.startswith("cuda") else None

    def __enter__(self) -> GpuBusy:
        if self._command is not None:
            query = ["--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-i", "0"]
            self._process = subprocess.Popen(
                [self._command, *query, "-lms", str(BUSY_MS)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            self._thread = threading.Thread(target=self._read, args=(self._process,), daemon=True)
            self._thread.start()
        return self

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip().isdigit():
                self.samples.append(int(line) / 100)

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(10)
            self._thread.join(10)

    @property
    def share(self) -> float | None:
        """The mean; None without a GPU or its tool."""
        return significant(sum(self.samples) / len(self.samples)) if self.samples else None


def _row(result: LoadResult, elapsed: float, busy: GpuBusy) -> Row:
    return {
        "seconds": significant(elapsed),
        "tokens_per_s": significant(result.tokens / elapsed),
        "answers": result.ended,
        "failed": result.failed[:5],
        "first_token_ms": spread(result.first),
        "between_tokens_ms": spread(result.between),
        "gpu_busy": busy.share,
    }


def bench_mixed(setting: MixedSetting) -> Iterator[Row]:
    """One row for the engine alone, one for the streams of the server."""
    common = {
        **facts(),
        "bench": "serve",
        "model": setting.model or f"random flash, {setting.layers} layers",
        **{
            key: value for key, value in asdict(setting).items() if key not in ("model", "layers", "distinct")
        },
    }
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, json.dumps(asdict(setting))],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line.startswith("{"):
            raise OSError("the engine did not start; its messages are above.")
        alone = json.loads(line)
        layers = alone["layers"]
        yield {**common, "kind": "engine, mixed traffic", **alone}
        match = re.match(r"http://([\d.]+):(\d+)", process.stdout.readline())
        if match is None:
            raise OSError("the server did not start; its messages are above.")
        address = match[1], int(match[2])
        warm = time.monotonic() + min(3.0, setting.seconds)
        run_load(address, bodies(setting, layers, warm), setting.streams)
        began = time.monotonic()
        with GpuBusy(setting.device) as busy:
            result = run_load(address, bodies(setting, layers, began + setting.seconds), setting.streams)
        row = _row(result, time.monotonic() - began, busy)
        share = row["tokens_per_s"] / alone["tokens_per_s"]
        yield {
            **common,
            "kind": "streams, mixed traffic",
            "layers": layers,
            **row,
            "share_of_engine": significant(share),
        }
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()
