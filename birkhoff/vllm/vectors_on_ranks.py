"""Which vectors the ranks have: each is sent once, and dropped when it is old and no request names it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping

KEPT = 1024  # vectors that no running request names


class VectorsOnRanks:
    def __init__(self, kept: int = KEPT):
        self._kept = kept
        self._users: Counter[str] = Counter()
        self._unused: OrderedDict[str, None] = OrderedDict()  # least recently used first

    def use(self, vectors: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
        """A request names these vectors, by digest: which of them to send, and which others to drop."""
        missing = {
            digest: text
            for digest, text in vectors.items()
            if not self._users[digest] and digest not in self._unused
        }
        for digest in vectors:
            self._users[digest] += 1
            self._unused.pop(digest, None)
        dropped = []
        while len(self._unused) > self._kept:
            dropped.append(self._unused.popitem(last=False)[0])
        return missing, dropped

    def release(self, digests: Iterable[str]) -> None:
        """The request that named these has ended."""
        for digest in digests:
            self._users[digest] -= 1
            if self._users[digest] <= 0:
                del self._users[digest]
                self._unused[digest] = None
