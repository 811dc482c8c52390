"""Disks for tests: without syncing, with failures on request, and with an abrupt stop."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable

from birkhoff.capture.store.disk import Disk


class SoftDisk(Disk):
    """Does not sync, but counts syncs: most tests are not about the speed of the disk."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._paths: dict[int, str] = {}
        self._lock = threading.Lock()

    def path(self, file: int) -> str:
        return self._paths[file]

    def note(self, call: str, path: str) -> None:
        with self._lock:
            self.calls[call] += 1

    def open(self, path: str, flags: int) -> int:
        self.note("open", path)
        file = super().open(path, flags)
        self._paths[file] = path
        return file

    def write(self, file: int, data: memoryview, offset: int) -> int:
        self.note("write", self._paths[file])
        return super().write(file, data, offset)

    def truncate(self, file: int, size: int) -> None:
        self.note("truncate", self._paths[file])
        super().truncate(file, size)

    def fsync(self, file: int) -> None:
        self.note("fsync", self._paths[file])

    def rename(self, old: str, new: str) -> None:
        self.note("rename", old)
        super().rename(old, new)

    def link(self, old: str, new: str) -> None:
        self.note("link", old)
        super().link(old, new)

    def unlink(self, path: str) -> None:
        self.note("unlink", path)
        super().unlink(path)

    def mkdir(self, path: str) -> None:
        self.note("mkdir", path)
        super().mkdir(path)

    def sync_directory(self, path: str) -> None:
        self.note("sync_directory", path)


class FaultyDisk(SoftDisk):
    """`fault(call, path)` returns an errno to fail with, or None. `short` limits the bytes of one write."""

    def __init__(
        self, fault: Callable[[str, str], int | None] = lambda call, path: None, short: int | None = None
    ):
        super().__init__()
        self.fault, self.short = fault, short
        self.synced_after_failure: list[str] = []
        self._failed: set[int] = set()

    def note(self, call: str, path: str) -> None:
        super().note(call, path)
        code = self.fault(call, path)
        if code is not None:
            raise OSError(code, os.strerror(code), path)

    def write(self, file: int, data: memoryview, offset: int) -> int:
        return super().write(file, data[: self.short] if self.short else data, offset)

    def fsync(self, file: int) -> None:
        if file in self._failed:
            self.synced_after_failure.append(self.path(file))
        try:
            super().fsync(file)
        except OSError:
            self._failed.add(file)
            raise

    def close(self, file: int) -> None:
        self._failed.discard(file)
        super().close(file)


class Stopped(BaseException):
    """The process is gone; the package must not catch this."""


class StoppingDisk(SoftDisk):
    """Stops before the n-th call that changes something."""

    def __init__(self, after: int):
        super().__init__()
        self.left = after

    def note(self, call: str, path: str) -> None:
        super().note(call, path)
        self.left -= 1
        if self.left < 0:
            raise Stopped


class SlowDisk(SoftDisk):
    """Syncs take time, so that tasks accumulate."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds = seconds

    def fsync(self, file: int) -> None:
        super().fsync(file)
        time.sleep(self.seconds)
