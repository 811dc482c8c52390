"""The journal of an open capture file: one record per line, each with a checksum that continues the previous line's.

    8 hex digits  kind  JSON
    open     layout, names, write id                    always first
    begin    a request that starts here, with its metadata
    entry    rows that were written: their sidecar entry, with the checksum of their bytes
    finish   the end of a request

A line is written after the bytes it describes. Reading stops at the first line that is truncated, changed or out of
order, so the result is always a prefix of what was written; because the checksum is cumulative, a complete line left
over from another file does not match. Sealing builds the sidecar from these lines, in the writer or in the repair.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from typing import Any

from birkhoff.capture.store.disk import CREATE, READ, Disk, write_all
from birkhoff.errors import CaptureWriteError

MAX_LINE_BYTES = 64 << 20  # writers stay far below: an entry has at most 65,536 rows
_BLOCK = 1 << 20


class Journal:
    """Lines are buffered until `flush`; `sync` makes flushed lines durable."""

    def __init__(self, disk: Disk, path: str):
        self.path = path
        self._disk = disk
        self.file = disk.open(path, CREATE)
        self._size = 0
        self._sum = 0
        self._lines: list[bytes] = []

    def add(self, kind: str, body: dict[str, Any]) -> None:
        try:
            text = f"{kind} {json.dumps(body, allow_nan=False, separators=(',', ':'))}".encode()
        except (TypeError, ValueError) as error:
            raise CaptureWriteError(
                f"the facts of a capture cannot be written as JSON ({error}). Use numbers, text, lists and maps only."
            ) from None
        self._sum = zlib.crc32(text, self._sum)
        self._lines.append(b"%08x %s\n" % (self._sum, text))

    def flush(self) -> None:
        if self._lines:
            data = b"".join(self._lines)
            write_all(self._disk, self.file, data, self._size)
            self._size += len(data)
            self._lines.clear()

    def sync(self) -> None:
        self._disk.fsync(self.file)

    def close(self) -> None:
        self._disk.close(self.file)


def read_journal(disk: Disk, path: str) -> Iterator[tuple[str, bytes]]:
    """(kind, JSON) of every line up to the first invalid one. A missing journal is empty."""
    try:
        file = disk.open(path, READ)
    except FileNotFoundError:
        return
    try:
        total, rest = 0, b""
        size, offset = disk.size(file), 0
        while offset < size and len(rest) < MAX_LINE_BYTES:
            block = disk.read(file, _BLOCK, offset)
            if not block:
                return
            offset += len(block)
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                checked = _checked(line, total)
                if checked is None:
                    return
                total, kind, text = checked
                yield kind, text
    finally:
        disk.close(file)


def _checked(line: bytes, before: int) -> tuple[int, str, bytes] | None:
    """Checksum, kind and JSON of a line that is valid after checksum `before`."""
    digits = line[:8]
    space = line[8:9]
    text = line[9:]
    total = zlib.crc32(text, before)
    if space != b" " or digits != b"%08x" % total:
        return None
    kind, _, body = text.partition(b" ")
    return total, kind.decode("ascii", "replace"), body
