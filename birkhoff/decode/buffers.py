"""Where a decoding step on a GPU puts what it computes: fixed buffers, made once for a number of rows and a context.

Everything a captured graph touches beside weights and state is here. Token ids, positions and slots are written by the
host between steps, in one copy (`inputs`); all else is overwritten by every step. Kernels that multiply in float16 get
their inputs in that form too (`fp16_inputs`); the experts' inputs also in the order in which FP4 codes leave their words
(`x_fp4_order`).
"""

from __future__ import annotations

import torch

from birkhoff.config import V4Config


class DecodeBuffers:
    """Buffers of a step of `rows` tokens, in sequences of up to `context` tokens.

    `max_entries` is how many entries an indexer may meet; 0 when it would keep all of them, so that nothing is scored.
    `splits` tells by ratio into how many shares the keys of a token are cut, and how many keys a share has."""

    def __init__(
        self,
        config: V4Config,
        rows: int,
        context: int,
        ratios: set[int],
        *,
        qkv: int,
        queries: int,
        ring: int,
        device: torch.device,
        dtype: torch.dtype,
        fp16_inputs: bool,
        processors: int,
    ):
        from birkhoff.kernels.attend.decode import split_keys
        from birkhoff.kernels.mhc.decode import COUNT, padded, slices

        def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        c, number = config, torch.int32
        d = c.hidden_size
        h = c.num_attention_heads
        k = c.num_experts_per_tok
        inner = c.moe_intermediate_size
        phases = c.qk_rope_head_dim // 2
        half = torch.float16 if fp16_inputs else dtype
        self.rows = rows
        self.context = context
        self.max_entries = context // 4 if context // 4 > c.index_topk else 0
        reach = {0: ring, 4: ring + min(c.index_topk, context // 4), 128: ring + context // 128}
        self.splits = {ratio: split_keys(rows, h, reach[ratio], processors) for ratio in ratios}
        most = rows * max(count for count, _ in self.splits.values()) * h

        self.inputs = torch.zeros(
            3, max(rows, 2), dtype=torch.long, device=device
        )  # each row begins at 16 bytes
        self.token_ids, self.positions, self.slots = self.inputs[:, :rows]
        self.streams = make(rows, 4, d, dtype=dtype)
        self.mix_parts = make(rows, slices(rows, d)[1], padded(COUNT))
        self.pre = make(rows, 4)
        self.post = make(rows, 4)
        self.mix = make(rows, 4, 4)
        self.cos = make(rows, 4, phases)
        self.sin = make(rows, 4, phases)
        self.x = make(rows, d, dtype=dtype)
        self.qkv = make(rows, qkv)
        self.latent = make(rows, c.q_lora_rank, dtype=dtype)
        self.queries = make(rows, queries, dtype=dtype)
        self.scores = make(rows, max(self.max_entries, 1))
        self.topk_indices = make(rows, c.index_topk, dtype=number)
        self.partial_out = make(most * c.head_dim)
        self.partial_max = make(most)
        self.partial_sum = make(most)
        self.heads_out = make(rows, h * c.head_dim, dtype=dtype)
        self.o_latent = make(rows, c.o_groups * c.o_lora_rank, dtype=half)
        self.attn_out = make(rows, d)
        self.router_gate_up = make(rows, c.n_routed_experts + 2 * inner)
        # ids of every layer
        self.topk_ids = make(c.num_hidden_layers, rows, k, dtype=number)
        self.topk_weights = make(rows, k)
        self.pair_order = make(2, rows * k, dtype=number)
        self.expert_slots = torch.zeros(min(c.n_routed_experts, rows * k), 16, dtype=number, device=device)
        self.blocks_done = torch.zeros(1, dtype=number, device=device)  # blocks of a launch that are done
        self.expert_hidden = make(rows * k, inner, dtype=half)
        self.shared_hidden = make(rows, inner, dtype=half)
        self.expert_out = make(rows, k + 1, d)
        self.logits = make(rows, c.vocab_size)
        self.x_fp16 = self.x_fp4_order = self.latent_fp16 = self.heads_out_fp16 = None
        if fp16_inputs:
            self.x_fp16, self.x_fp4_order, self.latent_fp16, self.heads_out_fp16 = (
                torch.empty_like(like, dtype=torch.float16)
                for like in (self.x, self.x, self.latent, self.heads_out)
            )

    def poison(self) -> None:
        """Fill every buffer of numbers with NaN: what a step does not write shows."""
        for buffer in vars(self).values():
            if isinstance(buffer, torch.Tensor) and buffer.is_floating_point():
                buffer.fill_(torch.nan)
