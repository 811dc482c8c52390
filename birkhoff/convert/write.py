"""Run a conversion: write files at finished offsets, journal finished units, publish at the end.

Files are written as NAME.partial. A journal next to the output lists each finished unit with the sha256 of its bytes;
a line is appended only after those bytes are flushed to disk. After an interruption the listed units are intact and
the others are repeated, with byte-identical output. Files are renamed only when everything is written, the output's
own name last; then the journal is deleted. Several threads share the work, each with one strip in memory.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from birkhoff.atomic_file import remove_partials, sync_directory, write_atomic
from birkhoff.convert.conversion_plan import ConversionPlan, ConversionUnit, RoundingStats
from birkhoff.errors import BirkhoffError, ConvertError
from birkhoff.free_disk import check_free_disk, naming_full_disk

SYNC_BYTES = 256 << 20
SYNC_SECONDS = 2.0
QUEUED = 32  # queued units per thread, so that none idles during a flush; only running units hold memory
CONTINUE = "Free some and run the same command again: it continues from what is written."
Progress = Callable[[int, int], None]


@dataclass
class ClassRounding:
    """Effect of rounding on one class of tensors; `worst_relative` is relative to the largest magnitude of a unit."""

    values: int = 0
    changed: int = 0
    worst_relative: float = 0.0
    worst: float = 0.0

    def add(self, values: int, changed: int, magnitude: float, error: float) -> None:
        """Add the row of one unit (`RoundingStats.row`)."""
        self.values += values
        self.changed += changed
        self.worst_relative = max(self.worst_relative, error / magnitude if magnitude else 0.0)
        self.worst = max(self.worst, error)

    def to_json(self) -> dict[str, float]:
        return {"numbers": self.values, "changed": self.changed, "worst": self.worst_relative}


@dataclass
class WriteResult:
    """Statistics of a finished conversion."""

    seconds: float = 0.0
    resumed_units: int = 0
    hashes: dict[str, dict[str, str]] = field(default_factory=dict)  # file -> tensor or part -> sha256
    rounding: dict[str, ClassRounding] = field(default_factory=dict)  # by class of tensors


def journal_path(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.journal")


def partial_path(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def run_conversion(
    plan: ConversionPlan,
    workers: int,
    exact: bool,
    progress: Progress | None = None,
    sync_bytes: int = SYNC_BYTES,
) -> WriteResult:
    """Write every unit that the journal does not list, then publish the files.

    Raises `DiskFull` if the disk is too small, or runs full; what is written then stays for the next run."""
    with naming_full_disk(plan.destination, plan.destination.parent, lambda: _missing_bytes(plan), CONTINUE):
        return _run_conversion(plan, workers, exact, progress, sync_bytes)


def _run_conversion(
    plan: ConversionPlan, workers: int, exact: bool, progress: Progress | None, sync_bytes: int
) -> WriteResult:
    began = time.perf_counter()
    for file in plan.files:
        file.path.parent.mkdir(parents=True, exist_ok=True)
    journal = journal_path(plan.destination)
    fingerprint = plan.fingerprint()
    with _locked(journal) as log:
        finished = _read_journal(log, fingerprint, journal)
        result = WriteResult(resumed_units=len(finished))
        if not finished and any(file.path.exists() for file in plan.files):
            journal.unlink(missing_ok=True)  # created just now, and empty
            raise ConvertError(f"{plan.destination} already exists. Choose another name or remove it first.")
        try:
            check_free_disk(plan.destination, plan.destination, _missing_bytes(plan))
        except ConvertError:
            if not finished:
                journal.unlink(missing_ok=True)
            raise
        handles = [_opened(file.path, file.header, file.nbytes) for file in plan.files]
        try:
            _run(plan, handles, finished, log, workers, exact, progress, sync_bytes)
        except BirkhoffError:
            discard(plan)  # a retry would fail the same way; only interrupted runs are kept
            raise
        finally:
            for handle in handles:
                if handle is not None:
                    os.close(handle)
        _summarise(plan, finished, result)
        _publish(plan, result)
        journal.unlink()
        sync_directory(journal.parent)
    result.seconds = time.perf_counter() - began
    return result


def _missing_bytes(plan: ConversionPlan) -> int:
    """The bytes of the plan's files that are not on disk yet."""
    needed = plan.nbytes
    for file in plan.files:
        for path in (file.path, partial_path(file.path)):
            if path.exists():
                needed -= min(path.stat().st_blocks * 512, file.nbytes)
    return needed


def discard(plan: ConversionPlan) -> None:
    """Delete the partial files and the journal of a failed conversion."""
    for file in plan.files:
        partial_path(file.path).unlink(missing_ok=True)
    journal_path(plan.destination).unlink(missing_ok=True)


@contextmanager
def _locked(journal: Path) -> Iterator[Any]:
    """Open the journal for appending under an exclusive lock."""
    with open(journal, "a+b") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConvertError(
                f"{journal} is held by another process. Wait for it, or end it first."
            ) from None
        yield log


def _read_journal(log: Any, fingerprint: str, journal: Path) -> dict[int, list[Any]]:
    """Return finished units by index. Drops a torn last line; raises for a journal of another conversion."""
    log.seek(0)
    raw = log.read()
    if not raw:
        log.write(json.dumps({"conversion": fingerprint}).encode() + b"\n")
        _sync(log)
        return {}
    whole = raw[: raw.rfind(b"\n") + 1]
    rows: list[Any] = []
    for line in whole.splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            raise ConvertError(
                f"{journal} is damaged. Remove it and the .partial files to start again."
            ) from None
    if not rows:
        log.truncate(0)
        log.write(json.dumps({"conversion": fingerprint}).encode() + b"\n")
        _sync(log)
        return {}
    if not isinstance(rows[0], dict) or rows[0].get("conversion") != fingerprint:
        raise ConvertError(
            f"{journal} belongs to a conversion with other options or from other files. Run that one again to finish "
            "it, or remove it and the .partial files to start afresh."
        )
    log.truncate(len(whole))
    return {row[0]: row for row in rows[1:]}


def _opened(path: Path, header: bytes, nbytes: int) -> int | None:
    """Open the partial file with header and full length; None if the file is already published."""
    if path.exists() and not partial_path(path).exists():
        return None
    handle = os.open(partial_path(path), os.O_RDWR | os.O_CREAT, 0o644)
    os.ftruncate(handle, nbytes)
    _write_at(handle, memoryview(header), 0)
    return handle


def _run(
    plan: ConversionPlan,
    handles: list[int | None],
    finished: dict[int, list[Any]],
    log: Any,
    workers: int,
    exact: bool,
    progress: Progress | None,
    sync_bytes: int,
) -> None:
    total = plan.payload_bytes
    pending = [index for index in range(len(plan.units)) if index not in finished]
    pending.sort(key=lambda index: plan.units[index].order)
    written = total - sum(plan.units[index].nbytes for index in pending)
    if progress is not None:
        progress(written, total)
    unsaved: list[list[Any]] = []
    unsynced, synced_at = 0, time.monotonic()

    def save() -> None:
        nonlocal unsynced, synced_at
        for handle in handles:
            if handle is not None:
                os.fdatasync(handle)
        if unsaved:
            log.write(b"".join(json.dumps(row).encode() + b"\n" for row in unsaved))
            _sync(log)
            finished.update({row[0]: row for row in unsaved})
            unsaved.clear()
        unsynced, synced_at = 0, time.monotonic()

    with ThreadPoolExecutor(workers, thread_name_prefix="convert") as pool:
        queue = iter(pending)
        running: dict[Future[list[Any]], int] = {}
        try:
            while True:
                while len(running) < QUEUED * workers and (index := next(queue, None)) is not None:
                    unit = plan.units[index]
                    running[pool.submit(_write_unit, index, unit, handles[unit.file], exact)] = index
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    size = plan.units[running.pop(future)].nbytes
                    unsaved.append(future.result())
                    written, unsynced = written + size, unsynced + size
                    if progress is not None:
                        progress(written, total)
                if unsynced >= sync_bytes or time.monotonic() - synced_at > SYNC_SECONDS:
                    save()
        finally:
            for future in running:
                future.cancel()
    save()


def _write_unit(index: int, unit: ConversionUnit, handle: int | None, exact: bool) -> list[Any]:
    """Write one unit and return its journal row."""
    assert handle is not None, "a published file is complete"
    stats = RoundingStats()
    hashes = [hashlib.sha256() for _ in unit.regions]
    at = [region.offset for region in unit.regions]
    for region, data in unit.produce(stats):
        view = data.reshape(-1).data
        hashes[region].update(view)
        _write_at(handle, view, at[region])
        at[region] += len(view)
    short = [r.name for r, end in zip(unit.regions, at) if end != r.offset + r.nbytes]
    if short:
        raise ConvertError(
            f"{short[0]} came out with another size than planned. The source changed while it was read."
        )
    if exact and stats.changed:
        raise ConvertError(
            f"{unit.name}: {stats.changed} of {stats.values} numbers would change (by up to {stats.worst:.3g}), and "
            "exact was asked for. Choose a format that holds them, or leave --exact away."
        )
    return [index, [digest.hexdigest() for digest in hashes], stats.row()]


def _write_at(handle: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(handle, view[done : done + (1 << 30)], offset + done)


def _summarise(plan: ConversionPlan, finished: dict[int, list[Any]], result: WriteResult) -> None:
    for index, unit in enumerate(plan.units):
        _, digests, rounding = finished[index]
        file = result.hashes.setdefault(plan.files[unit.file].path.name, {})
        file.update({region.name: digest for region, digest in zip(unit.regions, digests)})
        result.rounding.setdefault(unit.kind, ClassRounding()).add(*rounding)


def _publish(plan: ConversionPlan, result: WriteResult) -> None:
    """Rename the files to their final names, the one that marks completeness last."""
    for file in reversed(plan.files):
        partial = partial_path(file.path)
        if partial.exists():
            handle = os.open(partial, os.O_RDWR)
            os.fsync(handle)
            os.close(handle)
    manifest = {
        "source": plan.source,
        "source_files": [{"name": path.name, "bytes": path.stat().st_size} for path in plan.source_files],
        "options": plan.options,
        "rounding": {kind: rounding.to_json() for kind, rounding in result.rounding.items()},
        "sha256": result.hashes,
    }
    directory = plan.destination if plan.texts else plan.destination.parent
    name = "conversion.json" if plan.texts else f"{plan.destination.name}.json"
    _publish_text(directory / name, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
    for file in reversed(plan.files):
        if partial_path(file.path).exists():
            os.replace(partial_path(file.path), file.path)
    sync_directory(directory)
    for text_name, text in plan.texts.items():
        (directory / text_name).parent.mkdir(parents=True, exist_ok=True)
        _publish_text(directory / text_name, text)


def _publish_text(path: Path, text: str) -> None:
    """Write a file, and delete what a run that was killed meanwhile left of it."""
    remove_partials(path.parent, glob.escape(path.name))
    write_atomic(path, text)


def _sync(log: Any) -> None:
    log.flush()
    os.fsync(log.fileno())
