"""Space on the disk of a file or directory that is to be written: checked before, and named where it runs out."""

from __future__ import annotations

import errno
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from birkhoff.byte_size import format_bytes
from birkhoff.errors import DiskFull

OTHER_DIRECTORY = "Free some, or choose another directory."
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_free_disk(
    label: object, destination: Path, needed: int, advice: str = OTHER_DIRECTORY, reserve: int = 0
) -> int:
    """Return the bytes free on the disk of `destination`, which need not exist.

    Raises `DiskFull` if `label` needs more than that, with `reserve` bytes left over. `advice` ends the message."""
    folder = _existing(destination)
    free = shutil.disk_usage(folder).free
    if needed + reserve > free:
        raise DiskFull(_message(label, needed, free, folder, advice))
    return free


@contextmanager
def naming_full_disk(
    label: object, destination: Path, needed: Callable[[], int], advice: str = OTHER_DIRECTORY
) -> Iterator[None]:
    """Turn an error of a disk that ran full, or of a file that may not become so large, into `DiskFull`.

    `needed` returns the bytes that are still to be written."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        folder = _existing(destination)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if error.errno == errno.EFBIG and limit != resource.RLIM_INFINITY:
            raise DiskFull(
                f"{label} needs {format_bytes(needed())} more on disk, and this process may write files of up to "
                f"{format_bytes(limit)} (ulimit -f). Raise the limit and run it again."
            ) from None
        free = shutil.disk_usage(folder).free
        raise DiskFull(_message(label, needed(), free, folder, advice)) from None


def _message(label: object, needed: int, free: int, folder: Path, advice: str) -> str:
    return f"{label} needs {format_bytes(needed)} more on disk, and {format_bytes(free)} are free in {folder}. {advice}"


def _existing(destination: Path) -> Path:
    """The directory itself, or the nearest above it that exists."""
    path = destination.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())
