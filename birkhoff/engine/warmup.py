"""Compiles the CPU kernels before the first request.

Compilation happens once per machine and is cached on disk; without this the first tokens of the first request would
wait for it. A model of a few hundred weights is decoded far enough to call every compiled loop with the argument types
of a real model, including the indexer's selection, which a real model reaches only after hundreds of tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from birkhoff.config import V4Config
from birkhoff.decode.cpu import install_cpu_decode
from birkhoff.hooks.tap import NoTap
from birkhoff.kernels.jit import compilation_noticed
from birkhoff.kernels.select import select
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.linear import Numerics
from birkhoff.model.state import State
from birkhoff.model.transformer import Transformer

MICRO = V4Config(
    vocab_size=8,
    hidden_size=8,
    num_hidden_layers=3,
    num_attention_heads=2,
    head_dim=4,
    qk_rope_head_dim=2,
    q_lora_rank=4,
    o_groups=1,
    o_lora_rank=4,
    sliding_window=2,
    compress_ratios=(0, 4, 128),
    index_n_heads=1,
    index_head_dim=4,
    index_topk=1,
    n_routed_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=4,
    num_hash_layers=1,
    max_position_embeddings=128,
    num_nextn_predict_layers=1,
)


def compile_kernels(on_compile: Callable[[], None] = lambda: None) -> None:
    """Load all CPU kernels from the cache or compile them; `on_compile` is called before the first is compiled."""
    model = Transformer(MICRO, Numerics(kernels=select("cpu")))
    with torch.inference_mode(), compilation_noticed(on_compile):
        for destination in model.destinations():
            destination.tensor.fill_(0 if destination.kind == "ids" else 0.5)
        install_cpu_decode(model)
        for rows in (1, 2):  # a slice of one row is contiguous, of two it is not: different argument types
            state = State.contiguous(MICRO, rows, 32, lookback=1, mtp=True)
            for start, tokens in [(0, [1, 2]), (2, [1] * 18), *((at, [1]) for at in range(20, 27))]:
                batch = Batch.of([SequenceChunk(slot, start, tokens) for slot in range(rows)])
                hidden, streams = model.run(batch, state, NoTap())
                model.logits(hidden)
                model.draft(streams, batch, state)
