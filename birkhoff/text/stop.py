"""Match stop strings in streamed text.

The stop that *ends* first wins; of several that end together, the longest. This is decidable at each character, so the
result does not depend on how the text is split. Text is held back only while it is a prefix of some stop; that length
is the depth of the automaton (Aho and Corasick, 1975), and each character costs a constant number of steps for any
number of stops.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from birkhoff.errors import OptionError, quoted


class StopMatcher:
    """Returns text that is safe to show; `matched` is the stop once one matched."""

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise OptionError(f"stop is {quoted(stops)}, expected a list of non-empty strings.")
        self.matched: str | None = None
        self._buffer = ""
        self._node = 0
        # One node per stop prefix: children, fallback node, and the longest stop that ends there.
        self._children: list[dict[str, int]] = [{}]
        self._ends: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._fallback = [0] * len(self._children)
        self._link()

    def feed(self, text: str) -> str:
        """Return the text now known not to be part of a stop; nothing after a match."""
        if self.matched is not None or not text:
            return ""
        if len(self._children) == 1:
            return text
        for i, character in enumerate(text):
            self._node = self._step(self._node, character)
            stop = self._ends[self._node]
            if stop is not None:
                self.matched = stop
                shown = self._buffer + text[: i + 1]
                self._buffer = ""
                return shown[: len(shown) - len(stop)]
        shown = self._buffer + text
        keep = self._depth[self._node]
        self._buffer = shown[len(shown) - keep :]
        return shown[: len(shown) - keep]

    def finish(self) -> str:
        """Return the text held back, which did not become a stop."""
        text = self._buffer
        self._buffer = ""
        self._node = 0
        return text

    def _insert(self, stop: str) -> None:
        node = 0
        for character in stop:
            if character not in self._children[node]:
                self._children[node][character] = len(self._children)
                self._children.append({})
                self._ends.append(None)
            node = self._children[node][character]
        self._ends[node] = stop

    def _link(self) -> None:
        self._depth = [0] * len(self._children)
        queue = deque([0])
        while queue:
            node = queue.popleft()
            for character, child in self._children[node].items():
                self._depth[child] = self._depth[node] + 1
                self._fallback[child] = self._step(self._fallback[node], character) if node else 0
                if self._ends[child] is None:
                    self._ends[child] = self._ends[self._fallback[child]]
                queue.append(child)

    def _step(self, node: int, character: str) -> int:
        while node and character not in self._children[node]:
            node = self._fallback[node]
        return self._children[node].get(character, 0)
