"""Cold experts on the device while a chunk of a prompt needs them: each copied once, while others are at work.

A chunk of thousands of tokens asks nearly every expert of a layer, and its products read each of them many times; over
the bus that would be paid each time. A `ExpertPrefetch` is one layer's turn: copies run ahead of the experts' order through the
store's spare runs. `HashRoutePrefetch` begins with layers whose experts follow from token ids alone, before the chunk does. Where
no run is to be had an expert is read at home: slower, never different.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from birkhoff.offload.expert_store import CachedExpert, Expert, ExpertStore


class ExpertPrefetch:
    """The experts `wanted` of one layer, in ascending order."""

    def __init__(self, store: ExpertStore, layer: int, wanted: Sequence[int]):
        self.store = store
        self.layer = layer
        self.wanted = sorted(wanted)
        self._waiting: deque[int] = deque()
        self._loans: dict[int, CachedExpert] = {}

    def __enter__(self) -> ExpertPrefetch:
        self.store.lock.acquire()
        self._waiting.extend(number for number in self.wanted if self.store.is_cold((self.layer, number)))
        return self

    def __exit__(self, *_: object) -> None:
        for loan in self._loans.values():
            self.store.let_go(loan)
        self._loans.clear()
        self.store.lock.release()

    def parts(self, number: int) -> tuple[torch.Tensor, ...]:
        """The four matrices of an expert, on the device if a run was to be had, else at home; whoever asks for the next
        is done with those before."""
        for passed in [each for each in self._loans if each < number]:
            self.store.let_go(self._loans.pop(passed))
        self._send()
        loan = self._loans.get(number)
        if loan is None:
            return self.store.home((self.layer, number))
        self.store.join([loan], show=False)
        return self.store.lent(loan)

    def waves(self) -> Iterator[tuple[list[int], torch.Tensor]]:
        """For kernels that read through the table: experts by turns, and this layer's [experts, 4] addresses, which are
        on the device for those of the turn. First those at home there; behind them the cold ones, half the spare runs
        at a time, so that one half is copied while the other is read."""
        cold = list(self._waiting)
        half = self._half()
        table = self.store.table[self.layer]
        groups = [cold[at : at + half] for at in range(0, len(cold), half)]
        self._lend(groups[0] if groups else [])
        at_home = [number for number in self.wanted if number not in set(cold)]
        if at_home:
            yield at_home, table
        for turn, group in enumerate(groups):
            self._lend(group)  # those for which there was no run before
            self._lend(groups[turn + 1] if turn + 1 < len(groups) else [])
            here = [self._loans.pop(number) for number in group if number in self._loans]
            self.store.join(here)
            try:
                yield group, table
            finally:
                for loan in here:
                    self.store.let_go(loan)

    def _half(self) -> int:
        return max(1, self.store.spare // 2)

    def _lend(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            loan = None if number in self._loans else self.store.lend((self.layer, number))
            if loan is not None:
                self._loans[number] = loan

    def _send(self) -> None:
        while self._waiting and self.store.room() and len(self._loans) < self._half():
            self._lend([self._waiting.popleft()])


class HashRoutePrefetch:
    """Loans for hash-routed layers. `tables` holds, by layer, each token's experts [vocab, k] in host memory."""

    def __init__(self, store: ExpertStore, tables: dict[int, torch.Tensor]):
        self.store = store
        self.tables = tables
        self._held: list[CachedExpert] = []

    def wanted(self, token_ids: Sequence[int]) -> list[Expert]:
        """Cold experts that these tokens will ask for, the first layers' first."""
        tokens = torch.tensor(sorted(set(token_ids)), dtype=torch.long)
        return [
            (layer, number)
            for layer, table in sorted(self.tables.items())
            for number in table[tokens].unique().tolist()
            if self.store.is_cold((layer, number))
        ]

    def send(self, token_ids: Sequence[int]) -> int:
        """Begin the copies for the coming step, as far as half of the spare runs go; how many there are."""
        self.let_go()
        for expert in self.wanted(token_ids)[: self.store.spare // 2]:
            loan = self.store.lend(expert)
            if loan is not None:
                self._held.append(loan)
        return len(self._held)

    def let_go(self) -> None:
        """The step is over; the copies stay while nobody wants their runs."""
        for loan in self._held:
            self.store.let_go(loan)
        self._held.clear()
