"""The cache of the sequences of a model (spec 12.1), in fixed memory.

Per layer and slot: a ring of the last window keys and, for compressing layers, a ring of raw compressor rows.
Compressed entries and index keys are kept in a pool of pages of 128 tokens (32 CSA entries or 1 HCA entry) behind one
page table for all layers, so that a prefix can be shared page by page.

Rings are addressed by position (`position mod size`), and a row is read only where a position implies that it is valid,
so a slot needs no clearing between sequences. `lookback` adds that many rows: a sequence can step back by as many
tokens without losing anything, because nothing else in the state is overwritten by a shorter continuation.

A `Snapshot` holds everything but the pages that a sequence needs to continue from one of its positions. It is taken
from the rings while they still hold the rows, or filled by a long chunk that passes the position (`State.watched`).

`Fresh` is the state of sequences that start at 0 and are not continued: nothing is kept, everything is differentiable.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from birkhoff.config import PAGE_TOKENS, V4Config
from birkhoff.kernels.row_index import to_device
from birkhoff.model.batch import Batch, Group

ENTRY, INDEX = "entry", "index"  # kinds of compressed entries: of attention, of the indexer
KEYS = "keys"  # the window


@dataclass(eq=False)
class Snapshot:
    """Ring rows before `position`, by the name of the ring."""

    position: int
    rows: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows.values())


@dataclass(frozen=True, eq=False)
class SnapshotRows:
    """Rows of one ring for several snapshots: slots, positions and the row of the step that holds each (-1: the ring),
    and the span of each snapshot."""

    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    spans: list[tuple[Snapshot, int, int]]


class Ring:
    """Rows `[slots, size, width]` addressed by position modulo size. `array` is a NumPy view for compiled CPU code."""

    def __init__(self, slots: int, size: int, width: int, device: torch.device, dtype: torch.dtype):
        self.rows = torch.zeros(slots, size, width, device=device, dtype=dtype)
        self.size = size
        self.array = self.rows.numpy() if device.type == "cpu" and dtype is torch.float32 else None

    def read(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[B, P, width] at `positions` [B, P]."""
        return self.rows[slots.unsqueeze(-1), positions % self.size]

    def write(self, group: Group, values: torch.Tensor) -> None:
        """Store [B, T, width] at the positions of the group; only the last `size` rows if there are more."""
        kept = min(group.length, self.size)

        def row_indices() -> torch.Tensor:
            return (
                group.slots.unsqueeze(-1) * self.size + group.positions()[:, -kept:] % self.size
            ).flatten()

        indices = group.cached(("rows", self.size), row_indices)
        values = values[:, -kept:].detach().to(self.rows.dtype).flatten(0, 1)
        self.rows.view(-1, self.rows.shape[-1]).index_copy_(0, indices, values)

    def span(self, slot: int, start: int, stop: int) -> torch.Tensor:
        """A copy [stop - start, width] of one slot's rows at these positions."""
        return self.rows[slot, torch.arange(start, stop, device=self.rows.device) % self.size]

    def write_span(self, slot: int, stop: int, values: torch.Tensor) -> None:
        """Store one slot's rows at the positions that end before `stop`."""
        indices = torch.arange(stop - len(values), stop, device=self.rows.device) % self.size
        self.rows[slot, indices] = values.to(self.rows)

    def rows_of(self, group: Group) -> torch.Tensor:
        """All rows [B, size, width] of the group's slots, in ring order."""
        if group.size == 1:
            slot = group.cached("slot", lambda: int(group.slots))
            return self.rows[slot : slot + 1]
        return self.rows[group.slots]


class LayerState:
    """The rings and pages of one layer."""

    def __init__(self, config: V4Config, ratio: int, state: State, name: str):
        self.name = name
        device = state.device
        dtype = state.dtype
        slots = state.slots
        back = state.lookback
        self.state = state
        self.ratio = ratio
        self.window_size = config.sliding_window
        self.keys = Ring(slots, config.sliding_window + back, config.head_dim, device, dtype)
        self.raw: dict[str, Ring] = {}
        self.pages: dict[str, torch.Tensor] = {}
        widths = {
            0: {},
            4: {ENTRY: config.head_dim, INDEX: config.index_head_dim},
            128: {ENTRY: config.head_dim},
        }
        for kind, width in widths[ratio].items():
            overlap = 2 if ratio == 4 else 1
            # Values and gates side by side; whole blocks, so that no block wraps around the end of the ring.
            size = ratio * (overlap + math.ceil(back / ratio))
            self.raw[kind] = Ring(slots, size, 2 * overlap * width, device, torch.float32)
            self.pages[kind] = torch.zeros(
                state.num_pages, PAGE_TOKENS // ratio, width, device=device, dtype=dtype
            )

    def prefill_keys(self, group: Group, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the keys [B, T, c] of chunks; returns up to window - 1 older keys followed by them, [B, P + T, c], and
        the index of each sequence's first valid one, [B]."""
        past = min(max(group.starts), self.window_size - 1)
        recent, oldest = keys, torch.zeros_like(group.first)
        if past:
            positions = group.first.unsqueeze(-1) + torch.arange(-past, 0, device=keys.device)
            recent = torch.cat((self.keys.read(group.slots, positions), keys), dim=1)
            oldest = (past - group.first).clamp_min(0)
        self._fill_snapshots(KEYS, self.keys, group, keys)
        self.keys.write(group, keys)
        return recent, oldest

    def decode_keys(self, group: Group, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Store one key per sequence [B, 1, c]; returns the rings in ring order [B, R, c], and which rows are visible
        [B, R], None if all are."""
        self.keys.write(group, keys)
        size, window = self.keys.size, self.window_size
        if size == window and min(group.starts) >= size - 1:
            return self.keys.rows_of(group), None

        def visible() -> torch.Tensor:
            position = group.first.unsqueeze(-1)
            age = (position - torch.arange(size, device=keys.device)) % size  # in tokens
            return (age < window) & (age <= position)

        return self.keys.rows_of(group), group.cached(("window", size), visible)

    def raw_before(self, kind: str, group: Group, count: int) -> torch.Tensor:
        """The last `count` raw rows before each start, [B, count, width]."""
        before = torch.arange(-count, 0, device=group.first.device)
        return self.raw[kind].read(group.slots, group.first.unsqueeze(-1) + before)

    def store_raw(self, kind: str, group: Group, raw: torch.Tensor) -> None:
        """Store raw compressor rows [B, T, width]."""
        if group.length > 1:
            self._fill_snapshots(kind, self.raw[kind], group, raw)
        self.raw[kind].write(group, raw)

    def rings(self) -> Iterable[tuple[str, Ring]]:
        yield KEYS, self.keys
        yield from self.raw.items()

    def first_needed(self, kind: str, position: int) -> int:
        """The first position whose row is still read by a sequence that continues at `position`."""
        if kind == KEYS:
            return max(0, position - self.window_size)
        lead = self.ratio if self.ratio == 4 else 0  # the finished block that overlaps the one in progress
        return max(0, position - position % self.ratio - lead)

    def _fill_snapshots(self, kind: str, ring: Ring, group: Group, values: torch.Tensor) -> None:
        """Fill watched snapshots from a chunk [B, T, width] before it overwrites the rows of the ring."""
        if not self.state.watched:
            return
        for member, slot in enumerate(group.cached("slot list", group.slots.tolist)):
            start = group.starts[member]
            for snapshot in self.state.watched.get(slot, ()):
                first = self.first_needed(kind, snapshot.position)
                stop = snapshot.position
                if not start < stop <= start + group.length:
                    continue
                rows = values[member, max(first - start, 0) : stop - start].to(ring.rows.dtype)
                if first < start:
                    rows = torch.cat((ring.span(slot, first, start), rows))
                snapshot.rows[f"{self.name}.{kind}"] = rows.clone()

    def snapshot_rows(self, kind: str, batch: Batch) -> SnapshotRows | None:
        """The rows of a ring that the watched snapshots of a step hold, or None without snapshots."""
        if not self.state.watched:
            return None
        # The rows depend on the ratio alone: the same for all layers of a kind.
        rows: SnapshotRows = batch.cached(
            ("snapshots", 0 if kind == KEYS else self.ratio), lambda: self._snapshot_rows(kind, batch)
        )
        return rows

    def _snapshot_rows(self, kind: str, batch: Batch) -> SnapshotRows:
        columns: list[np.ndarray] = [np.empty((3, 0), np.int64)]
        spans = []
        stop = 0
        for chunk, offset in zip(batch.chunks, batch.offsets):
            for snapshot in self.state.watched.get(chunk.slot, ()):
                if chunk.start < snapshot.position <= chunk.stop:
                    at = np.arange(self.first_needed(kind, snapshot.position), snapshot.position)
                    sources = np.where(at >= chunk.start, at - chunk.start + offset, -1)
                    columns.append(np.stack((np.full_like(at, chunk.slot), at, sources)))
                    spans.append((snapshot, stop, stop + len(at)))
                    stop += len(at)
        rows = to_device(np.concatenate(columns, axis=1), batch.token_ids.device)
        return SnapshotRows((rows[0], rows[1], rows[2]), spans)

    def fill_snapshots(self, kind: str, rows: SnapshotRows, values: torch.Tensor) -> None:
        """Give each snapshot its part of the gathered rows [k, width]."""
        for snapshot, first, stop in rows.spans:
            snapshot.rows[f"{self.name}.{kind}"] = values[first:stop]

    def store_entries(
        self, kind: str, slots: torch.Tensor, first: torch.Tensor, entries: torch.Tensor
    ) -> None:
        """Store `entries` [B, N, width] as entries `first[b], first[b] + 1, ...` of their sequences."""
        pages = self.pages[kind]
        index = first.unsqueeze(-1) + torch.arange(entries.shape[1], device=entries.device)
        page = self.state.page_table[slots.unsqueeze(-1), index // pages.shape[1]]
        pages[page, index % pages.shape[1]] = entries.detach().to(pages.dtype)

    def entries(self, kind: str, group: Group, count: int) -> torch.Tensor:
        """The first `count` entries of each sequence, [B, count, width]; entries that do not exist are undefined."""
        pages = self.pages[kind]
        per_page = pages.shape[1]
        used = math.ceil(count / per_page)
        table = group.cached(("pages", used), lambda: self.state.page_table[group.slots, :used])
        return pages[table].flatten(1, 2)[:, :count]

    def sequence_entries(self, kind: str, slot: int, count: int) -> torch.Tensor:
        """The first `count` entries of one sequence, [count, width]."""
        pages = self.pages[kind]
        used = math.ceil(count / pages.shape[1])
        return pages[self.state.page_table[slot, :used]].flatten(0, 1)[:count]


class State:
    """The state of all layers for up to `slots` sequences over `num_pages` pages."""

    def __init__(
        self,
        config: V4Config,
        slots: int,
        num_pages: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        lookback: int = 0,
        mtp: bool = False,
    ):
        self.config = config
        self.slots = slots
        self.num_pages = num_pages
        self.device = torch.device(device)
        self.dtype = dtype
        self.lookback = lookback
        max_pages = math.ceil(config.max_position_embeddings / PAGE_TOKENS)
        self.page_table = torch.zeros(slots, min(num_pages, max_pages), dtype=torch.long, device=device)
        self.table_array = self.page_table.numpy() if self.device.type == "cpu" else None
        self.layers = [
            LayerState(config, ratio, self, str(layer)) for layer, ratio in enumerate(config.compress_ratios)
        ]
        self.mtp = LayerState(config, 0, self, "mtp") if mtp else None
        self.watched: dict[int, list[Snapshot]] = {}  # by slot: filled by the chunks of the next step

    def at(self, layer: int) -> LayerState:
        return self.layers[layer]

    def give_pages(self, slot: int, pages: list[int]) -> None:
        """Set the pages of a sequence, in order of its tokens."""
        row = to_device(np.array(pages, np.int64), self.device)
        self.page_table[slot, : len(pages)].copy_(row, non_blocking=True)

    def page(self, index: int) -> dict[str, torch.Tensor]:
        """Views of one page of every layer, by name."""
        return {
            f"{layer.name}.{kind}": pages[index]
            for layer in self.layers
            for kind, pages in layer.pages.items()
        }

    def copy_page(self, source: int, target: int) -> None:
        for layer in self.layers:
            for pages in layer.pages.values():
                pages[target] = pages[source]

    def save(self, slot: int, position: int) -> Snapshot:
        """A snapshot of a sequence at `position`, which may be up to `lookback` tokens back."""
        snapshot = Snapshot(position)
        for layer in self._all_layers():
            for kind, ring in layer.rings():
                rows = ring.span(slot, layer.first_needed(kind, position), position)
                snapshot.rows[f"{layer.name}.{kind}"] = rows
        return snapshot

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        """Let a slot continue where a snapshot was taken."""
        for layer in self._all_layers():
            for kind, ring in layer.rings():
                rows = snapshot.rows.get(f"{layer.name}.{kind}")
                if rows is not None and len(rows):
                    ring.write_span(slot, snapshot.position, rows)

    def fits(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot has the rows of every layer (MTP's may be missing), each of the right shape and dtype."""
        for layer in self._all_layers():
            for kind, ring in layer.rings():
                rows = snapshot.rows.get(f"{layer.name}.{kind}")
                if rows is None and layer is self.mtp:
                    continue
                count = snapshot.position - layer.first_needed(kind, snapshot.position)
                shape = (count, ring.rows.shape[-1])
                if rows is None or rows.shape != shape or rows.dtype != ring.rows.dtype:
                    return False
        return True

    def _all_layers(self) -> list[LayerState]:
        return self.layers if self.mtp is None else [*self.layers, self.mtp]

    @classmethod
    def contiguous(cls, config: V4Config, slots: int, tokens: int, **options: Any) -> State:
        """A state for `slots` sequences of up to `tokens` tokens each, with pages assigned."""
        pages = math.ceil(tokens / PAGE_TOKENS)
        state = cls(config, slots, slots * pages, **options)
        for slot in range(slots):
            state.give_pages(slot, list(range(slot * pages, (slot + 1) * pages)))
        return state


class Fresh:
    """No past and no continuation: whole sequences from position 0. Stands for a `State` or a `LayerState`."""

    def __init__(self) -> None:
        self._entries: dict[str, torch.Tensor] = {}  # of the group that runs
        # Kind, slots and entries of every group.
        self._groups: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    @property
    def mtp(self) -> Fresh:
        return Fresh()

    def at(self, layer: int) -> Fresh:
        return Fresh()

    def prefill_keys(self, group: Group, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return keys, torch.zeros_like(group.first)

    def decode_keys(self, group: Group, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return keys, None

    def raw_before(self, kind: str, group: Group, count: int) -> torch.Tensor:
        raise AssertionError("a fresh sequence starts at 0 and has no unfinished block")

    def store_raw(self, kind: str, group: Group, raw: torch.Tensor) -> None:
        pass

    def store_entries(
        self, kind: str, slots: torch.Tensor, first: torch.Tensor, entries: torch.Tensor
    ) -> None:
        self._entries[kind] = entries
        self._groups.append((kind, slots, entries))

    def entries(self, kind: str, group: Group, count: int) -> torch.Tensor:
        return self._entries[kind]

    def sequence_entries(self, kind: str, slot: int, count: int) -> torch.Tensor:
        """The first `count` entries of one sequence, [count, width]."""
        for stored, slots, entries in self._groups:
            members = slots.tolist()
            if stored == kind and slot in members:
                return entries[members.index(slot), :count]
        raise AssertionError("a sequence with entries has stored them")
