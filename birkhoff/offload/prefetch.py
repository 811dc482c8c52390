"""Prefetch of cold experts to the device for a prompt chunk: one copy each, while other experts compute.

A chunk of thousands of tokens uses nearly every expert of a layer, and its products read each of them many times; over
the bus, each read would be paid. An `ExpertPrefetch` serves one layer: copies run ahead of the order in which experts
are computed, through the spare slots of the store. A `HashRoutePrefetch` begins the copies of layers whose experts
follow from token ids alone, before the chunk runs. If no slot is free, an expert is read at its home: slower, with the
same result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from birkhoff.offload.expert_layout import ExpertId
from birkhoff.offload.expert_store import CachedExpert, ExpertStore


class ExpertPrefetch:
    """Context in which the experts `used` of one layer are computed, in ascending order."""

    def __init__(self, store: ExpertStore, layer: int, used: Sequence[int]):
        self.store = store
        self.layer = layer
        self.used = sorted(used)
        self._pending: deque[int] = deque()  # cold experts without a copy
        self._copies: dict[int, CachedExpert] = {}

    def __enter__(self) -> ExpertPrefetch:
        self.store.lock.acquire()
        self._pending.extend(index for index in self.used if self.store.is_cold((self.layer, index)))
        return self

    def __exit__(self, *_: object) -> None:
        for cached in self._copies.values():
            self.store.release(cached)
        self._copies.clear()
        self.store.lock.release()

    def parts(self, index: int) -> tuple[Any, ...]:
        """The four matrices of an expert, on the device if there was a slot, else at home. Releases the copies of
        experts below `index`."""
        for finished in [each for each in self._copies if each < index]:
            self.store.release(self._copies.pop(finished))
        while self._pending and self.store.available_slots() and len(self._copies) < self._half():
            self._acquire([self._pending.popleft()])
        cached = self._copies.get(index)
        if cached is None:
            return self.store.home_parts((self.layer, index))
        self.store.wait([cached], publish=False)
        return self.store.cached_parts(cached)

    def waves(self) -> Iterator[tuple[list[int], torch.Tensor]]:
        """For kernels that read through the table: experts in groups, each with the layer's [experts, 4] addresses.

        The hot experts come first. The cold ones follow in groups of half the spare slots, so that one half is copied
        while the other is read; a group is on the device while it is yielded, as far as there were slots."""
        cold = list(self._pending)
        half = self._half()
        table = self.store.table[self.layer]
        groups = [cold[first : first + half] for first in range(0, len(cold), half)]
        self._acquire(groups[0] if groups else [])
        hot = [index for index in self.used if index not in set(cold)]
        if hot:
            yield hot, table
        for group, following in zip(groups, [*groups[1:], []]):
            self._acquire(group)  # those that found no slot before
            self._acquire(following)
            copies = [self._copies.pop(index) for index in group if index in self._copies]
            self.store.wait_until_read(self.layer, group)  # those without a slot are read at home
            self.store.wait(copies)
            try:
                yield group, table
            finally:
                for cached in copies:
                    self.store.release(cached)

    def _half(self) -> int:
        return max(1, self.store.spare // 2)

    def _acquire(self, indices: Sequence[int]) -> None:
        for index in indices:
            cached = None if index in self._copies else self.store.acquire((self.layer, index))
            if cached is not None:
                self._copies[index] = cached


class HashRoutePrefetch:
    """Cached copies for hash-routed layers. `tables`: experts of each token, [vocab, k] on the host, by layer."""

    def __init__(self, store: ExpertStore, tables: dict[int, torch.Tensor]):
        self.store = store
        self.tables = tables
        self._copies: list[CachedExpert] = []

    def cold_experts(self, token_ids: Sequence[int]) -> list[ExpertId]:
        """Cold experts that these tokens are routed to, in order of layers."""
        tokens = torch.tensor(sorted(set(token_ids)), dtype=torch.long)
        return [
            (layer, index)
            for layer, table in sorted(self.tables.items())
            for index in torch.unique(table[tokens]).tolist()
            if self.store.is_cold((layer, index))
        ]

    def begin(self, token_ids: Sequence[int]) -> int:
        """Begin the copies for the next step, in at most half of the spare slots; returns how many are held."""
        self.release()
        for expert in self.cold_experts(token_ids)[: self.store.spare // 2]:
            cached = self.store.acquire(expert)
            if cached is not None:
                self._copies.append(cached)
        return len(self._copies)

    def release(self) -> None:
        """After the step: the copies remain until their slots are needed."""
        for cached in self._copies:
            self.store.release(cached)
        self._copies.clear()
