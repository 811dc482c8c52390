"""Blocks of tokens pooled into single entries (spec 6.4), used by CSA, HCA and the indexer.

HCA pools 128 tokens without overlap. CSA pools four tokens together with the four before them: the first half of the
channels of the older block beside the second half of the newer. An entry exists from the moment its last token does.

Raw rows (values and gates side by side, gates with their position bias) are kept in the layer's ring, so that a block
can be finished by any later step: whole prefill, any chunking and token-by-token decoding meet the same eight or 128
rows. Projections and pooling are float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from birkhoff.config import V4Config
from birkhoff.kernels.compress import pool
from birkhoff.model.batch import Group
from birkhoff.model.linear import Destination, Linear, Numerics, RMSNorm
from birkhoff.model.rope import Rope
from birkhoff.model.state import ENTRY, INDEX, Fresh, LayerState


class Compressor(nn.Module):
    """Turns a group's tokens into entries and keeps them; `kind` says whose entries they are."""

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
        """Rows of `project` [B, T, values and gates] -> all entries up to the group's newest position
        [B, E, width], or None while there are none."""
        raw = raw + self._bias(group)
        if group.length == 1:
            state.carry(self.kind, group, raw)
            self.finish_single(group, state)
        else:
            self._finish_many(
                raw, group, state
            )  # before the carry: a long chunk overwrites the rows it continues
            state.carry(self.kind, group, raw)
        count = (group.newest + 1) // self.ratio
        return state.entries(self.kind, group, count) if count else None

    def _bias(self, group: Group) -> torch.Tensor:
        """Position biases for the gates and nothing for the values."""
        bias = self.ape[group.once(("phase", self.ratio), lambda: group.positions() % self.ratio)]
        return torch.cat((torch.zeros_like(bias), bias), dim=-1)

    def finish_single(self, group: Group, state: LayerState | Fresh) -> None:
        """Decoding: each sequence may complete one block, whose rows are all in the ring by now."""
        done = [i for i, start in enumerate(group.starts) if (start + 1) % self.ratio == 0]
        if not done:
            return
        after = group.after(done)
        raw = state.unfinished(self.kind, after, self.ratio * self.overlap)
        blocks = raw.unflatten(1, (self.overlap, self.ratio))  # [b, overlap, ratio, 2 * overlap * width]
        number = after.first // self.ratio - 1
        entries = self._pool(_absent_before_first(blocks[:, 0], number), blocks[:, -1])
        state.append(self.kind, after.slots, number, self._seal(entries.unsqueeze(1), number.unsqueeze(-1)))

    def _finish_many(self, raw: torch.Tensor, group: Group, state: LayerState | Fresh) -> None:
        """Prefill: every block that ends inside the chunk, at once. All pieces of the group share their start."""
        start = group.starts[0]
        first, begun = divmod(
            start, self.ratio
        )  # the block being filled, and how many of its rows are already here
        count = (begun + group.length) // self.ratio
        if count == 0:
            return
        lead = self.ratio if self.overlap == 2 and first > 0 else 0  # the finished block before it
        if lead + begun:
            raw = torch.cat((state.unfinished(self.kind, group, lead + begun), raw), dim=1)
        blocks = raw[:, lead : lead + count * self.ratio].unflatten(1, (count, self.ratio))
        numbers = first + torch.arange(count, device=raw.device)
        before = (
            raw[:, :lead].unsqueeze(1) if lead else blocks[:, :1]
        )  # stands in for none and is made absent
        older = _absent_before_first(torch.cat((before, blocks[:, :-1]), dim=1), numbers)
        entries = self._seal(self._pool(older, blocks), numbers.expand(group.size, -1))
        state.append(self.kind, group.slots, group.first // self.ratio, entries)

    def _pool(self, older: torch.Tensor, newer: torch.Tensor) -> torch.Tensor:
        """Blocks [..., ratio, 2 * overlap * width] -> entries [..., width]; `older` matters with overlap only."""
        values, gates = newer.chunk(2, dim=-1)
        if self.overlap == 2:
            old_values, old_gates = older.chunk(2, dim=-1)
            values = torch.cat((old_values[..., : self.width], values[..., self.width :]), dim=-2)
            gates = torch.cat((old_gates[..., : self.width], gates[..., self.width :]), dim=-2)
        return pool(values, gates)

    def _seal(self, entries: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Norm, rotation by the block's first position, and the rounding of its cache."""
        entries = self.norm(entries.to(self.numerics.dtype))
        entries = self.numerics.kernels.rotate(entries, self.rope.at(numbers * self.ratio, compressed=True))
        if self.kind == INDEX:
            return self.numerics.round_index(entries)
        return self.numerics.round_key(entries, self.rope_dim)

    def destinations(self, name: str) -> Iterator[Destination]:
        yield from self.project.destinations(name)
        yield Destination(f"{name}.ape", self.ape)
        yield from self.norm.destinations(f"{name}.norm")


def _absent_before_first(older: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Entry 0 has no block before it: values 0, gates minus infinity."""
    gone = (number == 0)[..., None, None]
    values, gates = older.chunk(2, dim=-1)
    return torch.cat((values.masked_fill(gone, 0.0), gates.masked_fill(gone, -torch.inf)), dim=-1)


def visible_entries(group: Group, count: int, ratio: int) -> torch.Tensor | None:
    """[B, T, count]: entry w is visible to the query that is its block's last token, and later.

    None when one query per sequence sees all of them."""
    if group.length == 1 and all((start + 1) // ratio == count for start in group.starts):
        return None

    def compare() -> torch.Tensor:
        finished = (group.positions() + 1) // ratio
        return torch.arange(count, device=finished.device) < finished.unsqueeze(-1)

    return group.once(("visible", ratio), compare)
