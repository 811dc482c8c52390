"""Reading speed of the full-width model on a GPU: prompts in chunks, checked at every site in the same run.

`bench_prefill` yields rows. `site`: every hook of two full-width layers, the kernels' against the plain path's
(`sites.py`). `prefill`: tokens per second of a chunk behind `behind` tokens, all layers, weights random and made on the
device, with the operations a token needs and their share of the measured product speed. `profile`: milliseconds of a
chunk by kind of kernel. `transformers`: the same prompt through a few layers, theirs in bfloat16.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from birkhoff.bench.decode import device_facts, reading_speed, seconds
from birkhoff.bench.prefill_kernels import CHUNKS, product_speed
from birkhoff.bench.report import significant, summary
from birkhoff.bench.sites import compare_sites
from birkhoff.bench.synthetic import filled_state, random_on_device
from birkhoff.config import V4Config
from birkhoff.convert.presets import preset
from birkhoff.hooks.tap import NoTap
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.transformer import Transformer

Row = dict[str, Any]
LEAST = 8000  # tokens a second of all layers, chunks of 4,096
RIVAL_LEAST = 3  # times as fast as `transformers`, a few layers
CLASSES = {
    "_packed_linear": "products",
    "_dequantise": "products",
    "nvjet": "products",
    "_topk_experts": "routing",
    "_count_pairs": "routing",
    "_sort_pairs": "routing",
    "_deinterleave": "experts",
    "_gate_up": "experts",
    "_down": "experts",
    "_sum_pairs": "experts",
    "_swiglu": "experts",
    "_attend": "attention",
    "_score": "indexer",
    "_topk_entries": "indexer",
    "_split_hi_lo": "streams",
    "_mix": "streams",
    "_coefficients_and_collapse": "streams",
    "_write": "streams",
    "_rms_norm": "norms and turns",
    "_rotate": "norms and turns",
    "_rotate_in_place": "norms and turns",
}


def operations_of(config: V4Config, tokens: int, behind: int) -> float:
    """Multiplications and additions that a chunk of `tokens` behind `behind` others cannot do without."""
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
    model: Transformer, tokens: int, behind: int, rounds: int, product: float
) -> tuple[Row, Batch, Any]:
    config, device = model.config, model.embed.device
    state = filled_state(config, 1, behind + tokens, device)
    batch = Batch.of([SequenceChunk(0, behind, torch.randint(config.vocab_size, (tokens,)))], device)

    def read() -> None:
        hidden, _ = model.run(batch, state, NoTap())
        model.logits(hidden[-1:])

    for _ in range(2):
        read()
    ms = [span * 1e3 for span in seconds(read, rounds)]
    rate = summary([tokens / span * 1e3 for span in ms])
    wanted = operations_of(config, tokens, behind)
    row: Row = {
        "kind": "prefill",
        "chunk": tokens,
        "behind": behind,
        "layers": config.num_hidden_layers,
        "ms": summary(ms),
        "tokens_per_second": rate,
        "operations_a_token": significant(wanted / tokens),
        "share_of_product_speed": significant(wanted / product / (summary(ms)["median"] * 1e-3)),
    }
    if (tokens, behind) == (4096, 0) and config.num_hidden_layers >= 43:
        row |= {"at_least": LEAST, "passed": rate["median"] >= LEAST}
    return row, batch, state


@torch.inference_mode()
def profile_row(model: Transformer, batch: Batch, state: Any) -> Row:
    """Where a chunk's time goes, by kind of kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as log:
        model.run(batch, state, NoTap())
        torch.cuda.synchronize()
    spent: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in log.events():
        if event.device_type.name == "CUDA":
            known = max((name for name in CLASSES if event.name.startswith(name)), key=len, default="")
            kind = spent[CLASSES.get(known, "PyTorch")]
            kind[0] += event.device_time / 1e3
            kind[1] += 1
    ordered = sorted(spent.items(), key=lambda item: -item[1][0])
    table = {kind: {"ms": significant(ms), "launches": round(count)} for kind, (ms, count) in ordered}
    return {
        "kind": "profile",
        "chunk": batch.num_tokens,
        "classes": table,
        "ms_total": significant(sum(ms for ms, _ in spent.values())),
    }


def against_transformers(layers: int, device: torch.device, tokens: int, product: float) -> Row:
    """A prompt through a few layers, theirs in bfloat16 and ours in the released formats."""
    from birkhoff.bench import hf_baseline

    config = preset("flash", layers, False)
    theirs = hf_baseline.build(config, device)
    found = hf_baseline.prefill_ms(theirs, tokens, 5)
    del theirs
    _clear()
    row, *_ = speed_row(random_on_device(config, device, kernels="triton"), tokens, 0, 7, product)
    times = found["ms"]["median"] / row["ms"]["median"]
    _clear()
    return row | {
        "kind": "transformers",
        "theirs": found,
        "times_transformers": significant(times),
        "at_least": RIVAL_LEAST,
        "passed": times >= RIVAL_LEAST,
    }


def two_layers() -> V4Config:
    """Both compressed kinds of layer at full width, one of them routed by token ids."""
    return replace(
        preset("flash", 4, False), num_hidden_layers=2, compress_ratios=(4, 128), num_hash_layers=1
    )


def site_rows(device: torch.device) -> Iterator[Row]:
    """Every site of two full-width layers, prompts and recorded steps, against the plain path."""
    model = random_on_device(two_layers(), device, kernels="triton")
    yield from compare_sites(model, device, [2303, 127, 700, 5, 128, 129, 1000, 64], 2, 0.05, fast=None)


def bench_prefill(
    chunks: Sequence[int] = CHUNKS,
    behind: Sequence[int] = (0, 32768),
    layers: int = 43,
    distinct: int = 38,
    rival_layers: int = 6,
    rounds: int = 7,
) -> Iterator[Row]:
    """All rows. `distinct` layers have experts of their own; with `rival_layers` 0 `transformers` is left out."""
    device = torch.device("cuda")
    product = product_speed(device)
    common = {
        "bench": "prefill",
        "model": "synth flash",
        **device_facts(device),
        "read_bytes_per_second": significant(reading_speed(device)),
        "product_operations_per_second": significant(product),
    }
    for row in site_rows(device):
        yield common | row
    _clear()
    if rival_layers:
        yield common | against_transformers(rival_layers, device, 4096, product)
    model = random_on_device(preset("flash", layers, False), device, distinct=distinct, kernels="triton")
    for before in behind:
        for chunk in chunks:
            row, batch, state = speed_row(model, chunk, before, rounds, product)
            yield common | row | {"layers_with_own_experts": min(distinct, layers)}
            if chunk == 4096:
                yield common | profile_row(model, batch, state) | {"behind": before}
            del batch, state
            _clear()


def _clear() -> None:
    gc.collect()
    torch.cuda.empty_cache()
