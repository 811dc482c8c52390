"""Where the routed experts of all layers lie: some in device memory, the others in host memory, behind one table.

Every expert has one home, a run of bytes on the device (hot) or in the host's page-locked memory (cold), and `table`
[layers, experts, 4] int64 holds the addresses that kernels read: where an expert lies is data, and a captured graph
need not know. Experts never change, so three rules are enough:

- A copy is made into a run that belongs to nobody; its address appears in the table when it has arrived whole.
- A run that was left is free for copies only behind the steps that may still be reading it (`HostCopy.fence`).
- Only `settle` and `join` write the table, in the order of the current stream: never during a step.

`swap` exchanges the homes of a cold and a hot expert through spare runs on both sides, without room for a second copy
of everything in host memory. `lend` puts a copy of a cold expert beside its home: a loan is used while it is held,
stays as long as its run is not wanted, and ends without a copy back.

Passes of several threads may share a store: `lock` is held by whoever moves something, by a `Stage` while it is up, and
by an engine for a step, so that nothing moves between finding an expert and giving the device what reads it.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from birkhoff.offload.copy_stream import HostCopy, copy_stream_for
from birkhoff.offload.expert_layout import PackedExpertLayout

Expert = tuple[int, int]  # layer, number
P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class CachedExpert:
    """A copy of a cold expert in run `run` of the device; `held` by so many, public once kernels are shown it."""

    expert: Expert
    run: int
    ticket: Any
    held: int = 0
    public: bool = False


@dataclass(frozen=True)
class _Exchange:
    """Copies under way: `arriving` to device run `run`, `leaving` to host run `host_run`."""

    arriving: Expert
    leaving: Expert
    run: int
    host_run: int
    ticket: Any


def _locked(method: Callable[Concatenate[ExpertStore, P], T]) -> Callable[Concatenate[ExpertStore, P], T]:
    @functools.wraps(method)
    def alone(self: ExpertStore, *arguments: P.args, **options: P.kwargs) -> T:
        with self.lock:
            return method(self, *arguments, **options)

    return alone


class ExpertStore:
    """`resident` [layers, experts] bool says who begins on the device. `spare` runs of the device are for loans and
    exchanges, and as many of the host for exchanges; without cold experts there are none."""

    def __init__(
        self,
        record: PackedExpertLayout,
        resident: torch.Tensor,
        device: torch.device | str = "cpu",
        spare: int = 4,
        courier: HostCopy | None = None,
    ):
        self.record = record
        self.device = torch.device(device)
        self.layers, self.experts = resident.shape
        self.courier = courier or copy_stream_for(self.device)
        hot, total = int(resident.sum()), resident.numel()
        self.spare = spare if hot < total else 0
        exchanges = min(self.spare, hot)
        self.runs = torch.empty(hot + self.spare, record.nbytes, dtype=torch.uint8, device=self.device)
        self.host_runs = self.courier.host_runs(total - hot + exchanges, record.nbytes)
        self.table = torch.empty(self.layers, self.experts, 4, dtype=torch.int64, device=self.device)
        self.counts = torch.zeros(
            self.layers, self.experts, dtype=torch.int32, device=self.device
        )  # reads by steps
        self._offsets = torch.tensor(record.offsets, dtype=torch.int64)
        self._homes: dict[Expert, tuple[bool, int]] = {}
        self._hot = resident.clone()  # the first halves of the homes, for who looks at all of them
        free = list(range(len(self.runs)))[::-1]
        host_free = list(range(len(self.host_runs)))[::-1]
        for layer, row in enumerate(resident.tolist()):
            for number, on_device in enumerate(row):
                self._homes[layer, number] = (on_device, (free if on_device else host_free).pop())
        self._free = free
        self._host_free = host_free
        self._loans: OrderedDict[Expert, CachedExpert] = OrderedDict()  # the one used longest ago first
        self._exchanges: list[_Exchange] = []
        self._busy: set[Expert] = set()
        self.lock = threading.RLock()
        self._show(self._homes)

    # What is where

    def resident(self) -> torch.Tensor:
        """[layers, experts] bool: whose home is on the device."""
        return self._hot.clone()

    def is_cold(self, expert: Expert) -> bool:
        return not self._homes[expert][0]

    def any_cold(self, layer: int) -> bool:
        return any(self.is_cold((layer, number)) for number in range(self.experts))

    def home(self, expert: Expert) -> tuple[torch.Tensor, ...]:
        """The four matrices where they lie at home."""
        on_device, run = self._homes[expert]
        return self.record.parts((self.runs if on_device else self.host_runs)[run])

    def address(self, expert: Expert) -> int:
        """Where kernels are to read: a public loan, or home."""
        loan = self._loans.get(expert)
        on_device, run = (True, loan.run) if loan is not None and loan.public else self._homes[expert]
        runs = self.runs if on_device else self.host_runs
        return runs.data_ptr() + run * self.record.nbytes

    def owners(self) -> dict[str, dict[int, Expert | None]]:
        """Who has which run, the free ones and those that are being filled too: for whoever checks the books."""
        sides: dict[str, dict[int, Expert | None]] = {
            "device": dict.fromkeys(self._free),
            "host": dict.fromkeys(self._host_free),
        }
        entries = [("device" if on_device else "host", run, e) for e, (on_device, run) in self._homes.items()]
        entries += [("device", loan.run, loan.expert) for loan in self._loans.values()]
        for each in self._exchanges:
            entries += [("device", each.run, each.arriving), ("host", each.host_run, each.leaving)]
        for side, run, expert in entries:
            assert run not in sides[side], f"two have {side} run {run}"
            sides[side][run] = expert
        return sides

    # Homes

    @_locked
    def swap(self, arriving: Expert, leaving: Expert) -> bool:
        """Begin to exchange the homes of a cold and a hot expert; False where no run is free or one of them moves."""
        assert self.is_cold(arriving) and not self.is_cold(leaving), (arriving, leaving)
        loan = self._loans.get(arriving)
        if (
            arriving in self._busy
            or leaving in self._busy
            or not self._host_free
            or (loan is not None and loan.held)
        ):
            return False
        if loan is not None:
            self._end(loan)
        run = self._take_run()
        if run is None:
            return False
        host_run = self._host_free.pop()
        self.courier.copy(self.runs[run], self.host_runs[self._homes[arriving][1]])
        self.courier.copy(self.host_runs[host_run], self.runs[self._homes[leaving][1]])
        self._busy |= {arriving, leaving}
        self._exchanges.append(_Exchange(arriving, leaving, run, host_run, self.courier.ticket()))
        return True

    @_locked
    def settle(self, wait: bool = False) -> int:
        """Between steps: show kernels what has arrived; the number of finished exchanges. `wait` for all of them."""
        still, moved = [], []
        for each in self._exchanges:
            if wait:
                self.courier.wait(each.ticket)
            elif not self.courier.arrived(each.ticket):
                still.append(each)
                continue
            self._host_free.append(self._homes[each.arriving][1])
            self._free.append(self._homes[each.leaving][1])
            self._homes[each.arriving], self._homes[each.leaving] = (True, each.run), (False, each.host_run)
            self._hot[each.arriving], self._hot[each.leaving] = True, False
            self._busy -= {each.arriving, each.leaving}
            moved += [each.arriving, each.leaving]
        done = len(self._exchanges) - len(still)
        self._exchanges = still
        for loan in self._loans.values():
            if not loan.public and (wait or self.courier.arrived(loan.ticket)):
                if wait:
                    self.courier.wait(loan.ticket)
                loan.public = True
                moved.append(loan.expert)
        if moved:
            self._show(moved)
            self.courier.fence()
        return done

    # Loans

    @_locked
    def lend(self, expert: Expert) -> CachedExpert | None:
        """Hold a copy of a cold expert on the device, begun now if there is none; None where no run is free."""
        assert self.is_cold(expert), expert
        loan = self._loans.get(expert)
        if loan is None:
            if expert in self._busy:
                return None
            run = self._take_run()
            if run is None:
                return None
            self.courier.copy(self.runs[run], self.host_runs[self._homes[expert][1]])
            loan = self._loans[expert] = CachedExpert(expert, run, self.courier.ticket())
        self._loans.move_to_end(expert)
        loan.held += 1
        return loan

    @_locked
    def join(self, loans: Iterable[CachedExpert], show: bool = True) -> None:
        """Let the current stream wait for these copies and, to `show` them, read them through the table from now on."""
        new = []
        for loan in loans:
            self.courier.join(loan.ticket)
            if show and not loan.public:
                loan.public = True
                new.append(loan.expert)
        if new:
            self._show(new)

    @_locked
    def let_go(self, loan: CachedExpert) -> None:
        """The copy stays until its run is wanted."""
        assert loan.held, loan
        loan.held -= 1

    def lent(self, loan: CachedExpert) -> tuple[torch.Tensor, ...]:
        return self.record.parts(self.runs[loan.run])

    def room(self) -> int:
        """How many more loans could be begun."""
        return len(self._free) + sum(not loan.held for loan in self._loans.values())

    def _take_run(self) -> int | None:
        if not self._free:
            idle = next((loan for loan in self._loans.values() if not loan.held), None)
            if idle is None:
                return None
            self._end(idle)
        return self._free.pop()

    def _end(self, loan: CachedExpert) -> None:
        """Kernels go home again before the run is given to another; steps under way may still read it."""
        del self._loans[loan.expert]
        if loan.public:
            self._show([loan.expert])
        self.courier.fence()
        self._free.append(loan.run)

    # The table

    def far(self) -> tuple[int, int] | None:
        """Addresses from .. to of experts that lie in host memory; None if none can."""
        first = self.host_runs.data_ptr()
        return (first, first + self.host_runs.nbytes) if self.host_runs.numel() else None

    def count(self, ids: torch.Tensor, layer: int = 0) -> None:
        """One more read for every expert that occurs in `ids` [l, n, k], the choices of layers `layer`, ...: a step
        reads an expert once, however many tokens chose it. Fixed operations, so that a graph can hold them."""
        used = torch.zeros(len(ids), self.experts, dtype=torch.int32, device=ids.device)
        used.scatter_(1, ids.flatten(1).long(), 1)
        self.counts[layer : layer + len(ids)].add_(used)

    def _show(self, experts: Iterable[Expert]) -> None:
        chosen = list(dict.fromkeys(experts))
        rows = torch.tensor([layer * self.experts + number for layer, number in chosen])
        starts = torch.tensor([self.address(expert) for expert in chosen], dtype=torch.int64)
        values = starts.unsqueeze(-1) + self._offsets
        self.table.view(-1, 4).index_copy_(0, rows.to(self.device), values.to(self.device))
