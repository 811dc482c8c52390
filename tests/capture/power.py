"""A disk that records every call, and the states it can have after a power failure: a model of a file system.

Between two syncs nothing is guaranteed: an unsynced write may be present, truncated or missing, also if a later one is
present. Names belong to their directory: a created, renamed or removed name is durable once the directory is synced;
until then it may be present or not, independently of other names (a rename is one change). Synced data stays.
"""

from __future__ import annotations

import os
import random
import threading
from dataclasses import dataclass, field
from pathlib import Path

from birkhoff.capture.store.disk import CREATE
from tests.capture.disks import SoftDisk


@dataclass
class File:
    """Durable bytes, and writes that are not durable yet: (offset, data), or (None, size) for a truncation."""

    safe: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int | None, bytes | int]] = field(default_factory=list)


class RecordingDisk(SoftDisk):
    """Executes the calls and records them, in one order over all threads."""

    def __init__(self, root: Path):
        super().__init__()
        self._root, self.log = str(root), []
        self._order = threading.RLock()
        self._inodes: dict[str, int] = {}
        self._files: dict[int, int] = {}
        self._next = 0

    def mark(self, *event: object) -> None:
        with self._order:
            self.log.append(event)

    def _name(self, path: str) -> str:
        return os.path.relpath(path, self._root)

    def open(self, path: str, flags: int) -> int:
        with self._order:
            fresh = not os.path.lexists(path)
            file = super().open(path, flags)
            if fresh:
                self._next += 1
                self._inodes[path] = self._next
                self.mark("create", self._name(path), self._next)
            assert fresh or flags != CREATE
            self._files[file] = self._inodes[path]
            return file

    def write(self, file: int, data: memoryview, offset: int) -> int:
        with self._order:
            taken = super().write(file, data, offset)
            self.mark("write", self._files[file], offset, bytes(data[:taken]))
            return taken

    def truncate(self, file: int, size: int) -> None:
        with self._order:
            super().truncate(file, size)
            self.mark("write", self._files[file], None, size)

    def fsync(self, file: int) -> None:
        with self._order:
            self.mark("fsync", self._files[file])

    def rename(self, old: str, new: str) -> None:
        with self._order:
            super().rename(old, new)
            self._inodes[new] = self._inodes.pop(old)
            self.mark("rename", self._name(old), self._name(new), self._inodes[new])

    def unlink(self, path: str) -> None:
        with self._order:
            super().unlink(path)
            self._inodes.pop(path, None)
            self.mark("unlink", self._name(path))

    def mkdir(self, path: str) -> None:
        with self._order:
            super().mkdir(path)
            self.mark("mkdir", self._name(path))

    def sync_directory(self, path: str) -> None:
        with self._order:
            self.mark("syncdir", self._name(path))


def after_power_loss(log: list, chance: random.Random, target: Path) -> None:
    """Create under `target` one of the states that the calls of `log` allow."""
    files: dict[int, File] = {}
    safe: dict[str, dict[str, object]] = {".": {}}  # directory -> name -> inode number, or "directory"
    pending: dict[str, list[tuple]] = {}
    for kind, *arguments in log:
        if kind == "write":
            files[arguments[0]].pending.append((arguments[1], arguments[2]))
        elif kind == "fsync":
            file = files[arguments[0]]
            for write in file.pending:
                _apply(file.safe, *write)
            file.pending.clear()
        elif kind == "syncdir":
            for change in pending.pop(arguments[0], ()):
                _change(safe.setdefault(arguments[0], {}), change)
        elif kind in ("create", "rename", "unlink", "mkdir"):
            if kind == "create":
                files[arguments[1]] = File()
            pending.setdefault(os.path.dirname(arguments[0]) or ".", []).append((kind, *arguments))
    in_order = chance.random() < 0.5
    for directory, changes in pending.items():
        if in_order:
            kept = changes[: chance.randint(0, len(changes))]
        else:
            kept = [change for change in changes if chance.random() < 0.5]
        for change in kept:
            _change(safe.setdefault(directory, {}), change)
    _build(".", safe, files, chance, target)


def _build(directory: str, safe: dict, files: dict[int, File], chance: random.Random, target: Path) -> None:
    (target / directory).mkdir(parents=True, exist_ok=True)
    for name, inode in safe.get(directory, {}).items():
        path = name if directory == "." else f"{directory}/{name}"
        if inode == "directory":
            _build(path, safe, files, chance, target)
        else:
            (target / path).write_bytes(_survivor(files[inode], chance))


def _survivor(file: File, chance: random.Random) -> bytes:
    data = bytearray(file.safe)
    kept = []
    for offset, change in file.pending:
        fate = chance.random()
        if fate < 0.4:
            kept.append((offset, change))
        elif fate < 0.6 and offset is not None and len(change) > 1:
            kept.append((offset, change[: chance.randint(1, len(change) - 1)]))
    if chance.random() < 0.5:
        chance.shuffle(kept)
    for write in kept:
        _apply(data, *write)
    return bytes(data)


def _apply(data: bytearray, offset: int | None, change: bytes | int) -> None:
    if offset is None:
        del data[change:]
        data.extend(bytes(change - len(data)))
        return
    data.extend(bytes(max(offset + len(change) - len(data), 0)))
    data[offset : offset + len(change)] = change


def _change(names: dict[str, object], change: tuple) -> None:
    kind, path, *rest = change
    name = os.path.basename(path)
    if kind == "create":
        names[name] = rest[0]
    elif kind == "mkdir":
        names[name] = "directory"
    elif kind == "unlink":
        names.pop(name, None)
    else:
        new, inode = rest
        if names.get(name) == inode:
            del names[name]
        names[os.path.basename(new)] = inode
