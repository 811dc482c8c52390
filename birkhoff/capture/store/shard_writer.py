"""Shards: files shared by many requests, one open per slot of each tag, replaced when full.

A request always uses the slot its id hashes to, so its rows stay in order; if a shard fills up within a request, the
next one continues it. At most `max_open` shards are open: the least recently used is sealed first. A shard that failed
is set aside and its slot opens a new one, so that a bad file does not affect later requests.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from birkhoff.capture.sinks.chunk import Chunk
from birkhoff.capture.sinks.result import CaptureFinish
from birkhoff.capture.store.naming import shard_index, shard_seq, shard_stem
from birkhoff.capture.store.open_file import OpenFile, RequestState

MAX_SHARD_ENTRIES = 1 << 16  # small rows fill a shard by count: its sidecar is read as a whole

OpenShard = Callable[[str, str, dict[str, object]], OpenFile]  # tag directory, stem, header


@dataclass(eq=False)
class _Slot:
    lock: threading.Lock = field(default_factory=threading.Lock)
    file: OpenFile | None = None
    next_seq: int | None = None


@dataclass(eq=False)
class ShardWriter:
    """`opened` creates the files of a shard; `full` receives shards that are no longer written."""

    root: str
    stage: str
    num_shards: int
    max_bytes: int
    max_open: int
    opened: OpenShard
    full: Callable[[OpenFile], None]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._num_open = 0
        self._slots: OrderedDict[tuple[str, int], _Slot] = OrderedDict()  # least recently used first

    def append(self, state: RequestState, chunk: Chunk) -> None:
        slot = self._slot(state)
        with slot.lock:
            file = self._file(state, slot)
            file.append(state, chunk)
            if file.nbytes + file.weight >= self.max_bytes or file.num_lines >= MAX_SHARD_ENTRIES:
                self._retire(slot)

    def finish(self, state: RequestState, finish: CaptureFinish) -> None:
        slot = self._slot(state)
        with slot.lock:
            file = self._file(state, slot)
            file.finish(state, finish)
            if file.num_lines >= MAX_SHARD_ENTRIES:
                self._retire(slot)

    def retire_all(self) -> None:
        """Seal every open shard; the slots stay usable."""
        with self._lock:
            slots = list(self._slots.values())
        for slot in slots:
            with slot.lock:
                self._retire(slot)

    def _slot(self, state: RequestState) -> _Slot:
        key = (state.directory, shard_index(state.request.request_id, self.num_shards))
        unused: list[_Slot] = []
        with self._lock:
            slot = self._slots.setdefault(key, _Slot())
            self._slots.move_to_end(key)
            if self._num_open >= self.max_open:
                unused = [
                    other for other in self._slots.values() if other.file is not None and other is not slot
                ][:1]
        for other in unused:
            with other.lock:
                self._retire(other)
        return slot

    def _file(self, state: RequestState, slot: _Slot) -> OpenFile:
        if slot.file is not None and slot.file.error is not None:
            self._retire(slot)
        if slot.file is None:
            index = shard_index(state.request.request_id, self.num_shards)
            if slot.next_seq is None:
                names = os.listdir(os.path.join(self.root, state.directory))
                used = [seq for name in names if (seq := shard_seq(name, self.stage, index)) is not None]
                slot.next_seq = max(used, default=-1) + 1
            stem = shard_stem(self.stage, index, slot.next_seq)
            slot.next_seq += 1  # also if opening fails: the name may exist partially
            header: dict[str, object] = {"layout": "sharded", "tag": state.request.tag, "shard_idx": index}
            slot.file = self.opened(state.directory, stem, header | {"seq": slot.next_seq - 1})
            with self._lock:
                self._num_open += 1
        slot.file.begin(state)
        return slot.file

    def _retire(self, slot: _Slot) -> None:
        if slot.file is not None:
            file = slot.file
            slot.file = None
            with self._lock:
                self._num_open -= 1
            self.full(file)
