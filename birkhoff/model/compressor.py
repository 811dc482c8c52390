"""Compression of blocks of tokens into single entries (spec 6.4), for CSA, HCA and the indexer.

HCA pools 128 tokens without overlap. CSA pools four tokens together with the four before them: the first half of the
channels of the older block beside the second half of the newer. An entry exists as soon as its last token does.

Raw rows (values and gates side by side, gates with their position bias) are kept in the ring of the layer, so that any
later step can finish a block: whole prefill, any chunking and token-by-token decoding pool the same eight or 128 rows.
Projections and pooling are float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from birkhoff.config import V4Config
from birkhoff.kernels.compress import RawRows, Rounding, pool
from birkhoff.model.batch import Batch, Group
from birkhoff.model.linear import Destination, Linear, Numerics, RMSNorm
from birkhoff.model.rope import Rope
from birkhoff.model.state import ENTRY, INDEX, Fresh, LayerState


class Compressor(nn.Module):
    """Makes the entries of a group's tokens and stores them. `kind` is ENTRY (attention) or INDEX (indexer keys)."""

    def __init__(
        self, config: V4Config, ratio: int, kind: str, rope: Rope, numerics: Numerics, packed: bool = False
    ):
        super().__init__()
        self.ratio = ratio
        self.kind = kind
        self.rope = rope
        self.numerics = numerics
        self.overlap = 2 if ratio == 4 else 1
        self.width = config.head_dim if kind == ENTRY else config.index_head_dim
        self.rope_dim = config.qk_rope_head_dim
        channels = self.overlap * self.width
        self.project = Linear(
            config.hidden_size, {"wkv": channels, "wgate": channels}, "f32", numerics, packed
        )
        self.ape = nn.Parameter(torch.empty(ratio, self.overlap * self.width, dtype=torch.float32))
        self.norm = RMSNorm(self.width, config.rms_norm_eps, numerics)

    def forward(self, raw: torch.Tensor, group: Group, state: LayerState | Fresh) -> torch.Tensor | None:
        """Rows of `project` [B, T, values and gates] -> all entries up to the group's last position [B, E, width],
        or None if there are none yet."""
        raw = raw + self._position_bias(group)
        if group.length == 1:
            state.store_raw(self.kind, group, raw)
            self.finish_single(group, state)
        else:  # entries first: storing a long chunk overwrites the rows that it continues
            self._finish_many(raw, group, state)
            state.store_raw(self.kind, group, raw)
        count = (group.last_position + 1) // self.ratio
        return state.entries(self.kind, group, count) if count else None

    def raw_rows(self, raw: torch.Tensor, state: LayerState) -> RawRows:
        """Rows of `project` [n, values and gates] with the caches they belong to, for kernels."""
        return RawRows(
            raw, self.ape, self.norm.weight, state.raw[self.kind].rows, state.pages[self.kind], self.rounding
        )

    @property
    def rounding(self) -> Rounding:
        """How entries are rounded before they are stored."""
        if not self.numerics.released:
            return "none"
        return "index" if self.kind == INDEX else "key"

    def _position_bias(self, group: Group) -> torch.Tensor:
        """Position biases for the gates, zeros for the values."""
        return self._bias_at(group.cached(("phase", self.ratio), lambda: group.positions() % self.ratio))

    def position_bias(self, positions: torch.Tensor) -> torch.Tensor:
        """The same for any positions, [..., values and gates]."""
        return self._bias_at(positions % self.ratio)

    def _bias_at(self, phase: torch.Tensor) -> torch.Tensor:
        bias = self.ape[phase]
        return torch.cat((torch.zeros_like(bias), bias), dim=-1)

    def pooling_weights(self, raw: torch.Tensor) -> torch.Tensor:
        """The weights of the tokens of one entry by channel: raw rows [items, values and gates], oldest first ->
        [items, width], which sum to 1 over the tokens."""
        gates = raw.chunk(2, dim=-1)[1]
        if self.overlap == 2:
            gates = torch.cat((gates[: -self.ratio, : self.width], gates[-self.ratio :, self.width :]))
        return gates.float().softmax(dim=0)

    def finish_single(self, group: Group, state: LayerState | Fresh) -> None:
        """Decoding: make the entry of each sequence whose new token completes a block; all its rows are in the ring."""
        complete = [i for i, start in enumerate(group.starts) if (start + 1) % self.ratio == 0]
        if not complete:
            return
        after = group.advanced(complete)
        raw = state.raw_before(self.kind, after, self.ratio * self.overlap)
        blocks = raw.unflatten(1, (self.overlap, self.ratio))  # [b, overlap, ratio, 2 * overlap * width]
        index = after.first // self.ratio - 1
        entries = self._pool(_mask_before_first(blocks[:, 0], index), blocks[:, -1])
        entries = self._finalize(entries.unsqueeze(1), index.unsqueeze(-1))
        state.store_entries(self.kind, after.slots, index, entries)

    def _finish_many(self, raw: torch.Tensor, group: Group, state: LayerState | Fresh) -> None:
        """Prefill: make the entries of all blocks that end inside the chunk. All sequences share their start."""
        start = group.starts[0]
        first, filled = divmod(start, self.ratio)  # the block in progress, and its rows so far
        count = (filled + group.length) // self.ratio
        if count == 0:
            return
        lead = self.ratio if self.overlap == 2 and first > 0 else 0  # rows of the finished block before it
        if lead + filled:
            raw = torch.cat((state.raw_before(self.kind, group, lead + filled), raw), dim=1)
        blocks = raw[:, lead : lead + count * self.ratio].unflatten(1, (count, self.ratio))
        indices = first + torch.arange(count, device=raw.device)
        before = raw[:, :lead].unsqueeze(1) if lead else blocks[:, :1]  # a placeholder, masked below
        older = _mask_before_first(torch.cat((before, blocks[:, :-1]), dim=1), indices)
        entries = self._finalize(self._pool(older, blocks), indices.expand(group.size, -1))
        state.store_entries(self.kind, group.slots, group.first // self.ratio, entries)

    def _pool(self, older: torch.Tensor, newer: torch.Tensor) -> torch.Tensor:
        """Blocks [..., ratio, 2 * overlap * width] -> entries [..., width]; `older` is used only with overlap."""
        values, gates = newer.chunk(2, dim=-1)
        if self.overlap == 2:
            old_values, old_gates = older.chunk(2, dim=-1)
            values = torch.cat((old_values[..., : self.width], values[..., self.width :]), dim=-2)
            gates = torch.cat((old_gates[..., : self.width], gates[..., self.width :]), dim=-2)
        return pool(values, gates)

    def _finalize(self, entries: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Normalise, rotate by the first position of the block, and round as the cache does."""
        entries = self.norm(entries.to(self.numerics.dtype))
        entries = self.numerics.kernels.rotate(entries, self.rope.at(indices * self.ratio, compressed=True))
        if self.kind == INDEX:
            return self.numerics.round_index(entries)
        return self.numerics.round_key(entries, self.rope_dim)

    def destinations(self, name: str) -> Iterator[Destination]:
        yield from self.project.destinations(name)
        yield Destination(f"{name}.ape", self.ape)
        yield from self.norm.destinations(f"{name}.norm")


def compress_chunks(
    compressors: Sequence[Compressor], raw: Sequence[torch.Tensor], batch: Batch, state: LayerState
) -> None:
    """`Compressor.forward` for all chunks of a step and the compressors of a layer at once, with kernels that
    read rings and pages: makes the entries of all blocks that end in the step. The caller stores the raw rows after
    that."""
    first, positions = compressors[0], batch.row_index.positions
    phases = batch.cached(
        ("block phases", first.ratio),
        lambda: first.rope.at(positions // first.ratio * first.ratio, compressed=True),
    )
    first.numerics.kernels.compress_blocks(
        [compressor.raw_rows(rows, state) for compressor, rows in zip(compressors, raw)],
        state.state.page_table,
        batch.row_index,
        phases.cos,
        phases.sin,
        first.norm.eps,
    )


def _mask_before_first(older: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Entry 0 has no older block: values 0, gates minus infinity."""
    absent = (index == 0)[..., None, None]
    values, gates = older.chunk(2, dim=-1)
    return torch.cat((values.masked_fill(absent, 0.0), gates.masked_fill(absent, -torch.inf)), dim=-1)


def visible_entries(group: Group, count: int, ratio: int) -> torch.Tensor | None:
    """[B, T, count] bool: entry w is visible to the query that is the last token of its block, and to later ones.

    None if one query per sequence sees all of them."""
    if group.length == 1 and all((start + 1) // ratio == count for start in group.starts):
        return None

    def compare() -> torch.Tensor:
        finished = (group.positions() + 1) // ratio
        return torch.arange(count, device=finished.device) < finished.unsqueeze(-1)

    mask: torch.Tensor = group.cached(("visible", ratio), compare)
    return mask
