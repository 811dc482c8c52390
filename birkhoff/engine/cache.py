"""Who holds which page and slot of the model's state, and how many bytes they are.

Pages and slots are handed out whole and come back whole; giving back what is not held is a bug and says so. The numbers
of bytes are computed from the config, so that a plan can be made before anything is allocated.
"""

from __future__ import annotations

from birkhoff.config import PAGE_TOKENS, V4Config


class Pool:
    """Numbers `0..size-1`, lent out and taken back."""

    def __init__(self, size: int):
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._held = [False] * size

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` numbers, or None when fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for number in taken:
            self._held[number] = True
        return taken

    def give_back(self, numbers: list[int]) -> None:
        for number in numbers:
            assert self._held[number], f"{number} was given back twice"
            self._held[number] = False
            self._free.append(number)


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


def slot_bytes(config: V4Config, item_bytes: int) -> int:
    """What one running request costs whatever its length: window rings and raw compressor rows (float32)."""
    total = 0
    for ratio in config.compress_ratios:
        total += config.sliding_window * config.head_dim * item_bytes
        if ratio == 4:
            total += 8 * 2 * 2 * (config.head_dim + config.index_head_dim) * 4
        elif ratio == 128:
            total += 128 * 2 * config.head_dim * 4
    return total
