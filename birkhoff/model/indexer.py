"""The indexer of CSA layers: scores every compressed entry and selects the best few (spec 6.5)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from birkhoff.config import V4Config
from birkhoff.kernels import index
from birkhoff.kernels.attend import TopkIndices
from birkhoff.kernels.index.reference import QUERY_BLOCK, IndexChunk
from birkhoff.kernels.quant.rounded_rows import Input
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
        weights: torch.Tensor,
        latent: Input,
        phases: Phases,
        visible: TopkIndices,
        batch: Batch,
        state: LayerState,
    ) -> TopkIndices:
        """`forward` for all chunks of a step at once, whose entries are made: flat rows, `visible` with counts [n].
        Only chunks that see more entries than are kept are scored."""
        chunks = [
            IndexChunk(first, len(chunk.token_ids), chunk.slot, chunk.stop // 4)
            for first, chunk in zip(batch.offsets, batch.chunks)
            if chunk.stop // 4 > self.topk
        ]
        if not chunks:
            return visible
        kept: torch.Tensor = batch.cached("kept entries", lambda: visible.counts.clamp_max(self.topk))
        indices = self.numerics.kernels.index_chunks(
            self.queries(latent, phases),
            weights,
            state.pages[INDEX],
            state.state.page_table,
            visible.counts,
            chunks,
            self.topk,
            self.scale,
        )
        return TopkIndices(kept, indices)

    def queries(self, latent: Input, phases: Phases) -> torch.Tensor:
        """Queries [..., h, c] as they are scored."""
        queries = self.wq_b(latent).unflatten(-1, (self.heads, self.width))
        return self.numerics.round_index(self.numerics.kernels.rotate(queries, phases, own=True))

    @property
    def scale(self) -> float:
        """The factor of the head weights."""
        return float((self.width * self.heads) ** -0.5)

    def project(
        self, latent: torch.Tensor, weights: torch.Tensor, phases: Phases
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [..., h, c] as they are scored, and the scaled head weights."""
        return self.queries(latent, phases), weights.to(self.numerics.dtype).float() * self.scale

    def destinations(self, name: str) -> Iterator[Destination]:
        yield from self.wq_b.destinations(f"{name}.wq_b")
        yield from self.weights_proj.destinations(f"{name}.weights_proj")
        yield from self.compressor.destinations(f"{name}.compressor")
