"""Decode speed of the full-width model on a GPU, with a check of its logits in the same run.

`bench_decode` yields rows. `agreement`: a model of a few full-width layers; prompts of several lengths are processed by
the reference path on the device, then decoded by the kernels and by the reference path, and the logits are compared.
`decode`: tokens per second of all layers at each batch size, with random weights made on the device and caches of
`context` tokens, one CUDA graph per step including greedy sampling and the next positions. `profile`: microseconds of a
step by class of kernel, next to the time its bytes take at the measured read bandwidth. `layers`: the same by kind of
layer (three kinds of attention, and experts), as they run in a graph.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from birkhoff.bench.report import Row, facts, significant, summary
from birkhoff.bench.synthetic import WeightTypes, cache_tensors, filled_state, random_on_device
from birkhoff.bench.timing import (
    capture_graph,
    cuda_seconds,
    graph_us,
    kernel_times,
    median,
    release_memory,
    times_by_class,
)
from birkhoff.config import KIND_OF_RATIO, PAGE_TOKENS, V4Config
from birkhoff.convert.presets import preset
from birkhoff.decode.buffers import DecodeBuffers
from birkhoff.decode.gpu import Decoder
from birkhoff.hooks.tap import NoTap
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.cache_size import context_bytes, step_cache_bytes
from birkhoff.model.state import State

# Relative to the norm of the logits; both paths round to bfloat16 about forty times per layer.
TOLERANCE = 0.02


def device_facts(device: torch.device) -> Row:
    import triton

    properties = torch.cuda.get_device_properties(device)
    return {
        **facts(),
        "device": properties.name,
        "memory": properties.total_memory,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
    }


def reading_speed(device: torch.device) -> float:
    """Read bandwidth in bytes per second: best of several sums of 4 GiB. Lower bounds on times are computed with it."""
    data = torch.empty(1 << 30, dtype=torch.float32, device=device).normal_()
    best = min(cuda_seconds(lambda: data.sum(), 5))
    return data.nbytes / best


@torch.inference_mode()
def agreement(
    config: V4Config,
    device: torch.device,
    lengths: Sequence[int],
    steps: int,
    fast: bool | None,
    types: WeightTypes | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Row:
    """Prefill prompts of `lengths` tokens with the reference path, then decode `steps` tokens with both paths."""
    model = random_on_device(config, device, seed=1, types=types, dtype=dtype)
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
    errors, equal_tokens = [], 0
    for step in range(steps):
        positions = [length + step for length in lengths]
        chunks = [
            SequenceChunk(slot, positions[slot], tokens[slot, positions[slot]].view(1))
            for slot in range(rows)
        ]
        hidden, _ = model.run(Batch.of(chunks, device), states[0], NoTap())
        plain = model.logits(hidden.to(model.head.weight.dtype)).float()
        set_inputs(buffers, [int(tokens[slot, positions[slot]]) for slot in range(rows)], positions)
        buffers.poison()
        logits = decoder.step(buffers)
        errors += ((logits - plain).norm(dim=-1) / plain.norm(dim=-1)).tolist()
        equal_tokens += int((logits.argmax(-1) == plain.argmax(-1)).sum())
    sorted_errors = sorted(errors)
    return {
        "kind": "agreement",
        "layers": config.num_hidden_layers,
        "fast": fast,
        "kernels": decoder.kernels.name,
        "prompt_tokens": list(lengths),
        "steps": steps,
        "error_median": significant(sorted_errors[len(sorted_errors) // 2]),
        "error_most": significant(sorted_errors[-1]),
        "greedy_same": significant(equal_tokens / len(errors)),
        "passed": sorted_errors[len(sorted_errors) // 2] < TOLERANCE,
    }


@torch.inference_mode()
def set_inputs(buffers: DecodeBuffers, tokens: Sequence[int], positions: Sequence[int]) -> None:
    """Write the inputs of the next step; row i uses slot i."""
    device = buffers.token_ids.device
    buffers.token_ids.copy_(torch.tensor(tokens, device=device))
    buffers.positions.copy_(torch.tensor(positions, device=device))
    buffers.slots.copy_(torch.arange(buffers.rows, device=device))


def greedy_step(decoder: Decoder, buffers: DecodeBuffers) -> None:
    """One step with greedy sampling and the next positions, all on the device."""
    logits = decoder.step(buffers)
    buffers.token_ids.copy_(logits.argmax(-1))
    buffers.positions.add_(1)


@torch.inference_mode()
def decode_speed(decoder: Decoder, batch: int, context: int, steps: int) -> tuple[Row, DecodeBuffers]:
    """Milliseconds per step with tokens fed back on the device; positions start at `context`."""
    buffers = decoder.buffers(batch, context + 256)
    random = torch.randint(decoder.config.vocab_size, (batch,)).tolist()
    set_inputs(buffers, random, [context] * batch)
    graph = capture_graph(partial(greedy_step, decoder, buffers), warm=2)
    set_inputs(buffers, random, [context] * batch)
    graph.replay()
    torch.cuda.synchronize()
    spans = cuda_seconds(graph.replay, steps)
    began = time.perf_counter()
    read = []
    for _ in range(20):
        graph.replay()
        read.append(buffers.token_ids.tolist())  # as a server does: every token is copied to the host
    host_seconds = (time.perf_counter() - began) / 20
    ms = [span * 1e3 for span in spans]
    row = {
        "kind": "decode",
        "batch": batch,
        "context": context,
        "layers": decoder.config.num_hidden_layers,
        "kernels": decoder.kernels.name,
        "steps": steps,
        "ms": summary(ms),
        "tokens_per_second": significant(batch / (median(ms) / 1e3)),
        "tokens_per_second_read_by_host": significant(batch / host_seconds),
        "distinct_tokens": len({token for tokens in read for token in tokens}),
    }
    del graph
    return row, buffers


def bench_decode(
    batches: Sequence[int] = (1, 8, 32, 64),
    context: int = 4096,
    layers: int = 43,
    distinct: int = 38,
    steps: int = 100,
    baseline_layers: int = 6,
) -> Iterator[Row]:
    """All rows. `distinct` layers have their own expert weights, the others share them; `baseline_layers` 0 skips the
    comparison with `transformers`."""
    device = torch.device("cuda")
    common = {"bench": "decode", "model": "synth flash", **device_facts(device)}
    common["read_bytes_per_second"] = significant(reading_speed(device))
    for fast in (False, True):
        yield common | agreement(
            preset("flash", 4, False), device, (2, 5, 64, 126, 127, 131, 511, 2303), 4, fast
        )
        release_memory()
    if baseline_layers:
        yield from (common | row for row in against_transformers(baseline_layers, device, context, steps))
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
        set_inputs(buffers, torch.randint(config.vocab_size, (batch,)).tolist(), [context] * batch)
        yield common | profile_row(decoder, buffers, common["read_bytes_per_second"])
        yield common | layer_row(decoder, buffers, context, common["read_bytes_per_second"])
        del decoder, buffers
        release_memory()


def cache_facts(state: State, batch: int, context: int) -> Row:
    """Bytes of the cache by kind of layer, allocated and computed, and the bytes that a step reads."""
    allocated: defaultdict[str, int] = defaultdict(int)
    for layer in state.layers:
        allocated[KIND_OF_RATIO[layer.ratio]] += sum(tensor.nbytes for tensor in cache_tensors(layer))
    config, item = state.config, state.dtype.itemsize
    tokens_ = state.num_pages // batch * PAGE_TOKENS
    planned = {kind: batch * size for kind, size in context_bytes(config, tokens_, item).items() if size}
    read = {
        kind: round(batch * size) for kind, size in step_cache_bytes(config, context, item).items() if size
    }
    return {
        "cache_bytes": dict(allocated),
        "cache_bytes_computed": planned,
        "cache_bytes_read_per_step": read,
    }


def against_transformers(layers: int, device: torch.device, context: int, steps: int) -> Iterator[Row]:
    """Decoding of one sequence through a few layers: `transformers` in bfloat16, ours in the released formats."""
    from birkhoff.bench import hf_baseline

    config = preset("flash", layers, False)
    model_hf = hf_baseline.build(config, device)
    theirs = hf_baseline.decode_ms(model_hf, 1, context, 20)
    del model_hf
    release_memory()
    model = random_on_device(config, device)
    row, _ = decode_speed(Decoder(model, filled_state(config, 1, context, device)), 1, context, steps)
    times = theirs["ms"]["median"] / row["ms"]["median"]
    yield {**row, "kind": "transformers", "theirs": theirs, "times_transformers": significant(times)}
    del model
    release_memory()


CLASSES = {
    "write_and_mix": "boundary",
    "_write_and_mix": "boundary",
    "read_streams": "boundary",
    "_read_streams": "boundary",
    "gemv": "products",
    "_gemv": "products",
    "rows_": "products",
    "project_query": "products",  # with the norm of the query latent
    "router_gate_up": "router and shared expert",  # with the routing of a single token
    "route": "routing",
    "experts_gate_up": "experts",
    "experts_down": "experts",
    "digits_gate_up": "experts",
    "digits_down": "experts",
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
    """Time of a step by class of kernel, next to the time its bytes take at `speed` bytes per second."""
    steps = 3

    def run() -> None:
        for _ in range(steps):
            decoder.step(buffers)  # launched one by one, so without the overlap of a graph

    classes = times_by_class(kernel_times(run), CLASSES, "other")
    floors = {kind: count / speed * 1e6 for kind, count in floor_bytes(decoder, buffers).items()}
    table = {
        kind: {"us": significant(us / steps), "launches": round(launches / steps)}
        | ({"floor_us": significant(floors[kind])} if kind in floors else {})
        for kind, (us, launches) in classes.items()
    }
    total = sum(us for us, _ in classes.values()) / steps
    return {
        "kind": "profile",
        "batch": buffers.rows,
        "context": buffers.context - 256,
        "classes": table,
        "us_total": significant(total),
        "floor_us_total": significant(sum(floors.values())),
    }


ATTENTION_WEIGHTS = ("qkv_proj", "q_b_proj", "o_a_proj", "o_b_proj")


@torch.inference_mode()
def layer_row(decoder: Decoder, buffers: DecodeBuffers, context: int, speed: float) -> Row:
    """Microseconds per layer of attention, by kind of layer, and of experts; all layers of a kind in one graph, without
    the mHC boundaries. Next to them the bytes of weights and cache and the time they take at `speed`."""
    c = decoder.config
    read = step_cache_bytes(c, context, decoder.state.dtype.itemsize)
    kinds: dict[str, Row] = {}
    for ratio in sorted({w.ratio for w in decoder.layers}):
        layers_of_kind = [
            (w, positions) for w, positions in zip(decoder.layers, decoder.state.layers) if w.ratio == ratio
        ]
        weights = sum(
            rows.nbytes for w, _ in layers_of_kind for part in ATTENTION_WEIGHTS for rows in getattr(w, part)
        ) / len(layers_of_kind)
        us = graph_us([partial(decoder.attention, w, positions, buffers) for w, positions in layers_of_kind])
        kinds[KIND_OF_RATIO[ratio]] = _cost(
            us,
            len(layers_of_kind),
            weights,
            buffers.rows * read[KIND_OF_RATIO[ratio]] / len(layers_of_kind),
            speed,
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
    """Bytes a step must read by class of kernel; as many experts per layer as the last layer of this step used."""
    c, layers = decoder.config, decoder.layers
    used = int((buffers.expert_slots[:, 2] > 0).sum())
    inner, width = c.moe_intermediate_size, c.hidden_size
    experts = sum(
        2 * w.expert_types[0].nbytes(inner, width) + w.expert_types[1].nbytes(width, inner) for w in layers
    )
    # read, written, read again, output, input
    streams = buffers.rows * c.hidden_size * (4 * 2 + 4 * 2 + 4 * 2 + 2 + 4)
    keys = {
        ratio: shares * size * c.head_dim * 2 * buffers.rows
        for ratio, (shares, size) in buffers.splits.items()
    }
    return {
        "products": sum(r.nbytes for w in layers for part in ATTENTION_WEIGHTS for r in getattr(w, part))
        + decoder.head.nbytes,
        "router and shared expert": sum(w.router.nbytes + w.shared_gate_up.nbytes for w in layers),
        "experts": used * experts + sum(w.shared_down.nbytes for w in layers),
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
