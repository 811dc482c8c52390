"""Overflow storage for queued chunks: unnamed files, read once, in order of writing.

A segment is unlinked right after it is opened, so no file remains however the process ends; its space is freed after
its last chunk is read. A chunk is restored completely, labels included. Nothing here is durable, and need not be: a
queued chunk has not been acknowledged.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import uuid
from dataclasses import dataclass

from birkhoff.capture.sinks.chunk import Chunk
from birkhoff.capture.store.disk import CREATE, Disk, write_all
from birkhoff.errors import CaptureWriteError

SEGMENT_BYTES = 64 << 20


@dataclass(eq=False)
class _Segment:
    file: int
    size: int = 0
    waiting: int = 0  # chunks not read yet


@dataclass(frozen=True, slots=True)
class Spilled:
    """Reference to a chunk on disk, in place of the chunk in the queue."""

    segment: _Segment
    offset: int
    head_bytes: int
    body_bytes: int
    num_rows: int

    @property
    def nbytes(self) -> int:
        return self.head_bytes + self.body_bytes


class Spill:
    """Stores at most `max_bytes` of unread chunks."""

    def __init__(self, directory: str | None, max_bytes: int, disk: Disk | None = None):
        self._directory = directory or tempfile.gettempdir()
        self.max_bytes = max_bytes
        self._disk = disk or Disk()
        self._lock = threading.Lock()
        self._current: _Segment | None = None
        self.held_bytes = 0

    def put(self, chunk: Chunk) -> Spilled | None:
        """Write a chunk; None if the disk or the limit leaves no space."""
        body = chunk.data()
        head = json.dumps(chunk.head()).encode()
        head += b" " * (-len(head) % 8)  # keeps rows aligned
        size = len(head) + len(body)
        with self._lock:
            if self.held_bytes + size > self.max_bytes:
                return None
            try:
                segment = self._segment()
                offset = segment.size
                for piece in (head, body):
                    write_all(self._disk, segment.file, piece, offset)
                    offset += len(piece)
            except OSError:
                return None  # the next chunk overwrites what was written of this one
            spilled = Spilled(segment, segment.size, len(head), len(body), chunk.num_rows)
            segment.size += size
            segment.waiting += 1
            self.held_bytes += size
            return spilled

    def take(self, spilled: Spilled) -> Chunk:
        """Read a chunk back and free its space."""
        raw = self._read(spilled)
        with self._lock:
            self.held_bytes -= spilled.nbytes
            spilled.segment.waiting -= 1
            self._drop_if_empty(spilled.segment)
        head = json.loads(bytes(raw[: spilled.head_bytes]))
        return Chunk.from_head(head, memoryview(raw)[spilled.head_bytes :])

    def close(self) -> None:
        with self._lock:
            if self._current is not None:
                segment = self._current
                self._current = None
                self._drop_if_empty(segment)

    def _segment(self) -> _Segment:
        if self._current is not None and self._current.size >= SEGMENT_BYTES:
            segment = self._current
            self._current = None
            self._drop_if_empty(segment)
        if self._current is None:
            os.makedirs(self._directory, exist_ok=True)
            path = os.path.join(self._directory, f"birkhoff-spill-{uuid.uuid4().hex}")
            self._current = _Segment(self._disk.open(path, CREATE))
            self._disk.unlink(path)
        return self._current

    def _drop_if_empty(self, segment: _Segment) -> None:
        if not segment.waiting:
            if segment is self._current:
                segment.size = 0  # reuse the same file
                self._disk.truncate(segment.file, 0)
            else:
                self._disk.close(segment.file)

    def _read(self, spilled: Spilled) -> bytearray:
        raw = bytearray()
        while len(raw) < spilled.nbytes:
            piece = self._disk.read(
                spilled.segment.file, spilled.nbytes - len(raw), spilled.offset + len(raw)
            )
            if not piece:
                raise CaptureWriteError("a spilled chunk cannot be read back: the spill file was cut.")
            raw += piece
        return raw
