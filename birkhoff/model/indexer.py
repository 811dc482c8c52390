"""The indexer of CSA layers: scores every compressed entry and selects the best few (spec 6.5)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from birkhoff.config import V4Config
from birkhoff.kernels import index
from birkhoff.kernels.attend import TopkIndices
from birkhoff.kernels.index.reference import QUERY_BLOCK
from birkhoff.kernels.rope import Phases
from birkhoff.model.batch import Batch, Group
from birkhoff.model.compressor import Compressor
from birkhoff.model.linear import Destination, Linear, Numerics
from birkhoff.model.rope import Rope
from birkhoff.model.state import INDEX, Fresh, LayerState


class Indexer(nn.Module):
    def __init__(self, config: V4Config, rope: Rope, numerics: Numerics, packed: bool = False):
        super().__init__()
        self.heads = config.index_n_heads
        self.width = config.index_head_dim
        self.topk = config.index_topk
        self.numerics = numerics
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.width, "fp8", numerics, packed)
        self.weights_proj = Linear(config.hidden_size, self.heads, "bf16", numerics)
        self.compressor = Compressor(config, 4, INDEX, rope, numerics, packed)

    def forward(
        self,
        raw: torch.Tensor,
        weights: torch.Tensor,
        latent: torch.Tensor,
        phases: Phases,
        visible: torch.Tensor | TopkIndices | None,
        group: Group,
        state: LayerState | Fresh,
    ) -> torch.Tensor | TopkIndices | None:
        """Rows of the compressor's projection, head weights [B, T, h], latent [B, T, q_lora], visible entries [B, T, E]
        (None: all) -> selected entries [B, T, E], or as indices if `visible` is given so."""
        keys = self.compressor(raw, group, state)  # stored even while every entry is selected
        if keys is None or keys.shape[1] <= self.topk:
            return visible
        if visible is None:  # one query per sequence that sees everything
            visible = torch.ones(group.size, 1, keys.shape[1], dtype=torch.bool, device=keys.device)
        queries, weights = self.project(latent, weights, phases)
        if isinstance(visible, TopkIndices):
            indices: TopkIndices = self.numerics.kernels.index_topk(
                queries, keys, weights, visible.counts, self.topk
            )
            return indices
        blocks = [
            index.topk_mask(index.score(q, keys, w), v, self.topk)
            for q, w, v in zip(*(t.split(QUERY_BLOCK, dim=1) for t in (queries, weights, visible)))
        ]
        return torch.cat(blocks, dim=1)

    def select_chunks(
        self,
        raw: torch.Tensor,
        weights: torch.Tensor,
        latent: torch.Tensor,
        phases: Phases,
        visible: TopkIndices,
        batch: Batch,
        state: LayerState,
    ) -> TopkIndices:
        """`forward` for all chunks of a step at once: flat rows, `visible` with counts [n]. Only chunks that see more
        entries than are kept are scored, sequence by sequence."""
        self.compressor.compress_chunks(raw, batch, state)
        scored = [group for group in batch.groups if (group.last_position + 1) // 4 > self.topk]
        if not scored:
            return visible
        kept: torch.Tensor = batch.cached("kept entries", lambda: visible.counts.clamp_max(self.topk))
        first = torch.arange(self.topk, dtype=torch.int32, device=raw.device)
        indices = first.expand(len(raw), -1).contiguous()
        for group in scored:
            keys = state.entries(INDEX, group, (group.last_position + 1) // 4)
            queries, head_weights = self.project(
                group.view(latent), group.view(weights), phases.view(group.view)
            )
            best = self.numerics.kernels.index_topk(
                queries, keys, head_weights, group.view(visible.counts), self.topk
            )
            indices[group.rows] = best.indices.flatten(0, 1)
        return TopkIndices(kept, indices)

    def project(
        self, latent: torch.Tensor, weights: torch.Tensor, phases: Phases
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [..., h, c] as they are scored, and the scaled head weights."""
        queries = self.wq_b(latent).unflatten(-1, (self.heads, self.width))
        queries = self.numerics.round_index(self.numerics.kernels.rotate(queries, phases))
        return queries, weights.float() * (self.width * self.heads) ** -0.5

    def destinations(self, name: str) -> Iterator[Destination]:
        yield from self.wq_b.destinations(f"{name}.wq_b")
        yield from self.weights_proj.destinations(f"{name}.weights_proj")
        yield from self.compressor.destinations(f"{name}.compressor")
