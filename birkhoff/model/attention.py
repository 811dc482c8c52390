"""Attention with one shared key/value vector per token (spec 6): a sliding window, compressed entries and a sink."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from birkhoff.config import V4Config
from birkhoff.kernels.attend import TopkIndices
from birkhoff.model.batch import Batch, Group
from birkhoff.model.compiled import CompiledAttention
from birkhoff.model.compressor import Compressor, visible_entries
from birkhoff.model.indexer import Indexer
from birkhoff.model.linear import Destination, Linear, Numerics, RMSNorm, SharedInput
from birkhoff.model.rope import Rope, StepPhases
from birkhoff.model.state import ENTRY, Fresh, LayerState


class Attention(nn.Module):
    def __init__(self, config: V4Config, ratio: int, rope: Rope, numerics: Numerics, packed: bool = False):
        super().__init__()
        self.ratio, self.numerics, self.kernels = ratio, numerics, numerics.kernels
        self.heads = config.num_attention_heads
        self.head_dim = config.head_dim
        self.rope_dim = config.qk_rope_head_dim
        self.groups = config.o_groups
        self.group_rank = config.o_lora_rank
        self.window = config.sliding_window
        self.eps = config.rms_norm_eps
        self.scale = config.head_dim**-0.5
        wide = self.heads * self.head_dim
        self.wq_a = Linear(config.hidden_size, config.q_lora_rank, "fp8", numerics, packed)
        self.q_norm = RMSNorm(config.q_lora_rank, self.eps, numerics)
        self.wq_b = Linear(config.q_lora_rank, wide, "fp8", numerics, packed)
        self.wkv = Linear(config.hidden_size, self.head_dim, "fp8", numerics, packed)
        self.kv_norm = RMSNorm(self.head_dim, self.eps, numerics)
        self.attn_sink = nn.Parameter(torch.empty(self.heads, dtype=torch.float32))
        self.wo_a = Linear(wide // self.groups, self.groups * self.group_rank, "fp8", numerics, packed)
        self.wo_b = Linear(self.groups * self.group_rank, config.hidden_size, "fp8", numerics, packed)
        self.compressor = Compressor(config, ratio, ENTRY, rope, numerics, packed) if ratio else None
        self.indexer = Indexer(config, rope, numerics, packed) if ratio == 4 else None
        readers = [self.wq_a, self.wkv]
        if self.compressor is not None:
            readers.append(self.compressor.project)
        if self.indexer is not None:
            readers += [self.indexer.compressor.project, self.indexer.weights_proj]
        self.entry = SharedInput(readers)
        self.compiled: CompiledAttention | None = None

    def forward(
        self, x: torch.Tensor, batch: Batch, phases: StepPhases, state: LayerState | Fresh
    ) -> torch.Tensor:
        """x [n, d], normalised -> [n, d]."""
        turn = phases.compressed if self.ratio else phases.sliding
        if self.compiled is not None and self.compiled.accepts(batch, state):
            return self.compiled(x, batch, turn, state)
        latent, keys, *rows = self.entry(x)  # rows: what the compressor and the indexer read
        latent = self.q_norm(latent)  # [n, q_lora], also read by the indexer
        queries = self.wq_b(latent).unflatten(-1, (self.heads, self.head_dim))
        queries = self.kernels.rotate(
            self.kernels.rms_norm(queries, None, self.eps), turn, own=True
        )  # [n, h, c]
        keys = self.kernels.rotate(self.kv_norm(keys), turn)  # [n, c]
        keys = self.numerics.round_key(keys, self.rope_dim)
        parts = [
            self._attend_group(queries, keys, latent, rows, turn, group, state) for group in batch.groups
        ]
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._project_out(
            self.kernels.rotate(mixed, turn, inverse=True, own=True)
        )  # values carry phase

    def remember(self, x: torch.Tensor, batch: Batch, phases: StepPhases, state: LayerState) -> None:
        """Sliding layers: keep the keys of these tokens without attending to anything."""
        assert self.ratio == 0, "entries are made while attending"
        _, keys = self.entry(x)
        keys = self.numerics.round_key(self.kernels.rotate(self.kv_norm(keys), phases.sliding), self.rope_dim)
        for group in batch.groups:
            own = group.view(keys)
            state.window(group, own) if group.length == 1 else state.recent(group, own)

    def _attend_group(
        self, queries, keys, latent, rows, turn, group: Group, state: LayerState | Fresh
    ) -> torch.Tensor:
        """One rectangle of the batch, [B*T, h, c]: what each query sees, then the attention itself."""
        own = group.view(keys)
        entries = chosen = None
        if self.compressor is not None:
            entries = self.compressor(group.view(rows[0]), group, state)
            chosen = None if entries is None else self._visible(group, entries.shape[1])
        if self.indexer is not None:
            raw, weights = group.view(rows[1]), group.view(rows[2])
            chosen = self.indexer(
                raw, weights, group.view(latent), turn.view(group.view), chosen, group, state
            )
        if group.length == 1:
            recent, seen = state.window(group, own)
            assert not isinstance(chosen, TopkIndices), "one query a sequence is given a mask"
            seen = _both(seen, recent, chosen, entries)
            return self.kernels.attend_one(
                queries[group.rows], recent, entries, seen, self.attn_sink, self.scale
            )
        recent, oldest = state.recent(group, own)
        mixed = self.kernels.attend(
            group.view(queries), recent, oldest, entries, chosen, self.attn_sink, self.window, self.scale
        )
        return mixed.flatten(0, 1)

    def _visible(self, group: Group, count: int) -> torch.Tensor | TopkIndices | None:
        """Entries that each query sees: as a mask, or by number for kernels that want no mask."""
        if group.length == 1 or not self.kernels.reads_codes or torch.is_grad_enabled():
            return visible_entries(group, count, self.ratio)
        finished = (group.positions() + 1) // self.ratio
        return group.once(("picked", self.ratio), lambda: TopkIndices(finished.to(torch.int32)))

    def _project_out(self, mixed: torch.Tensor) -> torch.Tensor:
        """[n, h, c] -> [n, d] through one low-rank matrix per group of heads; its input is never rounded."""
        if self.wo_a.reads_codes:
            product = self.kernels.packed_linear
            return self.wo_b(product(mixed.flatten(1), self.wo_a.rows(), self.group_rank, mixed.dtype))
        grouped = mixed.reshape(-1, self.groups, self.heads // self.groups * self.head_dim)
        first = self.wo_a.dense().view(self.groups, self.group_rank, -1)
        middle = torch.bmm(grouped.transpose(0, 1), first.transpose(1, 2))  # [G, n, rank]
        return self.wo_b(middle.transpose(0, 1).flatten(1))

    def destinations(self, name: str) -> Iterator[Destination]:
        for part in ("wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "wo_a", "wo_b", "compressor", "indexer"):
            module = getattr(self, part)
            if module is not None:
                yield from module.destinations(f"{name}.{part}")
        yield Destination(f"{name}.attn_sink", self.attn_sink)


def _both(
    seen: torch.Tensor | None, recent: torch.Tensor, chosen: torch.Tensor | None, entries: torch.Tensor | None
):
    """Visibility of window and entries side by side [B, K+E]; None when everything is visible."""
    if entries is None or (seen is None and chosen is None):
        return seen
    if seen is None:
        seen = recent.new_ones(recent.shape[:2], dtype=torch.bool)
    if chosen is None:
        return torch.cat((seen, entries.new_ones(entries.shape[:2], dtype=torch.bool)), dim=-1)
    return torch.cat((seen, chosen.squeeze(1)), dim=-1)
