"""Reference-counted ids of pages, slots and memory blocks.

Ids are allocated and released; releasing an id that is not held is a bug and fails an assertion. An id may have several
readers, and may be kept: then its content stays after the last release until the id is needed again. Kept ids are
evicted in the order of their release, protected ones only when there are no others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence


class IdPool:
    """Ids `0..size-1`. `on_eviction` is called with a kept id that is about to be reused."""

    def __init__(self, size: int, on_eviction: Callable[[int], None] | None = None):
        self.size = size
        self.on_eviction = on_eviction
        self._free = list(range(size - 1, -1, -1))
        self._refcounts = [0] * size
        self._kept = [False] * size
        self._protected: set[int] = set()
        # kept with refcount 0, least recently released first
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._idle_protected: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Number of ids that can be allocated, including idle ones."""
        return len(self._free) + self.num_idle

    @property
    def num_idle(self) -> int:
        """Number of kept ids with a reference count of 0."""
        return len(self._idle) + len(self._idle_protected)

    def allocate(self, count: int) -> list[int] | None:
        """`count` ids with a reference count of 1, or None when fewer are free."""
        if count > self.num_free:
            return None
        ids = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for id in ids:
            self._refcounts[id] = 1
        return ids

    def share(self, ids: Sequence[int]) -> None:
        """Add a reference to kept ids."""
        for id in ids:
            assert self._kept[id], f"{id} is not kept and cannot be shared"
            self._idle.pop(id, None)
            self._idle_protected.pop(id, None)
            self._refcounts[id] += 1

    def keep(self, id: int) -> None:
        """Keep the content of a held id after its last release."""
        assert self._refcounts[id], f"{id} is not held"
        self._kept[id] = True

    def forget(self, id: int) -> None:
        """Undo `keep`: free the id now or at its last release."""
        self._kept[id] = False
        self._protected.discard(id)
        if id in self._idle or id in self._idle_protected:
            self._idle.pop(id, None)
            self._idle_protected.pop(id, None)
            self._free.append(id)

    def protect(self, ids: Collection[int]) -> None:
        """Evict these ids last; replaces the set of an earlier call."""
        self._protected = set(ids)
        idle = [*self._idle_protected, *self._idle]
        self._idle = OrderedDict.fromkeys(id for id in idle if id not in self._protected)
        self._idle_protected = OrderedDict.fromkeys(id for id in idle if id in self._protected)

    def release(self, ids: Sequence[int]) -> None:
        """Drop one reference of each id, in reverse order so that suffix pages are evicted first."""
        for id in reversed(ids):
            assert self._refcounts[id], f"{id} was released twice"
            self._refcounts[id] -= 1
            if self._refcounts[id]:
                continue
            if self._kept[id]:
                (self._idle_protected if id in self._protected else self._idle)[id] = None
            else:
                self._free.append(id)

    def _evict(self) -> int:
        id, _ = (self._idle or self._idle_protected).popitem(last=False)
        self._kept[id] = False
        self._protected.discard(id)
        if self.on_eviction is not None:
            self.on_eviction(id)
        return id
