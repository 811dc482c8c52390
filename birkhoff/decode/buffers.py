"""The static buffers of a GPU decode step.

With weights and state, they are all that a captured graph touches. The host writes token ids, positions and slots
between steps, in one copy (`inputs`); every step overwrites all other buffers.
"""

from __future__ import annotations

from copy import copy

import torch

from birkhoff.config import V4Config


class DecodeBuffers:
    """Buffers for a step of `rows` tokens, in sequences of up to `context` tokens, through layers of these `ratios`.

    `qkv` and `queries` are the widths of the projections of that name, `ring` the rows of a key ring. With
    `fp16_inputs`, inputs of products are also kept in float16, those of experts in the order in which FP4 codes are
    unpacked (`x_fp4_order`). With `released`, inputs of FP8 and FP4 products are kept rounded beside the others, in
    float16 or in the model's dtype. With `digits`, inputs of experts are kept as digits (`kernels/cuda/digits.cuh`).
    `processors` is the number of multiprocessors that attention is split over.

    `max_entries` is the number of entries an indexer may score; 0 if it keeps all of them, so that nothing is scored.
    `splits` maps a ratio to the number of splits of a token's keys and the keys per split."""

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
        self.rows = rows
        self.context = context
        self._config, self._device, self._dtype = config, device, dtype
        self._product_dtype = torch.float16 if fp16_inputs else dtype
        # At least two columns, so that each row begins at a multiple of 16 bytes.
        self.inputs = torch.zeros(3, max(rows, 2), dtype=torch.long, device=device)
        self.token_ids, self.positions, self.slots = self.inputs[:, :rows]
        self._allocate_streams()
        self._allocate_attention(qkv, queries)
        self._allocate_splits(ratios, ring, processors)
        self._allocate_experts(digits)
        self.logits = self._empty(rows, config.vocab_size)
        self.x_fp16 = self.x_fp4_order = self.latent_fp16 = self.heads_out_fp16 = None
        if fp16_inputs:
            self.x_fp16, self.x_fp4_order, self.latent_fp16, self.heads_out_fp16 = (
                torch.empty_like(like, dtype=torch.float16)
                for like in (self.x, self.x, self.latent, self.heads_out)
            )
        elif released:
            self.x_fp16, self.latent_fp16 = torch.empty_like(self.x), torch.empty_like(self.latent)

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=self._device)

    def _allocate_streams(self) -> None:
        """The streams, how a sublayer reads and writes them, and its normalised input `x`."""
        from birkhoff.kernels.mhc.decode import COUNT, padded, slices

        rows, d = self.rows, self._config.hidden_size
        self.streams = self._empty(rows, 4, d, dtype=self._dtype)
        self.mix_parts = self._empty(rows, slices(rows, d)[1], padded(COUNT))
        self.pre = self._empty(rows, 4)
        self.post = self._empty(rows, 4)
        self.mix = self._empty(rows, 4, 4)
        self.x = self._empty(rows, d, dtype=self._dtype)

    def _allocate_attention(self, qkv: int, queries: int) -> None:
        c, rows = self._config, self.rows
        self.max_entries = self.context // 4 if self.context // 4 > c.index_topk else 0
        self.cos = self._empty(rows, 4, c.qk_rope_head_dim // 2)
        self.sin = self._empty(rows, 4, c.qk_rope_head_dim // 2)
        self.qkv = self._empty(rows, qkv)
        self.latent = self._empty(rows, c.q_lora_rank, dtype=self._dtype)
        self.queries = self._empty(rows, queries, dtype=self._dtype)
        self.scores = self._empty(rows, max(self.max_entries, 1))
        self.topk_indices = self._empty(rows, c.index_topk, dtype=torch.int32)
        self.heads_out = self._empty(rows, c.num_attention_heads * c.head_dim, dtype=self._dtype)
        self.o_latent = self._empty(rows, c.o_groups * c.o_lora_rank, dtype=self._product_dtype)
        self.attn_out = self._empty(rows, c.hidden_size)

    def _allocate_splits(self, ratios: set[int], ring: int, processors: int) -> None:
        """Partial results of attention, whose keys are split over thread blocks."""
        from birkhoff.kernels.attend.decode import split_keys

        c, heads = self._config, self._config.num_attention_heads
        keys = {0: ring, 4: ring + min(c.index_topk, self.context // 4), 128: ring + self.context // 128}
        self.splits = {ratio: split_keys(self.rows, heads, keys[ratio], processors) for ratio in ratios}
        partials = self.rows * max(count for count, _ in self.splits.values()) * heads
        self.partial_out = self._empty(partials * c.head_dim)
        self.partial_max = self._empty(partials)
        self.partial_sum = self._empty(partials)

    def _allocate_experts(self, digits: bool) -> None:
        c, rows, k, int32 = self._config, self.rows, self._config.num_experts_per_tok, torch.int32
        d, inner = c.hidden_size, c.moe_intermediate_size
        self.router_gate_up = self._empty(rows, c.n_routed_experts + 2 * inner)
        # Selected experts of all layers and the MTP block, for the usage counters.
        self.topk_ids = self._empty(c.num_hidden_layers + 1, rows, k, dtype=int32)
        self.topk_weights = self._empty(rows, k)
        self.pair_order = self._empty(2, rows * k, dtype=int32)
        slots = min(c.n_routed_experts, rows * k)
        self.expert_slots = torch.zeros(slots, 16, dtype=int32, device=self._device)
        # Thread blocks of a launch that are done.
        self.blocks_done = torch.zeros(1, dtype=int32, device=self._device)
        self.expert_hidden = self._empty(rows * k, inner, dtype=self._product_dtype)
        self.shared_hidden = self._empty(rows, inner, dtype=self._product_dtype)
        self.expert_out = self._empty(rows, k + 1, d)
        self.x_digits = self.hidden_digits = None
        if digits:
            self.x_digits = self._empty(rows, 4 * d, dtype=torch.uint8)
            self.hidden_digits = self._empty(rows * k, 4 * inner, dtype=torch.uint8)

    def phases(self, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines for layers of this ratio: all four angles, or the last three where entries are made."""
        return (self.cos, self.sin) if ratio == 0 else (self.cos[:, 1:], self.sin[:, 1:])

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
