"""Moves the files of one capture store into another one, so that every request is complete in one of the two.

Shards get the next free number of their slot. A payload is linked under its new name first; the rename of its sidecar
then moves the shard in one step, and the old name is removed. A request's own folder is renamed. Killed at any time,
the join is continued by running it again: what was moved is in the target, what was not is still in the source. Both
stores are repaired and have no writer, are on one file system, and have no request in common.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from birkhoff.capture.store.disk import Disk, ensure_directory, remove
from birkhoff.capture.store.naming import PAYLOAD, SIDECAR

_SHARD = re.compile(r"(shard-(?:pp\d+-)?\d+)-(\d+)\.(?:json|bin)")


def join(source: str | os.PathLike[str], target: str | os.PathLike[str], disk: Disk | None = None) -> int:
    """Move all files of a tag's directory to another one. Returns the number of shards and requests moved."""
    disk, source, target = disk or Disk(), Path(source), Path(target)
    if not source.is_dir():
        return 0
    ensure_directory(disk, str(target))
    free: dict[str, int] = {}
    for name in os.listdir(target):
        if match := _SHARD.fullmatch(name):
            free[match[1]] = max(free.get(match[1], 0), int(match[2]) + 1)
    moved = 0
    for path in sorted(source.iterdir()):
        match = _SHARD.fullmatch(path.name)
        if path.is_dir():
            disk.rename(str(path), str(target / path.name))
        elif match is not None and path.suffix == SIDECAR:
            number = free.get(match[1], 0)
            free[match[1]] = number + 1
            stem = target / f"{match[1]}-{number:06d}"
            payload = path.with_suffix(PAYLOAD)
            disk.link(str(payload), str(stem.with_suffix(PAYLOAD)))
            disk.sync_directory(str(target))  # a sidecar is never there without its payload
            disk.rename(str(path), str(stem.with_suffix(SIDECAR)))
            remove(disk, str(payload))
        else:
            continue
        moved += 1
    disk.sync_directory(str(target))
    for path in source.glob("shard-*" + PAYLOAD):  # moved by an earlier call that was killed
        if not path.with_suffix(SIDECAR).exists():
            remove(disk, str(path))
    with contextlib.suppress(OSError):  # something else is in the folder
        disk.rmdir(str(source))
    return moved
