"""What a sequence leaves behind for its later tokens (spec 12.1), in fixed memory.

Per layer and slot: a ring of the last window keys, and for compressing layers a ring of raw compressor rows. Compressed
entries and index keys live in a pool of pages of 128 tokens (32 CSA entries or 1 HCA entry), reached through one page
table for all layers, so that a prefix can later be shared page by page.

Rings are addressed by position (`position mod size`) and read only where a position says a row is valid, so a slot
needs no clearing between sequences. `lookback` keeps that many extra rows: a sequence can then step back by as many
tokens without losing anything, because nothing in the state but the rings is ever overwritten by a shorter future.

A `Snapshot` is everything but the pages that a sequence needs to go on from one of its positions: it can be taken from
the rings while they still hold the rows, or be filled by a long chunk that passes the position on its way (`watch`).

`Fresh` is the state of sequences that start at 0 and are not continued: nothing is remembered, everything is
differentiable.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from birkhoff.config import PAGE_TOKENS, V4Config
from birkhoff.model.batch import Group

ENTRY, INDEX = "entry", "index"  # the main compressor and the indexer's own
KEYS = "keys"  # the window


@dataclass(eq=False)
class Snapshot:
    """Rows before `position`, by the name of their ring."""

    position: int
    rows: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows.values())


class Ring:
    """Rows `[slots, size, width]` addressed by position modulo size."""

    def __init__(self, slots: int, size: int, width: int, device: torch.device, dtype: torch.dtype):
        self.rows = torch.zeros(slots, size, width, device=device, dtype=dtype)
        self.size = size
        self.array = self.rows.numpy() if device.type == "cpu" and dtype is torch.float32 else None

    def read(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[B, P, width] at `positions` [B, P]."""
        return self.rows[slots.unsqueeze(-1), positions % self.size]

    def write(self, group: Group, values: torch.Tensor) -> None:
        """Keep [B, T, width] at the group's positions; of more rows than there is room for, the newest."""
        kept = min(group.length, self.size)

        def rows() -> torch.Tensor:
            return (
                group.slots.unsqueeze(-1) * self.size + group.positions()[:, -kept:] % self.size
            ).flatten()

        where = group.once(("rows", self.size), rows)
        values = values[:, -kept:].detach().to(self.rows.dtype).flatten(0, 1)
        self.rows.view(-1, self.rows.shape[-1]).index_copy_(0, where, values)

    def span(self, slot: int, start: int, stop: int) -> torch.Tensor:
        """A copy [stop - start, width] of one slot's rows at these positions."""
        return self.rows[slot, torch.arange(start, stop, device=self.rows.device) % self.size]

    def put(self, slot: int, stop: int, values: torch.Tensor) -> None:
        """One slot's rows back at the positions that end before `stop`."""
        at = torch.arange(stop - len(values), stop, device=self.rows.device) % self.size
        self.rows[slot, at] = values.to(self.rows)

    def of(self, group: Group) -> torch.Tensor:
        """All rows [B, size, width] of the group's slots, as they lie."""
        if group.size == 1:
            slot = group.once("slot", lambda: int(group.slots))
            return self.rows[slot : slot + 1]
        return self.rows[group.slots]


class LayerState:
    """One layer's rings and pages."""

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
            # Values and gates side by side; whole blocks, so that a block never straddles the ring's seam.
            size = ratio * (overlap + math.ceil(back / ratio))
            self.raw[kind] = Ring(slots, size, 2 * overlap * width, device, torch.float32)
            self.pages[kind] = torch.zeros(
                state.num_pages, PAGE_TOKENS // ratio, width, device=device, dtype=dtype
            )

    def recent(self, group: Group, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Prefill: up to window-1 older keys, then the group's own, which are kept; and the first valid one."""
        past = min(max(group.starts), self.window_size - 1)
        recent, oldest = keys, torch.zeros_like(group.first)
        if past:
            positions = group.first.unsqueeze(-1) + torch.arange(-past, 0, device=keys.device)
            recent = torch.cat((self.keys.read(group.slots, positions), keys), dim=1)
            oldest = (past - group.first).clamp_min(0)
        self._pass(KEYS, self.keys, group, keys)
        self.keys.write(group, keys)
        return recent, oldest

    def window(self, group: Group, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Decoding: keep each sequence's key [B, 1, c], then hand out its ring as it lies [B, R, c] and which rows are
        visible [B, R], None when all are."""
        self.keys.write(group, keys)
        size, window = self.keys.size, self.window_size
        if size == window and min(group.starts) >= size - 1:
            return self.keys.of(group), None

        def seen() -> torch.Tensor:
            at = group.first.unsqueeze(-1)
            age = (at - torch.arange(size, device=keys.device)) % size  # how long ago each row was written
            return (age < window) & (age <= at)

        return self.keys.of(group), group.once(("window", size), seen)

    def unfinished(self, kind: str, group: Group, count: int) -> torch.Tensor:
        """The last `count` raw rows before each start, [B, count, width]."""
        before = torch.arange(-count, 0, device=group.first.device)
        return self.raw[kind].read(group.slots, group.first.unsqueeze(-1) + before)

    def carry(self, kind: str, group: Group, raw: torch.Tensor) -> None:
        if group.length > 1:
            self._pass(kind, self.raw[kind], group, raw)
        self.raw[kind].write(group, raw)

    def rings(self) -> Iterable[tuple[str, Ring]]:
        yield KEYS, self.keys
        yield from self.raw.items()

    def needed(self, kind: str, position: int) -> int:
        """The first position whose row a sequence that goes on at `position` will still read."""
        if kind == KEYS:
            return max(0, position - self.window_size)
        lead = self.ratio if self.ratio == 4 else 0  # the finished block that overlaps the one being filled
        return max(0, position - position % self.ratio - lead)

    def _pass(self, kind: str, ring: Ring, group: Group, values: torch.Tensor) -> None:
        """Fill watched snapshots from a chunk [B, T, width] that is about to be written over the rows before it."""
        if not self.state.watched:
            return
        for member, slot in enumerate(group.once("slot list", group.slots.tolist)):
            start = group.starts[member]
            for snapshot in self.state.watched.get(slot, ()):
                first = self.needed(kind, snapshot.position)
                stop = snapshot.position
                if not start < stop <= start + group.length:
                    continue
                rows = values[member, max(first - start, 0) : stop - start].to(ring.rows.dtype)
                if first < start:
                    rows = torch.cat((ring.span(slot, first, start), rows))
                snapshot.rows[f"{self.name}.{kind}"] = rows.clone()

    def append(self, kind: str, slots: torch.Tensor, first: torch.Tensor, entries: torch.Tensor) -> None:
        """Store `entries` [B, N, width] as numbers `first[b], first[b] + 1, ...` of their sequences."""
        pages = self.pages[kind]
        number = first.unsqueeze(-1) + torch.arange(entries.shape[1], device=entries.device)
        page = self.state.page_table[slots.unsqueeze(-1), number // pages.shape[1]]
        pages[page, number % pages.shape[1]] = entries.detach().to(pages.dtype)

    def entries(self, kind: str, group: Group, count: int) -> torch.Tensor:
        """The first `count` entries of each sequence, [B, count, width]; those not yet made are undefined."""
        pages = self.pages[kind]
        per_page = pages.shape[1]
        used = math.ceil(count / per_page)
        table = group.once(("pages", used), lambda: self.state.page_table[group.slots, :used])
        return pages[table].flatten(1, 2)[:, :count]


class State:
    """All layers' state for up to `slots` sequences over `num_pages` pages."""

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
        longest = math.ceil(config.max_position_embeddings / PAGE_TOKENS)
        self.page_table = torch.zeros(slots, min(num_pages, longest), dtype=torch.long, device=device)
        self.table_array = self.page_table.numpy() if self.device.type == "cpu" else None
        self.layers = [
            LayerState(config, ratio, self, str(n)) for n, ratio in enumerate(config.compress_ratios)
        ]
        self.mtp = LayerState(config, 0, self, "mtp") if mtp else None
        self.watched: dict[int, list[Snapshot]] = {}  # by slot: to be filled by the chunks of the coming step

    def at(self, layer: int) -> LayerState:
        return self.layers[layer]

    def give_pages(self, slot: int, pages: list[int]) -> None:
        """Let a sequence use these pages, in order of its tokens."""
        self.page_table[slot, : len(pages)] = torch.tensor(pages, dtype=torch.long)

    def page(self, number: int) -> dict[str, torch.Tensor]:
        """One page of every layer, by name, where it lies."""
        return {
            f"{layer.name}.{kind}": pages[number]
            for layer in self.layers
            for kind, pages in layer.pages.items()
        }

    def copy_page(self, source: int, target: int) -> None:
        for layer in self.layers:
            for pages in layer.pages.values():
                pages[target] = pages[source]

    def save(self, slot: int, position: int) -> Snapshot:
        """What the rings hold of a sequence before `position`, which may lie up to `lookback` tokens back."""
        snapshot = Snapshot(position)
        for layer in self._every_layer():
            for kind, ring in layer.rings():
                rows = ring.span(slot, layer.needed(kind, position), position)
                snapshot.rows[f"{layer.name}.{kind}"] = rows
        return snapshot

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        """Let a slot go on where a snapshot was taken."""
        for layer in self._every_layer():
            for kind, ring in layer.rings():
                rows = snapshot.rows.get(f"{layer.name}.{kind}")
                if rows is not None and len(rows):
                    ring.put(slot, snapshot.position, rows)

    def fits(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot has every layer's rows (MTP's may be missing), each of the right shape and dtype."""
        for layer in self._every_layer():
            for kind, ring in layer.rings():
                rows = snapshot.rows.get(f"{layer.name}.{kind}")
                if rows is None and layer is self.mtp:
                    continue
                needed = snapshot.position - layer.needed(kind, snapshot.position)
                if (
                    rows is None
                    or rows.shape != (needed, ring.rows.shape[-1])
                    or rows.dtype != ring.rows.dtype
                ):
                    return False
        return True

    def _every_layer(self) -> list[LayerState]:
        return self.layers if self.mtp is None else [*self.layers, self.mtp]

    @classmethod
    def contiguous(cls, config: V4Config, slots: int, tokens: int, **options) -> State:
        """Room for `slots` sequences of up to `tokens` tokens each, pages already given."""
        each = math.ceil(tokens / PAGE_TOKENS)
        state = cls(config, slots, slots * each, **options)
        for slot in range(slots):
            state.give_pages(slot, list(range(slot * each, (slot + 1) * each)))
        return state


class Fresh:
    """No past and no future: whole sequences from position 0."""

    def __init__(self) -> None:
        self._made: dict[str, torch.Tensor] = {}

    @property
    def mtp(self) -> Fresh:
        return Fresh()

    def at(self, layer: int) -> Fresh:
        return Fresh()

    def recent(self, group: Group, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return keys, torch.zeros_like(group.first)

    def window(self, group: Group, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return keys, None

    def unfinished(self, kind: str, group: Group, count: int) -> torch.Tensor:
        raise AssertionError("a fresh sequence starts at 0 and has no unfinished block")

    def carry(self, kind: str, group: Group, raw: torch.Tensor) -> None:
        pass

    def append(self, kind: str, slots: torch.Tensor, first: torch.Tensor, entries: torch.Tensor) -> None:
        self._made[kind] = entries

    def entries(self, kind: str, group: Group, count: int) -> torch.Tensor:
        return self._made[kind]
