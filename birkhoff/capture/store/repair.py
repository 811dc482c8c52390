"""Repair after a crash: seal every complete record, drop a torn tail, guess nothing.

A record is valid if its journal line continues the previous one and its bytes match the checksum in the line. After a
bad record, later records of the same request are dropped too, so each request keeps a prefix of its rows and is marked
`complete: false`. Other requests of the file are not affected. Repeating the repair changes nothing, and killing it
loses nothing. A capture that was interrupted while it replaced another one does not replace it. Files marked as
poisoned are copied: a failed sync may have left pages only in memory.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from birkhoff.capture.store.disk import CREATE, READ_WRITE, Disk, opened, remove, write_all
from birkhoff.capture.store.findings import Findings
from birkhoff.capture.store.naming import JOURNAL, OPEN, PAYLOAD, POISON, SIDECAR
from birkhoff.capture.store.root_lock import LOCK, RootLock
from birkhoff.capture.store.sealing import Seal, publish
from birkhoff.errors import CaptureError, CaptureFileError, CaptureWriteError

_BLOCK = 1 << 20
_COPY = ".copy"
_ORPHAN = re.compile(r".+\.(bin|json)\.tmp|.+\.poison|.+\.copy")


@dataclass
class RepairReport:
    """Paths are relative to the root. A record is an entry: the rows of one hook and layer between two flushes."""

    sealed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    kept_records: int = 0
    dropped_records: int = 0
    checked_bytes: int = 0
    seconds: float = 0.0


def repair(root: str | os.PathLike[str], disk: Disk | None = None, sync: bool = True) -> RepairReport:
    """Seal everything under a capture root. Refused while a writer is running."""
    root, disk = os.fspath(root), disk or Disk()
    if not os.path.isdir(root):
        raise CaptureFileError(f"{root} is not a directory. Give the capture root.")
    stages = sorted({name.removeprefix(LOCK) for name in os.listdir(root) if name.startswith(LOCK)} | {""})
    locks: list[RootLock] = []
    clean = False
    try:
        try:
            for stage in stages:
                locks.append(RootLock(disk, root, stage, sync))
        except OSError as error:
            raise CaptureWriteError(f"{root} cannot be repaired ({error}). Make it writable first.") from None
        report = repair_held(root, disk, sync=sync)
        clean = not report.failed
        return report
    finally:
        for lock in locks:
            lock.release(clean)


def repair_held(root: str, disk: Disk, stage: str | None = None, sync: bool = True) -> RepairReport:
    """Repair a root whose lock the caller holds; `stage` limits it to the files of one pipeline stage."""
    report, started = RepairReport(), time.perf_counter()
    for directory in _directories(root):
        for name in sorted(os.listdir(directory)):
            if name.endswith(JOURNAL) and (stage is None or _of_stage(name, stage)):
                try:
                    repair_file(disk, root, directory, name, report, sync=sync)
                except (OSError, CaptureError) as error:
                    report.failed[os.path.relpath(os.path.join(directory, name), root)] = str(error)
        _remove_orphans(disk, root, directory, report)
    report.seconds = time.perf_counter() - started
    return report


def repair_file(
    disk: Disk,
    root: str,
    directory: str,
    journal: str,
    report: RepairReport,
    *,
    sync: bool = True,
    only: Iterable[str] | None = None,
    rewrite: bool = False,
) -> None:
    """Seal the files of one journal. `only` keeps just these requests; `rewrite` copies the payload."""
    findings = Findings(disk, directory, journal, None if only is None else frozenset(only))
    report.checked_bytes += findings.checked_bytes
    kept = sum(findings.good)
    if findings.published:
        stems = findings.stems
        remove(disk, os.path.join(directory, journal))
    elif findings.worth_keeping:
        poison = os.path.join(directory, findings.stem + POISON)
        for stem, end in findings.ends.items():
            _settle(disk, findings, stem, end, rewrite or os.path.lexists(poison), sync)
        if findings.header["layout"] != "per_file" and findings.payload_name(findings.stem) is None:
            _make_empty(disk, directory, findings.stem, sync)
        seal = Seal(disk, directory, journal, sync, keep=findings.keep, broken=findings.broken)
        for error in publish([seal], disk, sync).values():
            raise error
        remove(disk, poison)
        stems = seal.stems
    else:
        stems, kept = [], 0
        for name in [*_leftovers(findings), journal, findings.stem + POISON]:
            if remove(disk, os.path.join(directory, name)) and not name.endswith((JOURNAL, POISON)):
                report.removed.append(os.path.relpath(os.path.join(directory, name), root))
    report.sealed += [os.path.relpath(os.path.join(directory, stem + PAYLOAD), root) for stem in stems]
    report.kept_records += kept
    report.dropped_records += len(findings.good) - kept


def _settle(disk: Disk, findings: Findings, stem: str, end: int, rewrite: bool, sync: bool) -> None:
    """Truncate a payload after its last good record and sync it; a poisoned payload is copied."""
    name = findings.payload_name(stem)
    assert name is not None, "it was read a moment ago"
    path = os.path.join(findings.directory, name)
    file = disk.open(path, READ_WRITE)
    try:
        if rewrite:
            copy = os.path.join(findings.directory, stem + PAYLOAD + _COPY)
            remove(disk, copy)
            fresh = disk.open(copy, CREATE)
            file, old = fresh, file
            try:
                for offset in range(0, end, _BLOCK):
                    write_all(disk, fresh, disk.read(old, min(_BLOCK, end - offset), offset), offset)
            finally:
                disk.close(old)
        elif disk.size(file) != end:
            disk.truncate(file, end)
        if sync:
            disk.fsync(file)
    finally:
        disk.close(file)
    if rewrite:
        disk.rename(copy, path)


def _make_empty(disk: Disk, directory: str, stem: str, sync: bool) -> None:
    """Create the payload of a journal that records ends of requests but no rows: its name was not synced yet."""
    with opened(disk, os.path.join(directory, stem + PAYLOAD + OPEN), CREATE) as file:
        if sync:
            disk.fsync(file)


def _leftovers(findings: Findings) -> list[str]:
    """Files of a capture of which nothing is kept."""
    if findings.stem.startswith("per_file"):
        return [
            name for name in os.listdir(findings.directory) if re.fullmatch(r"\d+_.*\.(bin|json)\.tmp", name)
        ]
    # Without atomic publishing the payload has its final name from the start and belongs to this capture.
    direct = not findings.header.get("atomic", True) and not findings.would_replace()
    return [
        findings.stem + PAYLOAD + OPEN,
        findings.stem + SIDECAR + OPEN,
        *([findings.stem + PAYLOAD] if direct else []),
    ]


def _remove_orphans(disk: Disk, root: str, directory: str, report: RepairReport) -> None:
    """Remove open files without a journal: they were never synced, so no request in them was acknowledged."""
    names = os.listdir(directory)
    if any(name.endswith(JOURNAL) for name in names):
        return  # of another stage, or not repairable: its files are not orphans
    for name in names:
        path = os.path.join(directory, name)
        if _ORPHAN.fullmatch(name) and not os.path.isdir(path) and remove(disk, path):
            report.removed.append(os.path.relpath(path, root))


def _directories(root: str) -> Iterator[str]:
    """Directories of tags and of their requests; symbolic links are not followed."""
    for tag in _subdirectories(root):
        yield tag
        yield from _subdirectories(tag)


def _subdirectories(path: str) -> list[str]:
    with os.scandir(path) as entries:
        return sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))


def _of_stage(journal: str, stage: str) -> bool:
    return (
        re.fullmatch(
            rf"(packed|per_file){re.escape(stage)}\.journal|shard{re.escape(stage)}-\d+-\d+\.journal", journal
        )
        is not None
    )
