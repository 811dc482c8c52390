"""One writer per capture root: a lock that the system releases when its holder dies.

The lock file also records whether the last writer closed properly. Only `clean` means that no open files were left; an
unknown or empty record makes the next writer run the repair. Pipeline stages of one run share a root and have one lock
each. Readers take no lock: they see sealed files only.
"""

from __future__ import annotations

import os

from birkhoff.capture.store.disk import Disk, write_all
from birkhoff.errors import CaptureLocked

LOCK = ".lock"
_CLEAN, _OPEN = b"clean\n", b"open  "  # of equal length, so that one overwrites the other


class RootLock:
    """Held from construction to `release`. Construction fails if another writer is running."""

    def __init__(self, disk: Disk, root: str, stage: str = "", sync: bool = True):
        self._disk = disk
        self._sync = sync
        path = os.path.join(root, LOCK + stage)
        self._file = disk.open(path, os.O_CREAT | os.O_RDWR)
        try:
            if not disk.try_lock(self._file):
                holder = disk.read(self._file, 64, len(_OPEN)).decode("ascii", "replace").strip()
                raise CaptureLocked(
                    f"{root} is being written by another process ({holder or 'unknown'}). Wait until it ends, or use "
                    "another root; reading needs no lock."
                )
            self.dirty = disk.read(self._file, 64, 0) != _CLEAN
            disk.truncate(self._file, 0)
            self._note(_OPEN + b" pid %d\n" % os.getpid())
        except BaseException:
            disk.close(self._file)
            raise

    def release(self, clean: bool) -> None:
        try:
            if clean:
                self._disk.truncate(self._file, 0)
                self._note(_CLEAN)
        finally:
            self._disk.close(self._file)

    def _note(self, text: bytes) -> None:
        write_all(self._disk, self._file, text, 0)
        if self._sync:
            self._disk.fsync(self._file)
