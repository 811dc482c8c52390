"""Vectors that are added, in tables: what a step adds to which token is data, so it changes no shape and no kernel.

One slab `[slots, width]` for each width holds every different vector once, whoever uses it and at however many sites:
slots are found by content and counted by use. Slot 0 adds nothing. A row number stands for one edit of one request; at
every site a small map says which slot it means there, 0 where the edit does nothing. So one index, token to row, serves
all sites and widths of a step, and `gather_add` is three fixed operations on buffers that never move. Slabs and maps
are written between steps, in place; on hosts they grow by doubling up to their limit, where graphs are recorded they
are made whole at once (`fixed`).

Zero is stored as minus zero, the one number that leaves every other as it is, minus zero included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from birkhoff.errors import CapacityError
from birkhoff.hooks.digest import row_digest
from birkhoff.hooks.edit import Path, SiteEdit, add_total

SENTINEL = 0  # the slot, and the row, that changes nothing
FIRST_SLOTS, FIRST_ROWS = 16, 16
MAX_SLOTS, MAX_ROWS = 4096, 4096
TableSite = tuple[str, int, Path]  # hook, layer, and who sees the edit there


@dataclass(frozen=True, eq=False)
class Content:
    """What one edit adds at one site: `row` [width] float32, named by its digest."""

    digest: bytes
    row: torch.Tensor

    @classmethod
    def of(cls, edit: SiteEdit, width: int) -> Content:
        row = edit.constant(width)
        row = torch.where(row == 0, -0.0, row)
        return cls(row_digest(row), row)


RowContent = Mapping[TableSite, Content]


class Slab:
    """Rows of one width, each different one once."""

    def __init__(self, width: int, device: torch.device, most: int, fixed: bool = False):
        self.width = width
        self.most = most
        self.rows = torch.full((most if fixed else min(FIRST_SLOTS, most), width), -0.0, device=device)
        self._slot_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self.uses: Counter[int] = Counter()
        self._free = list(range(len(self.rows) - 1, SENTINEL, -1))

    @property
    def room(self) -> int:
        """How many rows that are not here yet could still be taken."""
        return self.most - 1 - len(self._digest_of)

    def holds(self, digest: bytes) -> bool:
        return digest in self._slot_of

    def take(self, content: Content) -> int:
        slot = self._slot_of.get(content.digest)
        if slot is None:
            if not self._free:
                self._grow()
            slot = self._free.pop()
            self.rows[slot].copy_(content.row)
            self._slot_of[content.digest], self._digest_of[slot] = slot, content.digest
        self.uses[slot] += 1
        return slot

    def drop(self, slot: int) -> None:
        self.uses[slot] -= 1
        assert self.uses[slot] >= 0, f"slot {slot} was dropped more often than taken"
        if not self.uses[slot]:
            del self.uses[slot], self._slot_of[self._digest_of.pop(slot)]
            self._free.append(slot)

    def _grow(self) -> None:
        old = len(self.rows)
        size = min(2 * old, self.most)
        assert size > old, "room was checked before rows were taken"
        grown = self.rows.new_full((size, self.width), -0.0)
        grown[:old] = self.rows
        self.rows = grown
        self._free = list(range(size - 1, old - 1, -1))


class Tables:
    """All slabs of one engine, and what every row number means at every site."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        max_slots: int = MAX_SLOTS,
        max_rows: int = MAX_ROWS,
        fixed: bool = False,
    ):
        self.device = torch.device(device)
        self.max_slots = max_slots
        self.max_rows = max_rows
        self.fixed = fixed
        self.slabs: dict[int, Slab] = {}
        self.version = 0  # counts every change of what a row number means
        self._sites: dict[TableSite, torch.Tensor] = {}
        self._widths: dict[TableSite, int] = {}
        self._held: dict[int, list[tuple[TableSite, Slab, int]]] = {}
        self._capacity = max_rows if fixed else min(FIRST_ROWS, max_rows)
        self._free = list(range(self._capacity - 1, SENTINEL, -1))

    def check_fits(self, contents: Sequence[RowContent]) -> None:
        """Refuse what could not be held even if nobody else held anything."""
        for width, different in _different(contents).items():
            if len(different) > self.max_slots - 1:
                raise CapacityError(
                    f"this request adds {len(different)} different vectors of {width} numbers, the steering tables "
                    f"hold {self.max_slots - 1}. Add fewer, or make the tables larger."
                )
        if len(contents) > self.max_rows - 1:
            raise CapacityError(
                f"this request has {len(contents)} edits that add a vector, the steering tables have rows for "
                f"{self.max_rows - 1}. Join some of them, or make the tables larger."
            )

    def reserve(self, contents: Sequence[RowContent]) -> list[int] | None:
        """A row number for each, or None when there is no room for all of them now."""
        if len(contents) > self.max_rows - 1 - len(self._held):
            return None
        for width, different in _different(contents).items():
            slab = self._slab(width)
            if sum(not slab.holds(digest) for digest in different) > slab.room:
                return None
        return [self._take(content) for content in contents]

    def release(self, rows: Iterable[int]) -> None:
        for row in rows:
            for site, slab, slot in self._held.pop(row):
                self._sites[site][row] = SENTINEL
                slab.drop(slot)
            self._free.append(row)
        self.version += 1

    def site(self, site: TableSite) -> tuple[torch.Tensor, torch.Tensor]:
        """The slab of a site and its map from row numbers to slots."""
        return self.slabs[self._widths[site]].rows, self._sites[site]

    @property
    def rows_held(self) -> int:
        return len(self._held)

    def _take(self, content: RowContent) -> int:
        if not self._free:
            self._more_rows()
        row = self._free.pop()
        held = self._held[row] = []
        for site, what in content.items():
            slab = self._slab(len(what.row))
            slot = slab.take(what)
            if site not in self._sites:
                self._sites[site] = torch.zeros(self._capacity, dtype=torch.long, device=self.device)
                self._widths[site] = slab.width
            self._sites[site][row] = slot
            held.append((site, slab, slot))
        self.version += 1
        return row

    def _slab(self, width: int) -> Slab:
        if width not in self.slabs:
            self.slabs[width] = Slab(width, self.device, self.max_slots, self.fixed)
        return self.slabs[width]

    def _more_rows(self) -> None:
        old = self._capacity
        self._capacity = min(2 * self._capacity, self.max_rows)
        assert self._capacity > old, "room was checked before rows were taken"
        self._free = list(range(self._capacity - 1, old - 1, -1))
        for site, slots in self._sites.items():
            self._sites[site] = torch.cat((slots, slots.new_zeros(self._capacity - old)))


class TableRows:
    """The rows of one request's edits: a `Holding` of its plan. `row_of` has the edits that are in the tables."""

    def __init__(
        self, tables: Tables, edits: Sequence[Mapping[tuple[str, int], object]], widths: Mapping[str, int]
    ):
        self.tables = tables
        self._contents: dict[int, RowContent] = {}
        known: dict[tuple[int, int], Content] = {}  # one operation serves many layers and is read once
        for number, sites in enumerate(edits):
            content: dict[TableSite, Content] = {}
            for (hook, layer), change in sites.items():
                if isinstance(change, SiteEdit) and change.is_plain:
                    name = (id(change), widths[hook])
                    if name not in known:
                        known[name] = Content.of(change, widths[hook])
                    content[hook, layer, change.path] = known[name]
            if content:
                self._contents[number] = content
        tables.check_fits(list(self._contents.values()))
        self.row_of: dict[int, int] = {}
        # Sums are made in this order, so that listing the same edits differently changes no bit.
        named = {
            number: sorted((site, what.digest) for site, what in content.items())
            for number, content in self._contents.items()
        }
        self.rank = {number: place for place, number in enumerate(sorted(named, key=named.__getitem__))}

    def __len__(self) -> int:
        return len(self._contents)

    def sites(self, number: int) -> Iterable[TableSite]:
        return self._contents[number]

    def reserve(self) -> bool:
        assert not self.row_of, "rows are reserved once"
        rows = self.tables.reserve(list(self._contents.values()))
        if rows is None:
            return False
        self.row_of = dict(zip(self._contents, rows))
        return True

    def release(self) -> None:
        if self.row_of:
            self.tables.release(self.row_of.values())
            self.row_of = {}


def gather_add(
    x: torch.Tensor, token_rows: torch.Tensor, sites: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """x [n, ...] plus what each token's rows [lanes, n] mean at these sites; summed in float32, rounded once.

    Every operation has a fixed shape and reads buffers that stay where they are."""
    return add_total(x, gather(token_rows, sites))


def gather(token_rows: torch.Tensor, sites: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """What is added to each token, [n, width] float32."""
    total: torch.Tensor | None = None
    for rows in token_rows:
        for slab, slots in sites:
            vectors = slab.index_select(0, slots.index_select(0, rows))
            total = vectors if total is None else total + vectors
    assert total is not None, "there is a lane and a site"
    return total


def _different(contents: Sequence[RowContent]) -> dict[int, set[bytes]]:
    """The digests of all contents, by width."""
    found: dict[int, set[bytes]] = {}
    for content in contents:
        for what in content.values():
            found.setdefault(len(what.row), set()).add(what.digest)
    return found
