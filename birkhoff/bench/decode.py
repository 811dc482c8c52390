"""Decoding speed of the full-width model on a GPU, with the check that it is the same model in the same run.

`bench_decode` yields rows. `agreement`: a model of a few full-width layers, prompts of several lengths read by the
plain path on the device, then decoded by the kernels and by the plain path; logits are compared. `decode`: tokens per
second of all layers at each batch size, weights random and made on the device, states as long as `context`, one CUDA
graph per step with the greedy choice and the next positions inside it. `profile`: microseconds of a step by kernel,
beside what the bytes it must read would take at the device's measured reading speed. `layers`: the same by kind of
layer, attention of the three kinds and experts, as they run in a graph.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from birkhoff.bench.report import facts, significant, summary
from birkhoff.bench.synthetic import filled_state, random_on_device
from birkhoff.config import PAGE_TOKENS, V4Config
from birkhoff.convert.presets import preset
from birkhoff.decode.buffers import DecodeBuffers
from birkhoff.decode.gpu import Decoder
from birkhoff.engine.memory_plan import KINDS, context_bytes, step_cache_bytes
from birkhoff.hooks.tap import NoTap
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.state import State

Row = dict[str, Any]
TOLERANCE = 0.02  # of the logits' spread; both paths round to bfloat16 some forty times a layer


def device_facts(device: torch.device) -> Row:
    import triton

    about = torch.cuda.get_device_properties(device)
    return {
        **facts(),
        "device": about.name,
        "memory": about.total_memory,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
    }


def reading_speed(device: torch.device) -> float:
    """Bytes a second of summing 4 GiB, best of several: the ceiling that floors are computed with."""
    data = torch.empty(1 << 30, dtype=torch.float32, device=device).normal_()
    best = min(seconds(lambda: data.sum(), 5))
    return data.nbytes / best


def seconds(call, times: int) -> list[float]:
    spans = []
    for _ in range(times):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        spans.append(begin.elapsed_time(end) / 1e3)
    return spans


def graph_us(calls: Sequence[Callable[[], Any]], times: int = 15) -> float:
    """Median microseconds of one of `calls`, captured together and replayed."""

    def launches() -> None:
        for call in calls:
            call()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        launches()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches()
    graph.replay()
    spans = sorted(seconds(graph.replay, times))
    return spans[len(spans) // 2] * 1e6 / len(calls)


@torch.inference_mode()
def agreement(config: V4Config, device: torch.device, lengths: Sequence[int], steps: int, fast: bool) -> Row:
    """Prompts of `lengths` tokens read plainly, then `steps` tokens by the decoder and by the plain path."""
    model = random_on_device(config, device, seed=1)
    rows = len(lengths)
    tokens = torch.randint(config.vocab_size, (rows, max(lengths) + steps))
    states = [
        State.contiguous(config, rows, max(lengths) + steps, device=device, dtype=model.numerics.dtype)
        for _ in range(2)
    ]
    for state in states:
        for slot, length in enumerate(lengths):
            model.run(Batch.of([SequenceChunk(slot, 0, tokens[slot, :length])], device), state, NoTap())
    decoder = Decoder(model, states[1], fast=fast)
    buffers = decoder.buffers(rows, max(lengths) + steps)
    worst, same = [], 0
    for step in range(steps):
        at = [length + step for length in lengths]
        pieces = [SequenceChunk(slot, at[slot], tokens[slot, at[slot]].view(1)) for slot in range(rows)]
        hidden, _ = model.run(Batch.of(pieces, device), states[0], NoTap())
        plain = model.logits(hidden.to(model.head.weight.dtype)).float()
        place(buffers, [int(tokens[slot, at[slot]]) for slot in range(rows)], at)
        buffers.poison()
        mine = decoder.step(buffers)
        worst += ((mine - plain).norm(dim=-1) / plain.norm(dim=-1)).tolist()
        same += int((mine.argmax(-1) == plain.argmax(-1)).sum())
    ordered = sorted(worst)
    return {
        "kind": "agreement",
        "layers": config.num_hidden_layers,
        "fast": fast,
        "prompt_tokens": list(lengths),
        "steps": steps,
        "error_median": significant(ordered[len(ordered) // 2]),
        "error_most": significant(ordered[-1]),
        "greedy_same": significant(same / len(worst)),
        "passed": ordered[len(ordered) // 2] < TOLERANCE,
    }


@torch.inference_mode()
def place(buffers: DecodeBuffers, tokens: Sequence[int], positions: Sequence[int]) -> None:
    device = buffers.token_ids.device
    buffers.token_ids.copy_(torch.tensor(tokens, device=device))
    buffers.positions.copy_(torch.tensor(positions, device=device))
    buffers.slots.copy_(torch.arange(buffers.rows, device=device))


def advance(decoder: Decoder, buffers: DecodeBuffers) -> None:
    """One step with the greedy choice and the next position, all on the device."""
    logits = decoder.step(buffers)
    buffers.token_ids.copy_(logits.argmax(-1))
    buffers.positions.add_(1)


def captured(
    decoder: Decoder, buffers: DecodeBuffers, step: Callable[[Decoder, DecodeBuffers], None] = advance
) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(decoder, buffers)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(decoder, buffers)
    return graph


@torch.inference_mode()
def decode_speed(decoder: Decoder, batch: int, context: int, steps: int) -> tuple[Row, DecodeBuffers]:
    """Milliseconds a step, tokens fed back on the device; positions begin at `context`."""
    buffers = decoder.buffers(batch, context + 256)
    random = torch.randint(decoder.config.vocab_size, (batch,)).tolist()
    place(buffers, random, [context] * batch)
    graph = captured(decoder, buffers)
    place(buffers, random, [context] * batch)
    graph.replay()
    torch.cuda.synchronize()
    spans = seconds(graph.replay, steps)
    began = time.perf_counter()
    read = []
    for _ in range(20):
        graph.replay()
        read.append(buffers.token_ids.tolist())  # as a server would: every token is looked at
    seen = (time.perf_counter() - began) / 20
    ms = [span * 1e3 for span in spans]
    row = {
        "kind": "decode",
        "batch": batch,
        "context": context,
        "layers": decoder.config.num_hidden_layers,
        "kernels": decoder.kernels.name,
        "steps": steps,
        "ms": summary(ms),
        "tokens_per_second": significant(batch / (sorted(ms)[len(ms) // 2] / 1e3)),
        "tokens_per_second_read_by_host": significant(batch / seen),
        "distinct_tokens": len({token for tokens in read for token in tokens}),
    }
    del graph
    return row, buffers


@torch.inference_mode()
def profile(decoder: Decoder, buffers: DecodeBuffers, steps: int = 3) -> dict[str, tuple[float, float]]:
    """Microseconds a step and launches a step, by kernel name; launched one by one, so without a graph's overlap."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as log:
        for _ in range(steps):
            decoder.step(buffers)
        torch.cuda.synchronize()
    spent: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in log.events():
        if event.device_type.name == "CUDA":
            spent[event.name][0] += event.device_time / steps
            spent[event.name][1] += 1 / steps
    return {name: (us, count) for name, (us, count) in spent.items()}


def bench_decode(
    batches: Sequence[int] = (1, 8, 32, 64),
    context: int = 4096,
    layers: int = 43,
    distinct: int = 38,
    steps: int = 100,
    rival_layers: int = 6,
) -> Iterator[Row]:
    """All rows. `distinct` layers have experts of their own; with `rival_layers` 0 `transformers` is left out."""
    device = torch.device("cuda")
    common = {"bench": "decode", "model": "synth flash", **device_facts(device)}
    common["read_bytes_per_second"] = significant(reading_speed(device))
    for fast in (False, True):
        yield common | agreement(
            preset("flash", 4, False), device, (2, 5, 64, 126, 127, 131, 511, 2303), 4, fast
        )
        _clear()
    if rival_layers:
        yield from (common | row for row in against_transformers(rival_layers, device, context, steps))
    config = preset("flash", layers, False)
    model = random_on_device(config, device, distinct=distinct)
    for batch in batches:
        decoder = Decoder(model, filled_state(config, batch, context, device))
        row, buffers = decode_speed(decoder, batch, context, steps)
        yield (
            common
            | row
            | cache_facts(decoder.state, batch, context)
            | {"layers_with_own_experts": min(distinct, layers)}
        )
        place(buffers, torch.randint(config.vocab_size, (batch,)).tolist(), [context] * batch)
        yield common | profile_row(decoder, buffers, common["read_bytes_per_second"])
        yield common | layer_row(decoder, buffers, context, common["read_bytes_per_second"])
        del decoder, buffers
        _clear()


def cache_facts(state: State, batch: int, context: int) -> Row:
    """Bytes of the cache by kind of layer, as they are and as they were computed, and what a step reads of them."""
    real: defaultdict[str, int] = defaultdict(int)
    for layer in state.layers:
        tensors = (layer.keys.rows, *(ring.rows for ring in layer.raw.values()), *layer.pages.values())
        real[KINDS[layer.ratio]] += sum(tensor.nbytes for tensor in tensors)
    config, item = state.config, state.dtype.itemsize
    room = state.num_pages // batch * PAGE_TOKENS
    planned = {kind: batch * size for kind, size in context_bytes(config, room, item).items() if size}
    read = {
        kind: round(batch * size) for kind, size in step_cache_bytes(config, context, item).items() if size
    }
    return {"cache_bytes": dict(real), "cache_bytes_computed": planned, "cache_bytes_read_per_step": read}


def against_transformers(layers: int, device: torch.device, context: int, steps: int) -> Iterator[Row]:
    """Decoding of one sequence through a few layers, theirs in bfloat16 and ours in the released formats."""
    from birkhoff.bench import hf_baseline

    config = preset("flash", layers, False)
    theirs = hf_baseline.build(config, device)
    found = hf_baseline.decode_ms(theirs, 1, context, 20)
    del theirs
    _clear()
    model = random_on_device(config, device)
    row, _ = decode_speed(Decoder(model, filled_state(config, 1, context, device)), 1, context, steps)
    times = found["ms"]["median"] / row["ms"]["median"]
    yield {**row, "kind": "transformers", "theirs": found, "times_transformers": significant(times)}
    del model
    _clear()


def _clear() -> None:
    gc.collect()
    torch.cuda.empty_cache()


CLASSES = {
    "write_and_mix": "boundary",
    "_write_and_mix": "boundary",
    "read_streams": "boundary",
    "_read_streams": "boundary",
    "gemv": "products",
    "_gemv": "products",
    "router_gate_up": "router and shared expert",  # with the routing of a single token
    "route": "routing",
    "experts_gate_up": "experts",
    "experts_down": "experts",
    "_norm_rope_store": "small stage",
    "_score": "indexer",
    "topk": "indexer",
    "_topk_entries": "indexer",
    "attend": "attention",
    "combine": "attention",
    "_attend": "attention",
    "_combine": "attention",
}


def profile_row(decoder: Decoder, buffers: DecodeBuffers, speed: float) -> Row:
    """Where a step's time goes, by class of kernel, beside the time its bytes take at the device's reading speed."""
    spent = profile(decoder, buffers)
    classes: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, (us, launches) in spent.items():
        found = max((prefix for prefix in CLASSES if name.startswith(prefix)), key=len, default=None)
        kind = "other" if found is None else CLASSES[found]
        classes[kind][0] += us
        classes[kind][1] += launches
    floors = {kind: count / speed * 1e6 for kind, count in floor_bytes(decoder, buffers).items()}
    table = {
        kind: {"us": significant(us), "launches": round(launches)}
        | ({"floor_us": significant(floors[kind])} if kind in floors else {})
        for kind, (us, launches) in sorted(classes.items(), key=lambda item: -item[1][0])
    }
    total = sum(us for us, _ in classes.values())
    return {
        "kind": "profile",
        "batch": buffers.rows,
        "context": buffers.context - 256,
        "classes": table,
        "us_total": significant(total),
        "floor_us_total": significant(sum(floors.values())),
    }


PRODUCTS = ("qkv_proj", "q_b_proj", "o_a_proj", "o_b_proj")  # of a layer's attention


@torch.inference_mode()
def layer_row(decoder: Decoder, buffers: DecodeBuffers, context: int, speed: float) -> Row:
    """Microseconds of a layer by its kind: attention, all layers of a kind in one graph, and experts; boundaries are
    neither. Beside them the bytes of weights and of the cache, and what these take at the device's reading speed."""
    c = decoder.config
    read = step_cache_bytes(c, context, decoder.state.dtype.itemsize)
    kinds: dict[str, Row] = {}
    for ratio in sorted({w.ratio for w in decoder.layers}):
        its = [(w, at) for w, at in zip(decoder.layers, decoder.state.layers) if w.ratio == ratio]
        weights = sum(rows.nbytes for w, _ in its for part in PRODUCTS for rows in getattr(w, part)) / len(
            its
        )
        us = graph_us([partial(decoder.attention, w, at, buffers) for w, at in its])
        kinds[KINDS[ratio]] = _cost(
            us, len(its), weights, buffers.rows * read[KINDS[ratio]] / len(its), speed
        )
    us = graph_us(
        [partial(decoder.experts, w, buffers, ids) for w, ids in zip(decoder.layers, buffers.topk_ids)]
    )
    floors = floor_bytes(decoder, buffers)
    experts = (floors["experts"] + floors["router and shared expert"]) / len(decoder.layers)
    kinds["experts"] = _cost(us, len(decoder.layers), experts, 0, speed)
    whole = sum(kind["layers"] * kind["us"] for kind in kinds.values())
    return {
        "kind": "layers",
        "batch": buffers.rows,
        "context": context,
        "kinds": kinds,
        "us_of_all": significant(whole),
    }


def _cost(us: float, layers: int, weights: float, cache: float, speed: float) -> Row:
    return {
        "layers": layers,
        "us": significant(us),
        "bytes_weights": round(weights),
        "bytes_cache": round(cache),
        "us_floor": significant((weights + cache) / speed * 1e6),
    }


def floor_bytes(decoder: Decoder, buffers: DecodeBuffers) -> dict[str, float]:
    """Bytes a step must read by class, weights first; experts as many as this step's last layer used."""
    c, layers = decoder.config, decoder.layers
    used = int((buffers.expert_slots[:, 2] > 0).sum())
    expert = 3 * c.moe_intermediate_size * c.hidden_size * (0.5 + 1 / 32)
    streams = (
        buffers.rows * c.hidden_size * (4 * 2 + 4 * 2 + 4 * 2 + 2 + 4)
    )  # read, written, read again, output, input
    keys = {
        ratio: shares * size * c.head_dim * 2 * buffers.rows
        for ratio, (shares, size) in buffers.splits.items()
    }
    return {
        "products": sum(r.nbytes for w in layers for part in PRODUCTS for r in getattr(w, part))
        + decoder.head.nbytes,
        "router and shared expert": sum(w.router.nbytes + w.shared_gate_up.nbytes for w in layers),
        "experts": len(layers) * used * expert + sum(w.shared_down.nbytes for w in layers),
        "boundary": (2 * len(layers) + 1) * (24 * 4 * c.hidden_size * 4 + streams),
        "attention": sum(keys[w.ratio] for w in layers),
    }


def main() -> None:
    import json
    import sys

    for row in bench_decode(batches=tuple(int(word) for word in sys.argv[1:]) or (1, 8, 32, 64)):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
