"""A ring of captured rows in shared memory: one process writes, another on the same host reads.

    bytes 0..127   sixteen 64-bit words, native order:
                   0 magic   1 capacity   2 bytes written   3 writer's pid   4 closed   5 rows dropped
                   8 bytes read   9 reader's pid        (the reader's words are in a cache line of their own)
    then `capacity` bytes of records, each aligned to 8 bytes:
                   head bytes, checksum (32 bits each), body bytes (64 bits), head, body, zero padding to 8 bytes

A head is JSON: the description of a chunk, or the begin or end of a request; a body is the rows. Both byte counts only
grow, and their difference is the unread data; a count is updated after its bytes were written or read. A record never
wraps: the rest at the end is skipped, marked by a head of all ones. The checksum covers head and body. NumPy only: a
reading process needs neither an engine nor torch.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

from birkhoff.capture.sinks.chunk import Chunk
from birkhoff.capture.sinks.result import CaptureFinish, CaptureRequest
from birkhoff.errors import CaptureChecksum, CaptureError, CaptureWriteError, OptionError, quoted
from birkhoff.option_checks import check_int

MAGIC = int.from_bytes(b"BKRING01", "little")
HEADER_BYTES = 128
MOST_BYTES = 1 << 40
_CAPACITY = 1
_WRITTEN = 2
_WRITER = 3
_CLOSED = 4
_DROPPED = 5
_READ = 8
_READER = 9
_RECORD = struct.Struct("=IIQ")
_FOLDER = Path("/dev/shm")  # Linux exposes shared memory as files here

Item = CaptureRequest | Chunk | CaptureFinish


def check_ring_name(name: object) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", name) or name.startswith("."):
        raise OptionError(
            f"name is {quoted(name)}, expected 1 to 200 letters, digits, dots, dashes or underscores, the first no dot."
        )
    return name


class RingWriter:
    """Creates and fills the ring. `put` returns whether a record fit within `seconds`."""

    def __init__(self, name: str, max_bytes: int):
        check_ring_name(name)
        check_int("max_bytes", max_bytes, 4096, MOST_BYTES)
        capacity = max_bytes // 8 * 8
        try:
            self._memory = SharedMemory(name, create=True, size=HEADER_BYTES + capacity)
        except FileExistsError:
            raise OptionError(
                f"shared memory called {quoted(name)} is there already: another engine has it, or one that crashed "
                f"left it. Choose another name, or remove {_FOLDER / name}."
            ) from None
        try:  # allocate now: a page that cannot be allocated later would kill the process
            with (_FOLDER / name).open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, HEADER_BYTES + capacity)
        except OSError as error:
            self._memory.close()
            self._memory.unlink()
            raise CaptureWriteError(
                f"no shared memory of {max_bytes} bytes ({error.strerror}). Ask for less, or enlarge {_FOLDER}."
            ) from None
        self.name = name
        self.capacity = capacity
        view = self._memory.buf
        assert view is not None
        self._words = view[:HEADER_BYTES].cast("Q")
        self._ring = view[HEADER_BYTES : HEADER_BYTES + capacity]
        self._words[_CAPACITY], self._words[_WRITER] = capacity, os.getpid()
        self._words[0] = MAGIC  # written last: a process that sees the magic number sees the rest
        self._stalled_at = -1

    def put(self, head: dict[str, Any], body: memoryview | bytes, seconds: float) -> bool:
        """Add a record. Returns False if there was no space in time.

        After a timeout, `put` does not wait again until the reader has made progress.
        """
        text = json.dumps(head, separators=(",", ":")).encode()
        size = _padded(_RECORD.size + len(text) + len(body))
        if size > self.capacity // 2:
            raise CaptureWriteError(
                f"a record of {size} bytes does not fit a ring of {self.capacity}. Raise max_bytes to {4 * size}."
            )
        written = self._words[_WRITTEN]
        offset = written % self.capacity
        skipped = self.capacity - offset if self.capacity - offset < size else 0
        if not self._wait_for(size + skipped, seconds):
            return False
        if skipped:
            self._ring[offset : offset + 4] = b"\xff" * 4
            written, offset = written + skipped, 0
        total = zlib.crc32(body, zlib.crc32(text))
        _RECORD.pack_into(self._ring, offset, len(text), total, len(body))
        at = offset + _RECORD.size
        self._ring[at : at + len(text)] = text
        at += len(text)
        self._ring[at : at + len(body)] = body
        self._words[_WRITTEN] = written + size
        return True

    def drop(self, rows: int) -> None:
        self._words[_DROPPED] += rows

    def close(self) -> None:
        """Mark the end. A reader that has the ring open reads the rest; the ring can no longer be opened."""
        self._words[_CLOSED] = 1
        self._words.release()
        self._ring.release()
        self._memory.close()
        self._memory.unlink()

    def _wait_for(self, size: int, seconds: float) -> bool:
        until, pause = time.monotonic() + seconds, 5e-5
        while self.capacity - (self._words[_WRITTEN] - self._words[_READ]) < size:
            read, reader = self._words[_READ], self._words[_READER]
            gone = reader != 0 and not _alive(reader)
            if gone or read == self._stalled_at or time.monotonic() >= until:
                self._stalled_at = read
                return False
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)
        self._stalled_at = -1
        return True


@dataclass
class _Open:
    memory: mmap.mmap
    words: memoryview
    ring: memoryview

    def close(self) -> None:
        self.words.release()
        self.ring.release()
        self.memory.close()


class RingReader:
    """Iterator over chunks in order of writing; `items` includes the begin and end of requests.

    Ends when the writer has closed the ring and everything is read. One reader at a time.
    """

    def __init__(self, name: str):
        path = _FOLDER / check_ring_name(name)
        try:
            with path.open("r+b") as file:
                memory = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError) as error:
            raise CaptureError(
                f"there is no ring {quoted(name)} ({error}). Start the engine with the consumer shm first."
            ) from None
        if len(memory) <= HEADER_BYTES:
            memory.close()
            raise CaptureError(f"{path} is not a ring of captured rows. Check the name.")
        with memoryview(memory) as view:
            mapping = _Open(memory, view[:HEADER_BYTES].cast("Q"), view[HEADER_BYTES:])
        words = mapping.words
        why = None
        if words[0] != MAGIC or not 0 < words[_CAPACITY] <= len(memory) - HEADER_BYTES:
            why = f"{path} is not a ring of captured rows, or is only being made. Check the name."
        elif words[_READER] and _alive(words[_READER]):
            why = f"ring {quoted(name)} is being read by process {words[_READER]}. One reader at a time."
        if why is not None:
            mapping.close()
            raise CaptureError(why)
        words[_READER] = os.getpid()
        self.name = name
        self.capacity = words[_CAPACITY]
        self._open: _Open | None = mapping

    @property
    def dropped_rows(self) -> int:
        """Number of rows that did not reach the ring so far."""
        return self._mapping().words[_DROPPED]

    def __iter__(self) -> Iterator[Chunk]:
        for item in self.items():
            if isinstance(item, Chunk):
                yield item

    def items(self) -> Iterator[Item]:
        while (item := self.get()) is not None:
            yield item

    def get(self, timeout: float | None = None) -> Item | None:
        """The next item; None at the end. Raises TimeoutError if none arrives within the timeout."""
        mapping = self._mapping()
        until = None if timeout is None else time.monotonic() + timeout
        pause = 5e-5
        while mapping.words[_WRITTEN] == mapping.words[_READ]:
            # Look once more: a count may have moved just before the writer closed or died.
            if mapping.words[_CLOSED] or not _alive(mapping.words[_WRITER]):
                if mapping.words[_WRITTEN] != mapping.words[_READ]:
                    break
                if mapping.words[_CLOSED]:
                    return None
                raise CaptureError(
                    f"process {mapping.words[_WRITER]} that wrote ring {quoted(self.name)} is gone."
                )
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"nothing came through ring {self.name} in {timeout} s")
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)
        return self._take(mapping)

    def close(self) -> None:
        if self._open is not None:
            mapping = self._open
            self._open = None
            mapping.words[_READER] = 0
            mapping.close()  # a chunk is a copy, so nothing else refers to the mapping

    def __enter__(self) -> RingReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _mapping(self) -> _Open:
        if self._open is None:
            raise CaptureError(f"the reader of ring {quoted(self.name)} is closed. Open another one.")
        return self._open

    def _take(self, mapping: _Open) -> Item:
        read = mapping.words[_READ]
        offset = read % self.capacity
        if self.capacity - offset < _RECORD.size or mapping.ring[offset : offset + 4] == b"\xff" * 4:
            read, offset = read + self.capacity - offset, 0
        head_bytes, total, body_bytes = _RECORD.unpack_from(mapping.ring, offset)
        end = offset + _RECORD.size + head_bytes + body_bytes
        if end > self.capacity or read + _padded(end - offset) > mapping.words[_WRITTEN]:
            raise CaptureChecksum(
                f"ring {quoted(self.name)} has a record beyond its end: another process wrote into it."
            )
        raw = bytes(mapping.ring[offset + _RECORD.size : end])
        if zlib.crc32(raw) != total:
            raise CaptureChecksum(
                f"a record of ring {quoted(self.name)} changed on its way. Open a new ring."
            )
        mapping.words[_READ] = read + _padded(end - offset)
        return decoded(json.loads(raw[:head_bytes]), raw[head_bytes:])


def encoded(item: Item) -> tuple[dict[str, Any], memoryview | bytes]:
    """Encode an item as head and body of a record."""
    if isinstance(item, CaptureRequest):
        names = ("key", "request_id", "tag", "layout")
        return {
            "kind": "begin",
            **{name: getattr(item, name) for name in names},
            "meta": dict(item.meta),
        }, b""
    if isinstance(item, CaptureFinish):
        return {"kind": "finish", **vars(item)}, b""
    return {"kind": "chunk", **item.head()}, item.data()


def decoded(head: dict[str, Any], body: bytes) -> Item:
    kind = head.pop("kind")
    if kind == "begin":
        return CaptureRequest(**head)
    if kind == "finish":
        return CaptureFinish(**head)
    return Chunk.from_head(head, body)


def _padded(size: int) -> int:
    return -(-size // 8) * 8


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # owned by another user, and alive
        return True
    return True
