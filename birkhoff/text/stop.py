"""Stop strings in streamed text.

The stop that *ends* first wins, and of those ending together the longest. That rule can be decided the moment the
character arrives, so the result does not depend on how the text was cut. Text is held back only while it is the
beginning of some stop; the automaton's depth is exactly that length (Aho and Corasick, 1975), and each character costs
a constant number of steps however many stops there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from birkhoff.errors import OptionError, quoted


class StopMatcher:
    """Feed text, get the text that is safe to show; `matched` is the stop once one was met."""

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise OptionError(f"stop is {quoted(stops)}, expected a list of non-empty strings.")
        self.matched: str | None = None
        self._held = ""
        self._node = 0
        # One node per stop prefix: its children, where to go when none fits, and the longest stop it ends.
        self._children: list[dict[str, int]] = [{}]
        self._ends: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._fallback = [0] * len(self._children)
        self._link()

    def feed(self, text: str) -> str:
        """The part of everything seen so far that is now known to be no stop; nothing after a match."""
        if self.matched is not None or not text:
            return ""
        if len(self._children) == 1:
            return text
        for i, character in enumerate(text):
            self._node = self._step(self._node, character)
            stop = self._ends[self._node]
            if stop is not None:
                self.matched = stop
                shown = self._held + text[: i + 1]
                self._held = ""
                return shown[: len(shown) - len(stop)]
        shown = self._held + text
        keep = self._depth[self._node]
        self._held = shown[len(shown) - keep :]
        return shown[: len(shown) - keep]

    def finish(self) -> str:
        """The text that was held back and became no stop."""
        text = self._held
        self._held = ""
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
