"""Which experts of a store were read from the files, while other threads still read the rest.

An engine whose cold experts are read in the background computes with those that are there; a step that needs another
one waits for it (`ReadGate.wait`), and it is read next. Nothing that moves or replays experts without calling `wait`
may run before all are there (`ReadGate.complete`).

While a step runs (`ReadGate.step`), all but a few threads read only experts that it waits for: otherwise each of them
would share the disk with as many others as there are threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from birkhoff.offload.expert_layout import ExpertId


class ReadGate:
    """`experts` are still to be read, in this order except for those that a step waits for. While a step runs, at most
    `ahead` experts that it does not wait for are being read."""

    def __init__(self, experts: Iterable[ExpertId], ahead: int = 1):
        self._unread = dict.fromkeys(experts)  # in order; includes those being read
        self._total = len(self._unread)
        self._queue = deque(self._unread)
        self._wanted: deque[ExpertId] = deque()
        self._taken: set[ExpertId] = set()
        self._ahead = ahead
        self._being_read_ahead: set[ExpertId] = set()
        self._steps = 0  # running
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._closed = False

    @property
    def complete(self) -> bool:
        return not self._unread

    @property
    def num_unread(self) -> int:
        return len(self._unread)

    @property
    def wanted(self) -> tuple[ExpertId, ...]:
        """Experts that a step waits for and no thread reads yet."""
        with self._changed:
            return tuple(self._wanted)

    def wait(self, experts: Sequence[ExpertId]) -> None:
        """Return once these experts were read; raises the error that ended reading."""
        if not self._unread:
            return
        with self._changed:
            missing = [expert for expert in experts if expert in self._unread]
            self._wanted.extend(expert for expert in missing if expert not in self._taken)
            self._changed.notify_all()
            while any(expert in self._unread for expert in missing):
                if self._error is not None:
                    raise self._error
                self._changed.wait()

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step that may wait for experts runs."""
        with self._changed:
            self._steps += 1
        try:
            yield
        finally:
            with self._changed:
                self._steps -= 1
                self._changed.notify_all()

    def take(self) -> ExpertId | None:
        """The expert to read next, for a reading thread, which may have to wait for one; None if there is none left."""
        with self._changed:
            while not self._closed:
                if (expert := self._next_of(self._wanted)) is not None:
                    return expert
                if len(self._taken) == self._total:
                    return None
                if self._steps == 0 or len(self._being_read_ahead) < self._ahead:
                    expert = self._next_of(self._queue)
                    assert expert is not None, "the queue has every expert that was not taken"
                    self._being_read_ahead.add(expert)
                    return expert
                self._changed.wait()
            return None

    def _next_of(self, queue: deque[ExpertId]) -> ExpertId | None:
        while queue:
            expert = queue.popleft()
            if expert not in self._taken:
                self._taken.add(expert)
                if len(self._taken) == self._total:
                    self._changed.notify_all()  # threads that wait have nothing left to take
                return expert
        return None

    def done(self, expert: ExpertId) -> None:
        """An expert that was taken is complete."""
        with self._changed:
            del self._unread[expert]
            self._being_read_ahead.discard(expert)
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Reading has failed: every `wait` for an unread expert raises the error."""
        with self._changed:
            self._error, self._closed = error, True
            self._changed.notify_all()

    def close(self) -> None:
        """Take no more experts."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class BackgroundReader:
    """Threads that read the experts of a gate; `read` fills one of them."""

    def __init__(self, gate: ReadGate, read: Callable[[ExpertId], None], threads: int):
        self.gate = gate
        self._read = read
        self._threads = [
            threading.Thread(target=self._run, name=f"birkhoff-read-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while (expert := self.gate.take()) is not None:
            try:
                self._read(expert)
            except Exception as error:
                self.gate.fail(error)
                return
            self.gate.done(expert)

    def close(self) -> None:
        """Stop after the experts that are being read."""
        self.gate.close()
        for thread in self._threads:
            thread.join()
