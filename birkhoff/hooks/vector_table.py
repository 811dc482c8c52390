"""Tables of vectors that edits add: which vector a step adds to which token is data and changes no shape or kernel.

One slab `[slots, width]` per width holds every distinct vector once, for all requests and sites: slots are found by
content and reference counted. Slot 0 adds nothing. A row id stands for one edit of one request; every site has a
map from row ids to slots, 0 where the edit does nothing. So one index, token to row, serves all sites and widths of
a step, and `gather_add` is three fixed operations on buffers that stay in place. Slabs and maps are written between
steps; on the host they grow by doubling up to their limit, for recorded graphs they are allocated whole (`fixed`).

Zero is stored as minus zero, which leaves every number unchanged when added, minus zero included.
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
TableSite = tuple[str, int, Path]  # hook, layer, and the path that the edit changes


@dataclass(frozen=True, eq=False)
class Content:
    """The vector that one edit adds at one site: `row` [width] float32, and its digest."""

    digest: bytes
    row: torch.Tensor

    @classmethod
    def of(cls, edit: SiteEdit, width: int) -> Content:
        row = edit.constant(width)
        row = torch.where(row == 0, -0.0, row)
        return cls(row_digest(row), row)


RowContent = Mapping[TableSite, Content]


class Slab:
    """Vectors of one width, each distinct one once."""

    def __init__(self, width: int, device: torch.device, limit: int, fixed: bool = False):
        self.width = width
        self.limit = limit
        self.rows = torch.full((limit if fixed else min(FIRST_SLOTS, limit), width), -0.0, device=device)
        self._slot_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self.uses: Counter[int] = Counter()
        self._free = list(range(len(self.rows) - 1, SENTINEL, -1))

    @property
    def room(self) -> int:
        """How many more distinct vectors fit."""
        return self.limit - 1 - len(self._digest_of)

    def contains(self, digest: bytes) -> bool:
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

    def release(self, slot: int) -> None:
        self.uses[slot] -= 1
        assert self.uses[slot] >= 0, f"slot {slot} was released more often than taken"
        if not self.uses[slot]:
            del self.uses[slot], self._slot_of[self._digest_of.pop(slot)]
            self._free.append(slot)

    def _grow(self) -> None:
        old = len(self.rows)
        size = min(2 * old, self.limit)
        assert size > old, "room was checked before rows were taken"
        grown = self.rows.new_full((size, self.width), -0.0)
        grown[:old] = self.rows
        self.rows = grown
        self._free = list(range(size - 1, old - 1, -1))


class Tables:
    """All slabs of one engine, and the maps from row ids to slots of every site."""

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
        self.version = 0  # incremented whenever a row id changes its meaning
        self._sites: dict[TableSite, torch.Tensor] = {}
        self._widths: dict[TableSite, int] = {}
        self._slots: dict[int, list[tuple[TableSite, Slab, int]]] = {}
        self._capacity = max_rows if fixed else min(FIRST_ROWS, max_rows)
        self._free = list(range(self._capacity - 1, SENTINEL, -1))

    def prepare(self, widths: Mapping[TableSite, int]) -> None:
        """Allocate the maps of these sites and the slabs of their widths now: a graph is recorded before any vector is
        known."""
        for site, width in widths.items():
            self._add_site(site, self._slab(width))

    def check_fits(self, contents: Sequence[RowContent]) -> None:
        """Refuse contents that would not fit even into empty tables."""
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
        """A row id for each, or None if they do not all fit at the moment."""
        if len(contents) > self.max_rows - 1 - len(self._slots):
            return None
        for width, different in _different(contents).items():
            slab = self._slab(width)
            if sum(not slab.contains(digest) for digest in different) > slab.room:
                return None
        return [self._take(content) for content in contents]

    def release(self, rows: Iterable[int]) -> None:
        for row in rows:
            for site, slab, slot in self._slots.pop(row):
                self._sites[site][row] = SENTINEL
                slab.release(slot)
            self._free.append(row)
        self.version += 1

    def site(self, site: TableSite) -> tuple[torch.Tensor, torch.Tensor]:
        """The slab of a site and its map from row ids to slots."""
        return self.slabs[self._widths[site]].rows, self._sites[site]

    @property
    def rows_used(self) -> int:
        return len(self._slots)

    def _take(self, content: RowContent) -> int:
        if not self._free:
            self._grow()
        row = self._free.pop()
        slots = self._slots[row] = []
        for site, vector in content.items():
            slab = self._slab(len(vector.row))
            slot = slab.take(vector)
            self._add_site(site, slab)
            self._sites[site][row] = slot
            slots.append((site, slab, slot))
        self.version += 1
        return row

    def _add_site(self, site: TableSite, slab: Slab) -> None:
        if site not in self._sites:
            self._sites[site] = torch.zeros(self._capacity, dtype=torch.long, device=self.device)
            self._widths[site] = slab.width

    def _slab(self, width: int) -> Slab:
        if width not in self.slabs:
            self.slabs[width] = Slab(width, self.device, self.max_slots, self.fixed)
        return self.slabs[width]

    def _grow(self) -> None:
        old = self._capacity
        self._capacity = min(2 * self._capacity, self.max_rows)
        assert self._capacity > old, "room was checked before rows were taken"
        self._free = list(range(self._capacity - 1, old - 1, -1))
        for site, slots in self._sites.items():
            self._sites[site] = torch.cat((slots, slots.new_zeros(self._capacity - old)))


class TableRows:
    """The table rows of one request's edits, a `Reservation` of its plan. `row_of`: row id by index of the edit."""

    def __init__(
        self, tables: Tables, edits: Sequence[Mapping[tuple[str, int], object]], widths: Mapping[str, int]
    ):
        self.tables = tables
        self._contents: dict[int, RowContent] = {}
        known: dict[tuple[int, int], Content] = {}  # one operation may be used at many layers
        for index, sites in enumerate(edits):
            content: dict[TableSite, Content] = {}
            for (hook, layer), operation in sites.items():
                if isinstance(operation, SiteEdit) and operation.is_plain:
                    name = (id(operation), widths[hook])
                    if name not in known:
                        known[name] = Content.of(operation, widths[hook])
                    content[hook, layer, operation.path] = known[name]
            if content:
                self._contents[index] = content
        tables.check_fits(list(self._contents.values()))
        self.row_of: dict[int, int] = {}
        # Vectors are summed in this order, so that the order of edits in a request changes no bit.
        names = {
            index: sorted((site, vector.digest) for site, vector in content.items())
            for index, content in self._contents.items()
        }
        self.rank = {index: rank for rank, index in enumerate(sorted(names, key=names.__getitem__))}

    def __len__(self) -> int:
        return len(self._contents)

    def sites(self, index: int) -> Iterable[TableSite]:
        return self._contents[index]

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
    """x [n, ...] plus the vectors of each token's rows [lanes, n] at these sites; summed in float32, rounded once.

    Every operation has a fixed shape and reads buffers that stay in place."""
    return add_total(x, gather(token_rows, sites))


def gather(token_rows: torch.Tensor, sites: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The sum of vectors added to each token, [n, width] float32."""
    total: torch.Tensor | None = None
    for rows in token_rows:
        for slab, slots in sites:
            vectors = slab.index_select(0, slots.index_select(0, rows))
            total = vectors if total is None else total + vectors
    assert total is not None, "there is at least one lane and one site"
    return total


def _different(contents: Sequence[RowContent]) -> dict[int, set[bytes]]:
    """The distinct digests of all contents, by width."""
    digests: dict[int, set[bytes]] = {}
    for content in contents:
        for vector in content.values():
            digests.setdefault(len(vector.row), set()).add(vector.digest)
    return digests
