"""Prefill speed of the full-width model on a GPU, checked at every site in the same run.

`bench_prefill` yields rows. `site`: every hook of two full-width layers, kernels against the reference path
(`sites.py`). `prefill`: tokens per second of a chunk after `behind` cached tokens, all layers, with random weights made
on the device, with the operations per token and their share of the measured matmul speed. `profile`: milliseconds of a
chunk by class of kernel. `transformers`: the same prompt through a few layers of `transformers` in bfloat16.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from birkhoff.bench.decode import device_facts, reading_speed
from birkhoff.bench.prefill_kernels import CHUNKS, product_speed
from birkhoff.bench.report import Row, significant, summary
from birkhoff.bench.sites import compare_sites
from birkhoff.bench.synthetic import filled_state, random_on_device
from birkhoff.bench.timing import cuda_seconds, kernel_times, release_memory, times_by_class
from birkhoff.config import V4Config
from birkhoff.convert.presets import preset
from birkhoff.hooks.tap import NoTap
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.state import State
from birkhoff.model.transformer import Transformer

MIN_TOKENS_PER_SECOND = 8000  # all layers, chunks of 4,096 tokens
MIN_TIMES_BASELINE = 3  # speed relative to `transformers`, a few layers
CLASSES = {
    "_packed_linear": "products",
    "_dequantise": "products",
    "_fp8_product": "products",
    "nvjet": "products",
    "_topk_experts": "routing",
    "_count_pairs": "routing",
    "_sort_pairs": "routing",
    "_deinterleave": "experts",
    "_gate_up": "experts",
    "_down": "experts",
    "_sum_pairs": "experts",
    "_swiglu": "experts",
    "prompt_gate_up": "experts",
    "prompt_down": "experts",
    "_quantise": "rounding",
    "_fp8_round": "rounding",
    "_hadamard_fp4": "rounding",
    "_round_halves": "rounding",
    "_attend": "attention",
    "_list_keys": "attention",
    "_score": "indexer",
    "_topk_entries": "indexer",
    "_split_hi_lo": "streams",
    "_mix": "streams",
    "_coefficients_and_collapse": "streams",
    "_write": "streams",
    "_compress": "caches",
    "_store": "caches",
    "_gather": "caches",
    "_norm_rotate": "norms and turns",
    "_rms_norm": "norms and turns",
    "_rotate": "norms and turns",
    "_rotate_in_place": "norms and turns",
}


def required_operations(config: V4Config, tokens: int, behind: int) -> float:
    """Minimum of multiplications and additions of a chunk of `tokens` after `behind` cached tokens."""
    c, middle = config, behind + tokens / 2
    experts = 3 * c.moe_intermediate_size * c.hidden_size * (c.num_experts_per_tok + 1)
    heads = c.num_attention_heads * c.head_dim
    dense = c.hidden_size * (c.q_lora_rank + c.head_dim) + c.q_lora_rank * heads + heads * c.o_lora_rank
    dense += c.o_groups * c.o_lora_rank * c.hidden_size + c.hidden_size * c.n_routed_experts
    total = 0.0
    for ratio in c.compress_ratios:
        keys = min(middle, c.sliding_window)
        extra = 0.0
        if ratio == 4:
            entries = middle / 4
            keys += min(entries, c.index_topk)
            extra = c.hidden_size * (4 * c.head_dim + 4 * c.index_head_dim + c.index_n_heads)
            extra += (
                (c.q_lora_rank + (entries if entries > c.index_topk else 0))
                * c.index_n_heads
                * c.index_head_dim
            )
        elif ratio == 128:
            keys += middle / 128
            extra = c.hidden_size * 2 * c.head_dim
        mixes = 2 * 24 * 4 * c.hidden_size
        total += 2 * (experts + dense + extra + mixes) + 4 * heads * keys
    return total * tokens


@torch.inference_mode()
def speed_row(
    model: Transformer, tokens: int, behind: int, rounds: int, matmul_speed: float
) -> tuple[Row, Batch, State]:
    config, device = model.config, model.embed.device
    state = filled_state(config, 1, behind + tokens, device)
    batch = Batch.of([SequenceChunk(0, behind, torch.randint(config.vocab_size, (tokens,)))], device)

    def prefill() -> None:
        hidden, _ = model.run(batch, state, NoTap())
        model.logits(hidden[-1:])

    ms = [span * 1e3 for span in cuda_seconds(prefill, rounds, warm=2)]
    torch.cuda.synchronize()
    began = time.perf_counter()
    prefill()
    launching = time.perf_counter() - began
    rate = summary([tokens / span * 1e3 for span in ms])
    operations = required_operations(config, tokens, behind)
    row: Row = {
        "kind": "prefill",
        "chunk": tokens,
        "behind": behind,
        "layers": config.num_hidden_layers,
        "ms": summary(ms),
        "host_ms": significant(launching * 1e3),
        "tokens_per_second": rate,
        "operations_a_token": significant(operations / tokens),
        "share_of_product_speed": significant(operations / matmul_speed / (summary(ms)["median"] * 1e-3)),
    }
    if (tokens, behind) == (4096, 0) and config.num_hidden_layers >= 43:
        row |= {"at_least": MIN_TOKENS_PER_SECOND, "passed": rate["median"] >= MIN_TOKENS_PER_SECOND}
    return row, batch, state


@torch.inference_mode()
def profile_row(model: Transformer, batch: Batch, state: State) -> Row:
    """Time of a chunk by class of kernel."""
    classes = times_by_class(kernel_times(lambda: model.run(batch, state, NoTap())), CLASSES, "PyTorch")
    return {
        "kind": "profile",
        "chunk": batch.num_tokens,
        "classes": {
            kind: {"ms": significant(us / 1e3), "launches": count} for kind, (us, count) in classes.items()
        },
        "ms_total": significant(sum(us for us, _ in classes.values()) / 1e3),
    }


def against_transformers(
    layers: int, device: torch.device, tokens: int, matmul_speed: float, released: bool
) -> Row:
    """Prefill through a few layers: `transformers` in bfloat16, ours in the released formats."""
    from birkhoff.bench import hf_baseline

    config = preset("flash", layers, False)
    model_hf = hf_baseline.build(config, device)
    theirs = hf_baseline.prefill_ms(model_hf, tokens, 5)
    del model_hf
    release_memory()
    model = random_on_device(config, device, kernels="triton", released=released).fuse()
    row, *_ = speed_row(model, tokens, 0, 7, matmul_speed)
    del model
    times = theirs["ms"]["median"] / row["ms"]["median"]
    release_memory()
    return row | {
        "kind": "transformers",
        "theirs": theirs,
        "times_transformers": significant(times),
        "at_least": MIN_TIMES_BASELINE,
        "passed": times >= MIN_TIMES_BASELINE,
    }


def two_layers() -> V4Config:
    """Both compressed kinds of layer at full width, one of them hash-routed."""
    return replace(
        preset("flash", 4, False), num_hidden_layers=2, compress_ratios=(4, 128), num_hash_layers=1
    )


def site_rows(device: torch.device, released: bool = False) -> Iterator[Row]:
    """Every site of two full-width layers in prefill and in CUDA-graph decode steps, against the reference path."""
    model = random_on_device(two_layers(), device, kernels="triton", released=released)
    yield from compare_sites(model, device, [2303, 127, 700, 5, 128, 129, 1000, 64], 2, 0.05, fast=None)


def bench_prefill(
    chunks: Sequence[int] = CHUNKS,
    behind: Sequence[int] = (0, 32768),
    layers: int = 43,
    distinct: int = 38,
    baseline_layers: int = 6,
    rounds: int = 7,
    released: bool = False,
) -> Iterator[Row]:
    """All rows. `distinct` layers have their own expert weights, the others share them; `baseline_layers` 0 skips the
    comparison with `transformers`; `released` rounds activations as the released model does."""
    device = torch.device("cuda")
    matmul_speed = product_speed(device)
    common = {
        "bench": "prefill",
        "model": "synth flash",
        "numerics": "released" if released else "plain",
        **device_facts(device),
        "read_bytes_per_second": significant(reading_speed(device)),
        "product_operations_per_second": significant(matmul_speed),
    }
    for row in site_rows(device, released):
        yield common | row
    release_memory()
    if baseline_layers:
        yield common | against_transformers(baseline_layers, device, 4096, matmul_speed, released)
    config = preset("flash", layers, False)
    model = random_on_device(config, device, distinct=distinct, kernels="triton", released=released).fuse()
    for cached in behind:
        for chunk in chunks:
            row, batch, state = speed_row(model, chunk, cached, rounds, matmul_speed)
            yield common | row | {"layers_with_own_experts": min(distinct, layers)}
            if chunk == 4096:
                yield common | profile_row(model, batch, state) | {"behind": cached}
            del batch, state
            release_memory()
