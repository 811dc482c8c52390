"""Who holds which page and slot of the model's state, and how many bytes they are.

Pages and slots are handed out whole and come back whole; giving back what is not held is a bug and says so. A page may
have several holders, who only read it, and may be kept for later: then it stays as it is after its last holder has
gone, until room is needed. Those that were let go first are the first to be used for something else, and precious ones
only when there are no others.

The numbers of bytes are computed from the config, so that a plan can be made before anything is allocated.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from birkhoff.config import PAGE_TOKENS, V4Config


class Pool:
    """Numbers `0..size-1`, lent out and taken back. `on_eviction` hears of a kept one that is about to be reused."""

    def __init__(self, size: int, on_eviction: Callable[[int], None] | None = None):
        self.size = size
        self.on_eviction = on_eviction
        self._free = list(range(size - 1, -1, -1))
        self._holders = [0] * size
        self._kept = [False] * size
        self._precious: set[int] = set()
        self._idle: OrderedDict[int, None] = OrderedDict()  # kept and held by nobody, longest first
        self._idle_precious: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """How many can be taken, counting those that are only kept."""
        return len(self._free) + self.idle

    @property
    def idle(self) -> int:
        """How many are kept and held by nobody."""
        return len(self._idle) + len(self._idle_precious)

    def take(self, count: int) -> list[int] | None:
        """`count` numbers, or None when fewer are free."""
        if count > self.free:
            return None
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for number in taken:
            self._holders[number] = 1
        return taken

    def share(self, numbers: Sequence[int]) -> None:
        """Hold kept numbers together with whoever holds them already."""
        for number in numbers:
            assert self._kept[number], f"{number} is not there to be shared"
            self._idle.pop(number, None)
            self._idle_precious.pop(number, None)
            self._holders[number] += 1

    def keep(self, number: int) -> None:
        """Leave a held number as it is once nobody holds it."""
        assert self._holders[number], f"{number} is held by nobody"
        self._kept[number] = True

    def forget(self, number: int) -> None:
        """A kept number is not worth keeping any more."""
        self._kept[number] = False
        self._precious.discard(number)
        if number in self._idle or number in self._idle_precious:
            self._idle.pop(number, None)
            self._idle_precious.pop(number, None)
            self._free.append(number)

    def treasure(self, numbers: Collection[int]) -> None:
        """From now on these and no others are precious."""
        self._precious = set(numbers)
        idle = [*self._idle_precious, *self._idle]
        self._idle = OrderedDict.fromkeys(n for n in idle if n not in self._precious)
        self._idle_precious = OrderedDict.fromkeys(n for n in idle if n in self._precious)

    def give_back(self, numbers: Sequence[int]) -> None:
        """The last first: what only makes sense after others is the first to go."""
        for number in reversed(numbers):
            assert self._holders[number], f"{number} was given back twice"
            self._holders[number] -= 1
            if self._holders[number]:
                continue
            if self._kept[number]:
                (self._idle_precious if number in self._precious else self._idle)[number] = None
            else:
                self._free.append(number)

    def _evict(self) -> int:
        number, _ = (self._idle or self._idle_precious).popitem(last=False)
        self._kept[number] = False
        self._precious.discard(number)
        if self.on_eviction is not None:
            self.on_eviction(number)
        return number


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)


def page_bytes(config: V4Config, item_bytes: int) -> int:
    """One page over all layers: its compressed entries and index keys."""
    total = 0
    for ratio in config.compress_ratios:
        if ratio:
            width = config.head_dim + (config.index_head_dim if ratio == 4 else 0)
            total += PAGE_TOKENS // ratio * width * item_bytes
    return total


def slot_bytes(config: V4Config, item_bytes: int, lookback: int = 0, mtp: bool = False) -> int:
    """What one running request costs whatever its length: window rings and raw compressor rows (float32)."""
    total = 0
    for ratio in (*config.compress_ratios, *([0] if mtp else [])):
        total += (config.sliding_window + lookback) * config.head_dim * item_bytes
        blocks = -(-lookback // ratio) if ratio else 0
        if ratio == 4:
            total += 4 * (2 + blocks) * 2 * 2 * (config.head_dim + config.index_head_dim) * 4
        elif ratio == 128:
            total += 128 * (1 + blocks) * 2 * config.head_dim * 4
    return total


def snapshot_bytes(config: V4Config, item_bytes: int, mtp: bool = False) -> int:
    """What it takes, beside pages, to go on at the border of a page: windows, and the rows that overlap the border."""
    total = 0
    for ratio in (*config.compress_ratios, *([0] if mtp else [])):
        total += config.sliding_window * config.head_dim * item_bytes
        if ratio == 4:
            total += 4 * 2 * 2 * (config.head_dim + config.index_head_dim) * 4
    return total


def plan_prefix(
    config: V4Config, item_bytes: int, left: int, pages: int, mtp: bool = False
) -> tuple[int, int]:
    """More pages than requests can use at once, and bytes of snapshots, from what is `left`: one snapshot for every
    page, and no more than three times as many pages again as are at work."""
    each = page_bytes(config, item_bytes)
    snapshot = snapshot_bytes(config, item_bytes, mtp)
    extra = max(0, min(3 * pages, (left - pages * snapshot) // (each + snapshot)))
    return extra, min(left - extra * each, (pages + extra) * snapshot)
