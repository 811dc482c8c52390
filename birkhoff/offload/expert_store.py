"""The routed experts of all layers, some in device memory and the others in host memory, behind one address table.

Every expert has one home: a slot on the device (hot) or in page-locked host memory (cold). Kernels read the addresses
in `table` [layers, experts, 4] int64, so the location of an expert is data that a captured graph does not depend on.
Experts are never modified, so three rules suffice:

- A copy goes to a slot that nothing else uses; its address enters the table after the copy is complete.
- A slot that was left is reused only after the steps that may still read it (`HostCopy.wait_current_stream`).
- Only `publish` and `wait` write the table, in the order of the current stream, and never during a step.

`swap` exchanges the homes of a cold and a hot expert through spare slots on both sides. `acquire` adds a cached copy of
a cold expert on the device: it is in use while its reference count is positive, remains until its slot is needed, and
is dropped without a copy back.

Forward passes of several threads may share a store. `lock` is held by every operation that moves an expert, by an
`ExpertPrefetch` while it is open, and by an engine during a step, so that nothing moves between looking up an expert
and launching the kernels that read it.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from birkhoff.offload.copy_stream import HostCopy, copy_stream_for
from birkhoff.offload.expert_layout import ExpertId, PackedExpertLayout
from birkhoff.offload.read_gate import ReadGate

P = ParamSpec("P")
T = TypeVar("T")

GOLDEN = 0.6180339887  # multiples of it modulo 1 are spread evenly


@dataclass
class CachedExpert:
    """A copy of a cold expert in a device slot; valid after `event`, in the table once `published`."""

    expert: ExpertId
    slot: int
    event: Any
    refcount: int = 0
    published: bool = False


@dataclass(frozen=True)
class _Swap:
    """A swap in progress: `arriving` is copied to device slot `slot`, `leaving` to host slot `host_slot`."""

    arriving: ExpertId
    leaving: ExpertId
    slot: int
    host_slot: int
    event: Any


def _locked(method: Callable[Concatenate[ExpertStore, P], T]) -> Callable[Concatenate[ExpertStore, P], T]:
    def locked(self: ExpertStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.lock:
            return method(self, *args, **kwargs)

    functools.update_wrapper(locked, method)
    return locked


class ExpertStore:
    """`resident` [layers, experts] bool selects the experts that begin on the device. `layout` is that of all experts,
    or one per layer; every slot holds the largest.

    `spare` device slots are for cached copies and swaps, and as many host slots for swaps; without cold experts there
    are none."""

    def __init__(
        self,
        layout: PackedExpertLayout | Sequence[PackedExpertLayout],
        resident: torch.Tensor,
        device: torch.device | str = "cpu",
        spare: int = 4,
        copy_stream: HostCopy | None = None,
    ):
        self.device = torch.device(device)
        self.layers, self.experts = resident.shape
        self.layouts = [layout] * self.layers if isinstance(layout, PackedExpertLayout) else list(layout)
        self.slot_bytes = max(each.nbytes for each in self.layouts)
        self.copy_stream = copy_stream or copy_stream_for(self.device)
        hot, total = int(resident.sum()), resident.numel()
        self.spare = spare if hot < total else 0
        host_count = total - hot + min(self.spare, hot)
        self.slots = torch.empty(hot + self.spare, self.slot_bytes, dtype=torch.uint8, device=self.device)
        self.host_slots = self.copy_stream.host_slots(host_count, self.slot_bytes)
        self.table = torch.empty(self.layers, self.experts, 4, dtype=torch.int64, device=self.device)
        # In how many steps each expert was read.
        self.read_counts = torch.zeros(self.layers, self.experts, dtype=torch.int32, device=self.device)
        # For decode steps: as `table`, without the experts that the host computes (`compute_on_host`).
        self.decode_table = self.table
        self.on_host = torch.zeros(self.layers, self.experts, dtype=torch.bool, device=self.device)
        self._host_side: Callable[[Iterable[ExpertId]], None] | None = None
        self._host_share = 1.0
        self._offsets = torch.tensor([each.offsets for each in self.layouts], dtype=torch.int64)
        self._homes: dict[ExpertId, tuple[bool, int]] = {}  # on the device, slot
        self._resident = resident.clone()  # the first halves of the homes
        free = list(range(len(self.slots)))[::-1]
        host_free = list(range(len(self.host_slots)))[::-1]
        for layer, row in enumerate(resident.tolist()):
            for index, on_device in enumerate(row):
                self._homes[layer, index] = (on_device, (free if on_device else host_free).pop())
        self._free = free
        self._host_free = host_free
        self._cached: OrderedDict[ExpertId, CachedExpert] = OrderedDict()  # least recently used first
        self._swaps: list[_Swap] = []
        self._moving: set[ExpertId] = set()
        self.lock = threading.RLock()
        self.read_gate: ReadGate | None = None  # while cold experts are still being read from the files
        self._write_table(self._homes)

    # Locations

    def resident(self) -> torch.Tensor:
        """[layers, experts] bool: the experts whose home is on the device."""
        return self._resident.clone()

    def is_cold(self, expert: ExpertId) -> bool:
        return not self._homes[expert][0]

    def any_cold(self, layer: int) -> bool:
        return any(self.is_cold((layer, index)) for index in range(self.experts))

    def wait_until_read(self, layer: int, experts: Iterable[int]) -> None:
        """Wait until these experts of a layer were read from the files; returns at once after loading."""
        gate = self.read_gate
        if gate is not None:
            gate.wait([(layer, index) for index in experts])
            if gate.complete:
                self.read_gate = None

    def home_parts(self, expert: ExpertId) -> tuple[Any, ...]:
        """The four matrices of an expert at its home; None for scales that are part of the codes."""
        self.wait_until_read(expert[0], expert[1:])
        on_device, slot = self._homes[expert]
        return self.layouts[expert[0]].parts((self.slots if on_device else self.host_slots)[slot])

    def cached_parts(self, cached: CachedExpert) -> tuple[Any, ...]:
        """The four matrices of a cached copy."""
        return self.layouts[cached.expert[0]].parts(self.slots[cached.slot])

    def address(self, expert: ExpertId) -> int:
        """The address that kernels read: of the published copy, or of the home."""
        cached = self._cached.get(expert)
        if cached is not None and cached.published:
            return self.slots.data_ptr() + cached.slot * self.slot_bytes
        on_device, slot = self._homes[expert]
        slots = self.slots if on_device else self.host_slots
        return slots.data_ptr() + slot * self.slot_bytes

    @_locked
    def compute_on_host(self, moved: Callable[[Iterable[ExpertId]], None], share: float = 1.0) -> None:
        """From now on, decode steps leave experts without a copy on the device to the host, or a `share` of them: they
        are marked in `on_host` and have address zero in `decode_table`. `moved` is called with experts whose home may
        have changed, before a step that reads the new one."""
        self.decode_table = torch.empty_like(self.table)
        self._host_side, self._host_share = moved, share
        self._write_table(self._homes)

    def compute_on_device(self) -> None:
        """Undo `compute_on_host`."""
        self.decode_table, self._host_side = self.table, None
        self.on_host.zero_()

    # Homes

    @_locked
    def swap(self, arriving: ExpertId, leaving: ExpertId) -> bool:
        """Begin to exchange the homes of a cold and a hot expert; False if no slot is free or one of them is moving or
        in use."""
        assert self.is_cold(arriving) and not self.is_cold(leaving), (arriving, leaving)
        cached = self._cached.get(arriving)
        if (
            (self.read_gate is not None and not self.read_gate.complete)
            or arriving in self._moving
            or leaving in self._moving
            or not self._host_free
            or (cached is not None and cached.refcount)
        ):
            return False
        if cached is not None:
            self._evict(cached)
        slot = self._take_slot()
        if slot is None:
            return False
        host_slot = self._host_free.pop()
        self.copy_stream.copy(self.slots[slot], self.host_slots[self._homes[arriving][1]])
        self.copy_stream.copy(self.host_slots[host_slot], self.slots[self._homes[leaving][1]])
        self._moving |= {arriving, leaving}
        self._swaps.append(_Swap(arriving, leaving, slot, host_slot, self.copy_stream.record_event()))
        return True

    @_locked
    def publish(self, wait: bool = False) -> int:
        """Enter completed copies into the table, between steps; returns the number of swaps that were completed.

        With `wait`, blocks until all copies in progress are complete."""
        pending, changed = [], []
        for swap in self._swaps:
            if wait:
                self.copy_stream.synchronize(swap.event)
            elif not self.copy_stream.is_complete(swap.event):
                pending.append(swap)
                continue
            self._host_free.append(self._homes[swap.arriving][1])
            self._free.append(self._homes[swap.leaving][1])
            self._homes[swap.arriving], self._homes[swap.leaving] = (True, swap.slot), (False, swap.host_slot)
            self._resident[swap.arriving], self._resident[swap.leaving] = True, False
            self._moving -= {swap.arriving, swap.leaving}
            changed += [swap.arriving, swap.leaving]
        completed = len(self._swaps) - len(pending)
        self._swaps = pending
        for cached in self._cached.values():
            if not cached.published and (wait or self.copy_stream.is_complete(cached.event)):
                if wait:
                    self.copy_stream.synchronize(cached.event)
                cached.published = True
                changed.append(cached.expert)
        if changed:
            self._write_table(changed)
            self.copy_stream.wait_current_stream()
        return completed

    # Cached copies

    @_locked
    def acquire(self, expert: ExpertId) -> CachedExpert | None:
        """Take a reference to a device copy of a cold expert, begun now if there is none; None if no slot is free."""
        assert self.is_cold(expert), expert
        cached = self._cached.get(expert)
        if cached is None:
            if expert in self._moving:
                return None
            slot = self._take_slot()
            if slot is None:
                return None
            try:
                self.wait_until_read(expert[0], expert[1:])
            except BaseException:
                self._free.append(slot)
                raise
            self.copy_stream.copy(self.slots[slot], self.host_slots[self._homes[expert][1]])
            cached = self._cached[expert] = CachedExpert(expert, slot, self.copy_stream.record_event())
        self._cached.move_to_end(expert)
        cached.refcount += 1
        return cached

    @_locked
    def wait(self, copies: Iterable[CachedExpert], publish: bool = True) -> None:
        """Make the current stream wait for these copies; with `publish`, also enter them into the table."""
        published = []
        for cached in copies:
            self.copy_stream.wait_event(cached.event)
            if publish and not cached.published:
                cached.published = True
                published.append(cached.expert)
        if published:
            self._write_table(published)

    @_locked
    def release(self, cached: CachedExpert) -> None:
        """Return a reference. The copy remains until its slot is needed."""
        assert cached.refcount, cached
        cached.refcount -= 1

    def available_slots(self) -> int:
        """How many more cached copies could be begun."""
        return len(self._free) + sum(not cached.refcount for cached in self._cached.values())

    def _take_slot(self) -> int | None:
        if not self._free:
            unused = next((cached for cached in self._cached.values() if not cached.refcount), None)
            if unused is None:
                return None
            self._evict(unused)
        return self._free.pop()

    def _evict(self, cached: CachedExpert) -> None:
        """Point the table at the home again, and free the slot for copies that follow the steps in progress."""
        del self._cached[cached.expert]
        if cached.published:
            self._write_table([cached.expert])
        self.copy_stream.wait_current_stream()
        self._free.append(cached.slot)

    # The table

    def host_range(self) -> tuple[int, int] | None:
        """Addresses from .. to of experts in host memory; None if there can be none."""
        first = self.host_slots.data_ptr()
        return (first, first + self.host_slots.nbytes) if self.host_slots.numel() else None

    def count_reads(self, ids: torch.Tensor, layer: int = 0) -> None:
        """Count one read of every expert that occurs in `ids` [l, n, k], the selections of layers `layer`, ...: a step
        reads an expert once, however many tokens selected it. The operations are fixed, so a graph can capture them."""
        used = torch.zeros(len(ids), self.experts, dtype=torch.int32, device=ids.device)
        used.scatter_(1, ids.flatten(1).long(), 1)
        self.read_counts[layer : layer + len(ids)].add_(used)

    def _write_table(self, experts: Iterable[ExpertId]) -> None:
        changed = list(dict.fromkeys(experts))
        rows = torch.tensor([layer * self.experts + index for layer, index in changed])
        starts = torch.tensor([self.address(expert) for expert in changed], dtype=torch.int64)
        values = starts.unsqueeze(-1) + self._offsets[[layer for layer, _ in changed]]
        rows, values = rows.to(self.device), values.to(self.device)
        self.table.view(-1, 4).index_copy_(0, rows, values)
        if self._host_side is not None:
            self._host_side(changed)
            cold = torch.tensor([self._left_to_host(expert) for expert in changed]).to(self.device)
            self.on_host.view(-1).index_copy_(0, rows, cold)
            own = values.masked_fill(cold.unsqueeze(-1), 0)
            self.decode_table.view(-1, 4).index_copy_(0, rows, own)

    def _left_to_host(self, expert: ExpertId) -> bool:
        cached = self._cached.get(expert)
        layer, index = expert
        # The same ones always, spread evenly over a layer's experts.
        in_share = (index * GOLDEN + layer / self.layers) % 1.0 < self._host_share
        return self.is_cold(expert) and in_share and (cached is None or not cached.published)
