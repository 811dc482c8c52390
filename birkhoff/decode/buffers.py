"""The static buffers of a GPU decode step.

With weights and state, they are all that a captured graph touches. The host writes token ids, positions and slots
between steps, in one copy (`inputs`); every step overwrites all other buffers.
"""

from __future__ import annotations

from copy import copy

import torch

from birkhoff.config import V4Config


class DecodeBuffers:
    """Buffers for a step of `rows` tokens, in sequences of up to `context` tokens.

    `qkv` and `queries` are the widths of the projections of that name, `ring` the rows of a key ring. With
    `fp16_inputs`, inputs of products are also kept in float16, those of experts in the order in which FP4 codes are
    unpacked (`x_fp4_order`). With `released`, inputs of FP8 and FP4 products are kept rounded beside the others, in
    float16 or in the model's dtype. `max_entries` is the number of entries an indexer may score; 0 if it keeps all of
    them, so that nothing is scored. `splits` maps a ratio to the number of splits of a token's keys and the keys per
    split."""

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
        released: bool = False,
        digits: bool = False,
    ):
        from birkhoff.kernels.attend.decode import split_keys
        from birkhoff.kernels.mhc.decode import COUNT, padded, slices

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        c, int32 = config, torch.int32
        d = c.hidden_size
        h = c.num_attention_heads
        k = c.num_experts_per_tok
        inner = c.moe_intermediate_size
        phases = c.qk_rope_head_dim // 2
        product_input = torch.float16 if fp16_inputs else dtype
        self.rows = rows
        self.context = context
        self.max_entries = context // 4 if context // 4 > c.index_topk else 0
        keys = {0: ring, 4: ring + min(c.index_topk, context // 4), 128: ring + context // 128}
        self.splits = {ratio: split_keys(rows, h, keys[ratio], processors) for ratio in ratios}
        partials = rows * max(count for count, _ in self.splits.values()) * h

        # At least two columns, so that each row begins at a multiple of 16 bytes.
        self.inputs = torch.zeros(3, max(rows, 2), dtype=torch.long, device=device)
        self.token_ids, self.positions, self.slots = self.inputs[:, :rows]
        self.streams = empty(rows, 4, d, dtype=dtype)
        self.mix_parts = empty(rows, slices(rows, d)[1], padded(COUNT))
        self.pre = empty(rows, 4)
        self.post = empty(rows, 4)
        self.mix = empty(rows, 4, 4)
        self.cos = empty(rows, 4, phases)
        self.sin = empty(rows, 4, phases)
        self.x = empty(rows, d, dtype=dtype)
        self.qkv = empty(rows, qkv)
        self.latent = empty(rows, c.q_lora_rank, dtype=dtype)
        self.queries = empty(rows, queries, dtype=dtype)
        self.scores = empty(rows, max(self.max_entries, 1))
        self.topk_indices = empty(rows, c.index_topk, dtype=int32)
        self.partial_out = empty(partials * c.head_dim)
        self.partial_max = empty(partials)
        self.partial_sum = empty(partials)
        self.heads_out = empty(rows, h * c.head_dim, dtype=dtype)
        self.o_latent = empty(rows, c.o_groups * c.o_lora_rank, dtype=product_input)
        self.attn_out = empty(rows, d)
        self.router_gate_up = empty(rows, c.n_routed_experts + 2 * inner)
        # Selected experts of all layers and the MTP block, for the usage counters.
        self.topk_ids = empty(c.num_hidden_layers + 1, rows, k, dtype=int32)
        self.topk_weights = empty(rows, k)
        self.pair_order = empty(2, rows * k, dtype=int32)
        self.expert_slots = torch.zeros(min(c.n_routed_experts, rows * k), 16, dtype=int32, device=device)
        # Thread blocks of a launch that are done.
        self.blocks_done = torch.zeros(1, dtype=int32, device=device)
        self.expert_hidden = empty(rows * k, inner, dtype=product_input)
        self.shared_hidden = empty(rows, inner, dtype=product_input)
        self.expert_out = empty(rows, k + 1, d)
        self.logits = empty(rows, c.vocab_size)
        self.x_fp16 = self.x_fp4_order = self.latent_fp16 = self.heads_out_fp16 = None
        if fp16_inputs:
            self.x_fp16, self.x_fp4_order, self.latent_fp16, self.heads_out_fp16 = (
                torch.empty_like(like, dtype=torch.float16)
                for like in (self.x, self.x, self.latent, self.heads_out)
            )
        self.x_digits = self.hidden_digits = None
        if digits:
            self.x_digits, self.hidden_digits = (
                empty(count, 4 * width, dtype=torch.uint8) for count, width in ((rows, d), (rows * k, inner))
            )
        if released and not fp16_inputs:
            self.x_fp16, self.latent_fp16 = torch.empty_like(self.x), torch.empty_like(self.latent)

    def replace(self, **tensors: torch.Tensor) -> DecodeBuffers:
        """The same buffers, with other memory for some of them."""
        other = copy(self)
        for name, tensor in tensors.items():
            setattr(other, name, tensor)
        return other

    def poison(self) -> None:
        """Fill every floating-point buffer with NaN, so that anything a step does not write is noticed."""
        for buffer in vars(self).values():
            if isinstance(buffer, torch.Tensor) and buffer.is_floating_point():
                buffer.fill_(torch.nan)
