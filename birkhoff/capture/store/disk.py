"""All calls that change the file system, in one object passed to writers.

Writers, the lock and the repair access the disk only through a `Disk`, so that tests can count, record or fail any
call. Files are opened without following symbolic links, so a link in a capture root cannot redirect writes. All bytes
are written by `write_all`, because the system may accept fewer bytes than offered.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from birkhoff.errors import CaptureWriteError

CREATE = os.O_CREAT | os.O_EXCL | os.O_RDWR
READ = os.O_RDONLY
READ_WRITE = os.O_RDWR
MOST_AT_ONCE = 1 << 30  # one system call takes less than 2 GiB

_FULL_FSYNC = getattr(fcntl, "F_FULLFSYNC", None)  # where fsync leaves data in the cache of the drive (macOS)


class Disk:
    """The real file system."""

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)

    def read(self, file: int, count: int, offset: int) -> bytes:
        return os.pread(file, count, offset)

    def write(self, file: int, data: memoryview, offset: int) -> int:
        return os.pwrite(file, data, offset)

    def truncate(self, file: int, size: int) -> None:
        os.ftruncate(file, size)

    def size(self, file: int) -> int:
        return os.fstat(file).st_size

    def fsync(self, file: int) -> None:
        if _FULL_FSYNC is not None:
            fcntl.fcntl(file, _FULL_FSYNC)
        else:
            os.fsync(file)

    def close(self, file: int) -> None:
        os.close(file)

    def rename(self, old: str, new: str) -> None:
        os.replace(old, new)

    def link(self, old: str, new: str) -> None:
        """Give a file a second name."""
        os.link(old, new, follow_symlinks=False)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        os.mkdir(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def sync_directory(self, path: str) -> None:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.fsync(directory)
        finally:
            os.close(directory)

    def try_lock(self, file: int) -> bool:
        """Lock the file for this descriptor until it is closed; False if another process has it."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@contextmanager
def opened(disk: Disk, path: str, flags: int) -> Iterator[int]:
    """The descriptor of a file, closed at the end of the block."""
    file = disk.open(path, flags)
    try:
        yield file
    finally:
        disk.close(file)


def write_all(disk: Disk, file: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        taken = disk.write(file, view[:MOST_AT_ONCE], offset)
        if taken <= 0:  # not expected from a healthy system; prevents an endless loop
            raise OSError(errno.EIO, "the system took no bytes and gave no reason")
        offset += taken
        view = view[taken:]


def ensure_directory(disk: Disk, path: str) -> None:
    """Create a directory unless it exists. A symbolic link in its place is refused."""
    try:
        disk.mkdir(path)
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise CaptureWriteError(
                f"{os.path.basename(path)} in the capture root is not a directory. Move it away, or use another tag."
            ) from None


def remove(disk: Disk, path: str) -> bool:
    """Unlink a file if it exists. Returns whether it did."""
    try:
        disk.unlink(path)
        return True
    except FileNotFoundError:
        return False
