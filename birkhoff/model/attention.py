"""Attention with one shared key/value vector per token (spec 6): a sliding window, compressed entries and a sink."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from birkhoff.config import V4Config
from birkhoff.kernels.attend import attend
from birkhoff.kernels.norm import rms_norm
from birkhoff.kernels.rope import rotate
from birkhoff.model.batch import Batch
from birkhoff.model.compressor import Compressor, visible_entries
from birkhoff.model.indexer import Indexer
from birkhoff.model.linear import Destination, Linear, Numerics, RMSNorm
from birkhoff.model.rope import Phases, Rope, StepPhases
from birkhoff.model.state import ENTRY, Fresh, LayerState


class Attention(nn.Module):
    def __init__(self, config: V4Config, ratio: int, rope: Rope, numerics: Numerics, packed: bool = False):
        super().__init__()
        self.ratio, self.numerics = ratio, numerics
        self.heads, self.head_dim, self.rope_dim = config.num_attention_heads, config.head_dim, config.qk_rope_head_dim
        self.groups, self.group_rank = config.o_groups, config.o_lora_rank
        self.window, self.eps = config.sliding_window, config.rms_norm_eps
        wide = self.heads * self.head_dim
        self.wq_a = Linear(config.hidden_size, config.q_lora_rank, "fp8", numerics, packed)
        self.q_norm = RMSNorm(config.q_lora_rank, self.eps)
        self.wq_b = Linear(config.q_lora_rank, wide, "fp8", numerics, packed)
        self.wkv = Linear(config.hidden_size, self.head_dim, "fp8", numerics, packed)
        self.kv_norm = RMSNorm(self.head_dim, self.eps)
        self.attn_sink = nn.Parameter(torch.empty(self.heads, dtype=torch.float32))
        self.wo_a = Linear(wide // self.groups, self.groups * self.group_rank, "fp8", numerics, packed)
        self.wo_b = Linear(self.groups * self.group_rank, config.hidden_size, "fp8", numerics, packed)
        self.compressor = Compressor(config, ratio, ENTRY, rope, numerics) if ratio else None
        self.indexer = Indexer(config, rope, numerics, packed) if ratio == 4 else None

    def forward(self, x: torch.Tensor, batch: Batch, phases: StepPhases, state: LayerState | Fresh) -> torch.Tensor:
        """x [n, d], normalised -> [n, d]."""
        turn = phases.compressed if self.ratio else phases.sliding
        latent = self.q_norm(self.wq_a(x))  # [n, q_lora], also read by the indexer
        queries = self.wq_b(latent).unflatten(-1, (self.heads, self.head_dim))
        queries = rotate(rms_norm(queries, None, self.eps), *turn)  # [n, h, c]
        keys = rotate(self.kv_norm(self.wkv(x)), *turn)  # [n, c]
        keys = self.numerics.round_key(keys, self.rope_dim)
        mixed = torch.cat([self._attend_group(x, latent, queries, keys, turn, group, state) for group in batch.groups])
        return self._project_out(rotate(mixed, *turn, inverse=True))  # values carry phase: turn it back

    def _attend_group(self, x, latent, queries, keys, turn: Phases, group, state) -> torch.Tensor:
        own = group.view(keys)
        recent, oldest = state.recent(group, own, self.window)
        state.remember(group, own)
        entries = chosen = None
        if self.compressor is not None:
            entries = self.compressor(group.view(x), group, state)
            chosen = None if entries is None else visible_entries(group, entries.shape[1], self.ratio)
        if self.indexer is not None:
            turn = (group.view(turn[0]), group.view(turn[1]))
            chosen = self.indexer(group.view(x), group.view(latent), turn, chosen, group, state)
        mixed = attend(
            group.view(queries), recent, oldest, entries, chosen, self.attn_sink, self.window, self.head_dim**-0.5
        )
        return mixed.flatten(0, 1)

    def _project_out(self, mixed: torch.Tensor) -> torch.Tensor:
        """[n, h, c] -> [n, d] through one low-rank matrix per group of heads; its input is never rounded."""
        grouped = mixed.reshape(-1, self.groups, self.heads // self.groups * self.head_dim)
        first = self.wo_a.dense().view(self.groups, self.group_rank, -1)
        return self.wo_b(torch.einsum("ngi,gri->ngr", grouped, first).flatten(1))

    def destinations(self, name: str) -> Iterator[Destination]:
        for part in ("wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "wo_a", "wo_b", "compressor", "indexer"):
            module = getattr(self, part)
            if module is not None:
                yield from module.destinations(f"{name}.{part}")
        yield Destination(f"{name}.attn_sink", self.attn_sink)
