"""The multi-token-prediction block (spec 9): predicts the token after next from the streams and the next token."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from birkhoff.config import V4Config
from birkhoff.hooks.tap import NoTap, Tap
from birkhoff.model.batch import Batch
from birkhoff.model.block import Block
from birkhoff.model.compiled import CompiledLayers, CompiledMTPInput
from birkhoff.model.linear import Destination, Linear, Numerics, RMSNorm
from birkhoff.model.mhc import HeadMixer
from birkhoff.model.rope import Rope
from birkhoff.model.state import Fresh, LayerState


class MTP(nn.Module):
    """A sliding-window block with its own projections, head mixer and norm; embedding and head are the trunk's."""

    def __init__(self, config: V4Config, rope: Rope, numerics: Numerics, packed: bool = False):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.rope = rope
        self.e_proj = Linear(width, width, "fp8", numerics, packed)
        self.h_proj = Linear(width, width, "fp8", numerics, packed)
        self.enorm, self.hnorm, self.norm = (RMSNorm(width, eps, numerics) for _ in range(3))
        self.block = Block(config, 0, False, rope, numerics, packed)
        self.hc_head = HeadMixer(config)
        self.compiled: CompiledMTPInput | None = None
        self.compiled_block: CompiledLayers | None = None

    def forward(
        self, streams: torch.Tensor, embedded: torch.Tensor, batch: Batch, state: LayerState | Fresh
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Trunk streams [n, m, d] at positions t and embeddings [n, d] of the tokens at t + 1, whose ids are
        `batch.token_ids` while `batch.positions` are t -> hidden [n, d] for the head, and streams to draft on from."""
        return self.run(self.join_input(streams, embedded), batch, state)

    def run(
        self, joined: torch.Tensor, batch: Batch, state: LayerState | Fresh, tap: Tap | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward` from the joined input [n, m, d] on. The tap is called at the sites of a layer and of a head."""
        phases = self.rope.step(batch.positions)
        compiled = self.compiled_block if tap is None else None
        tap = tap or NoTap()
        if compiled is not None and isinstance(state, LayerState) and compiled.accepts(batch, state):
            streams = compiled(joined, 0, 1, batch, phases, [state])
        else:
            streams = self.block(joined, batch, phases, state, tap)
        merged, streams = self.hc_head.merge(streams, tap)
        return self.norm(merged), streams

    def prefill(self, streams: torch.Tensor, embedded: torch.Tensor, batch: Batch, state: LayerState) -> None:
        """Store the keys that later drafts attend to, without computing a draft."""
        u, *_ = self.block.hc_attn.read(self.join_input(streams, embedded))
        self.block.attn.store_keys(self.block.attn_norm(u), batch, self.rope.step(batch.positions), state)

    def join_input(self, streams: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Trunk streams [n, m, d] and embeddings [n, d] -> input streams [n, m, d] of the block."""
        if self.compiled is not None and self.compiled.accepts(streams):
            return self.compiled(streams, embedded)
        joined: torch.Tensor = self.e_proj(self.enorm(embedded)).unsqueeze(1) + self.h_proj(
            self.hnorm(streams)
        )
        return joined

    def destinations(self, name: str) -> Iterator[Destination]:
        yield from self.block.destinations(name)
        for part in ("e_proj", "h_proj", "enorm", "hnorm", "norm"):
            yield from getattr(self, part).destinations(f"{name}.{part}")
        yield from self.hc_head.destinations(f"{name}.hc_head")
