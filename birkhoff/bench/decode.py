"""Decoding speed of the full-width model on a GPU, with the check that it is the same model in the same run.

`bench_decode` yields rows. `agreement`: a model of a few full-width layers, prompts of several lengths read by the
plain path on the device, then decoded by the kernels and by the plain path; logits are compared. `decode`: tokens per
second of all layers at each batch size, weights random and made on the device, states as long as `context`, one CUDA
graph per step with the greedy choice and the next positions inside it. `profile`: microseconds of a step by kernel,
beside what the bytes it must read would take at the device's measured reading speed.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from birkhoff.bench.report import facts, significant, summary
from birkhoff.bench.synthetic import filled_state, random_on_device
from birkhoff.config import V4Config
from birkhoff.convert.presets import preset
from birkhoff.hooks.tap import NoTap
from birkhoff.model.batch import Batch, Piece
from birkhoff.model.desk import Desk
from birkhoff.model.device import Decoder
from birkhoff.model.state import State

Row = dict[str, Any]
TOLERANCE = 0.02  # of the logits' spread; both paths round to bfloat16 some forty times a layer


def device_facts(device: torch.device) -> Row:
    import triton

    about = torch.cuda.get_device_properties(device)
    return {**facts(), "device": about.name, "memory": about.total_memory, "triton": triton.__version__,
            "cuda": torch.version.cuda}  # fmt: skip


def reading_speed(device: torch.device) -> float:
    """Bytes a second of summing 4 GiB, best of several: the ceiling that floors are computed with."""
    data = torch.empty(1 << 30, dtype=torch.float32, device=device).normal_()
    best = min(_seconds(lambda: data.sum(), 5))
    return data.nbytes / best


def _seconds(call, times: int) -> list[float]:
    spans = []
    for _ in range(times):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        spans.append(begin.elapsed_time(end) / 1e3)
    return spans


@torch.inference_mode()
def agreement(config: V4Config, device: torch.device, lengths: Sequence[int], steps: int, fast: bool) -> Row:
    """Prompts of `lengths` tokens read plainly, then `steps` tokens by the decoder and by the plain path."""
    model = random_on_device(config, device, seed=1)
    rows = len(lengths)
    tokens = torch.randint(config.vocab_size, (rows, max(lengths) + steps))
    states = [State.contiguous(config, rows, max(lengths) + steps, device=device, dtype=model.numerics.dtype)
              for _ in range(2)]  # fmt: skip
    for state in states:
        for slot, length in enumerate(lengths):
            model.run(Batch.of([Piece(slot, 0, tokens[slot, :length])], device), state, NoTap())
    decoder = Decoder(model, states[1], fast=fast)
    desk = decoder.desk(rows, max(lengths) + steps)
    worst, same = [], 0
    for step in range(steps):
        at = [length + step for length in lengths]
        pieces = [Piece(slot, at[slot], tokens[slot, at[slot]].view(1)) for slot in range(rows)]
        hidden, _ = model.run(Batch.of(pieces, device), states[0], NoTap())
        plain = model.logits(hidden.to(model.head.weight.dtype)).float()
        place(desk, [int(tokens[slot, at[slot]]) for slot in range(rows)], at)
        desk.poison()
        mine = decoder.step(desk)
        worst += ((mine - plain).norm(dim=-1) / plain.norm(dim=-1)).tolist()
        same += int((mine.argmax(-1) == plain.argmax(-1)).sum())
    ordered = sorted(worst)
    return {
        "kind": "agreement", "layers": config.num_hidden_layers, "fast": fast, "prompt_tokens": list(lengths),
        "steps": steps, "error_median": significant(ordered[len(ordered) // 2]), "error_most": significant(ordered[-1]),
        "greedy_same": significant(same / len(worst)), "passed": ordered[len(ordered) // 2] < TOLERANCE,
    }  # fmt: skip


@torch.inference_mode()
def place(desk: Desk, tokens: Sequence[int], positions: Sequence[int]) -> None:
    device = desk.token_ids.device
    desk.token_ids.copy_(torch.tensor(tokens, device=device))
    desk.positions.copy_(torch.tensor(positions, device=device))
    desk.slots.copy_(torch.arange(desk.rows, device=device))


def advance(decoder: Decoder, desk: Desk) -> None:
    """One step with the greedy choice and the next position, all on the device."""
    logits = decoder.step(desk)
    desk.token_ids.copy_(logits.argmax(-1))
    desk.positions.add_(1)


def captured(decoder: Decoder, desk: Desk) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            advance(decoder, desk)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        advance(decoder, desk)
    return graph


@torch.inference_mode()
def decode_speed(decoder: Decoder, batch: int, context: int, steps: int) -> tuple[Row, Desk]:
    """Milliseconds a step, tokens fed back on the device; positions begin at `context`."""
    desk = decoder.desk(batch, context + 256)
    random = torch.randint(decoder.config.vocab_size, (batch,)).tolist()
    place(desk, random, [context] * batch)
    graph = captured(decoder, desk)
    place(desk, random, [context] * batch)
    graph.replay()
    torch.cuda.synchronize()
    spans = _seconds(graph.replay, steps)
    began = time.perf_counter()
    read = []
    for _ in range(20):
        graph.replay()
        read.append(desk.token_ids.tolist())  # as a server would: every token is looked at
    seen = (time.perf_counter() - began) / 20
    ms = [span * 1e3 for span in spans]
    row = {
        "kind": "decode", "batch": batch, "context": context, "layers": decoder.config.num_hidden_layers,
        "kernels": decoder.kernels.name, "steps": steps, "ms": summary(ms),
        "tokens_per_second": significant(batch / (sorted(ms)[len(ms) // 2] / 1e3)),
        "tokens_per_second_read_by_host": significant(batch / seen),
        "distinct_tokens": len({token for tokens in read for token in tokens}),
    }  # fmt: skip
    del graph
    return row, desk


@torch.inference_mode()
def profile(decoder: Decoder, desk: Desk, steps: int = 3) -> dict[str, tuple[float, float]]:
    """Microseconds a step and launches a step, by kernel name; launched one by one, so without a graph's overlap."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as log:
        for _ in range(steps):
            decoder.step(desk)
        torch.cuda.synchronize()
    spent: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in log.events():
        if event.device_type.name == "CUDA":
            spent[event.name][0] += event.device_time / steps
            spent[event.name][1] += 1 / steps
    return {name: (us, count) for name, (us, count) in spent.items()}


def bench_decode(
    batches: Sequence[int] = (1, 8, 32, 64), context: int = 4096, layers: int = 43, distinct: int = 38, steps: int = 100
) -> Iterator[Row]:
    device = torch.device("cuda")
    common = {"bench": "decode", "model": "synth flash", **device_facts(device)}
    speed = reading_speed(device)
    common["read_bytes_per_second"] = significant(speed)
    for fast in (False, True):
        yield common | agreement(preset("flash", 4, False), device, (5, 131, 2303), 6, fast)
        gc.collect()
        torch.cuda.empty_cache()
    config = preset("flash", layers, False)
    model = random_on_device(config, device, distinct=distinct)
    for batch in batches:
        state = filled_state(config, batch, context, device)
        decoder = Decoder(model, state)
        row, desk = decode_speed(decoder, batch, context, steps)
        yield common | row | {"layers_with_own_experts": min(distinct, layers)}
        place(desk, [1] * batch, [context] * batch)
        spent = profile(decoder, desk)
        kernels = {name: [significant(us), round(count)] for name, (us, count) in
                   sorted(spent.items(), key=lambda item: -item[1][0])[:30]}  # fmt: skip
        yield common | {"kind": "profile", "batch": batch, "context": context, "us_and_launches": kernels,
                        "us_total": significant(sum(us for us, _ in spent.values()))}  # fmt: skip
        del decoder, desk, state
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    import json
    import sys

    for row in bench_decode(batches=tuple(int(word) for word in sys.argv[1:]) or (1, 8, 32, 64)):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
