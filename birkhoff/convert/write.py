"""Doing a conversion: fill the files at known offsets, remember what is done, give them their names at the end.

Files grow as NAME.partial. A journal beside the output lists every finished unit with the sha256 of its bytes; a line
is appended only after the bytes it speaks of are on disk, so after a kill at any instant the units it lists are whole
and the rest are done again: the result is the same to the last byte. Names appear only when everything is there, the
output's own name last, and then the journal goes. Threads share the work; each holds one strip at a time.
"""

from __future__ import annotations

import fcntl
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

from birkhoff.convert.conversion_plan import ConversionPlan, RoundingTally, Unit
from birkhoff.errors import BirkhoffError, ConvertError
from birkhoff.weights.safetensors import sync_directory, write_text

SYNC_BYTES = 256 << 20
SYNC_SECONDS = 2.0
QUEUED = 32  # units waiting per thread, so that none idles while this one waits for the disk; only running ones hold memory
Progress = Callable[[int, int], None]


@dataclass
class Done:
    """What a finished conversion knows about itself."""

    seconds: float = 0.0
    resumed_units: int = 0
    hashes: dict[str, dict[str, str]] = field(default_factory=dict)  # file -> tensor or part of one -> sha256
    rounding: dict[str, list[float]] = field(
        default_factory=dict
    )  # class -> numbers, changed, worst share, worst


def journal_path(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.journal")


def partial_path(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def fill(
    work: ConversionPlan,
    workers: int,
    exact: bool,
    progress: Progress | None = None,
    sync_bytes: int = SYNC_BYTES,
) -> Done:
    """Write everything that is not there yet, and publish."""
    began = time.perf_counter()
    for file in work.files:
        file.path.parent.mkdir(parents=True, exist_ok=True)
    journal = journal_path(work.destination)
    fingerprint = work.fingerprint()
    with _locked(journal) as log:
        known = _read_journal(log, fingerprint, journal)
        done = Done(resumed_units=len(known))
        if not known and any(file.path.exists() for file in work.files):
            journal.unlink(missing_ok=True)  # only just begun: it says nothing worth keeping
            raise ConvertError(f"{work.destination} already exists. Choose another name or remove it first.")
        handles = [_opened(file.path, file.header, file.nbytes) for file in work.files]
        try:
            _run(work, handles, known, log, workers, exact, progress, sync_bytes)
        except BirkhoffError:
            discard(
                work
            )  # trying again would end the same way; what was interrupted is kept, what failed is not
            raise
        finally:
            for handle in handles:
                if handle is not None:
                    os.close(handle)
        _summarise(work, known, done)
        _publish(work, done)
        journal.unlink()
        sync_directory(journal.parent)
    done.seconds = time.perf_counter() - began
    return done


def discard(work: ConversionPlan) -> None:
    """Remove what a failed conversion left."""
    for file in work.files:
        partial_path(file.path).unlink(missing_ok=True)
    journal_path(work.destination).unlink(missing_ok=True)


@contextmanager
def _locked(journal: Path) -> Iterator[Any]:
    """The journal, open for appending, held by one process."""
    with open(journal, "a+b") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConvertError(
                f"{journal} is held by another process. Wait for it, or end it first."
            ) from None
        yield log


def _read_journal(log: Any, fingerprint: str, journal: Path) -> dict[int, list[Any]]:
    """Finished units by number. A torn last line is cut off; a journal of another conversion is refused."""
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
    """The partial file with its header and its full length; None when it already has its name."""
    if path.exists() and not partial_path(path).exists():
        return None
    handle = os.open(partial_path(path), os.O_RDWR | os.O_CREAT, 0o644)
    os.ftruncate(handle, nbytes)
    _write_at(handle, memoryview(header), 0)
    return handle


def _run(
    work: ConversionPlan,
    handles: list[int | None],
    known: dict[int, list[Any]],
    log: Any,
    workers: int,
    exact: bool,
    progress: Progress | None,
    sync_bytes: int,
) -> None:
    total = work.payload_bytes
    left = [number for number in range(len(work.units)) if number not in known]
    left.sort(key=lambda number: work.units[number].place)
    written = total - sum(work.units[number].nbytes for number in left)
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
            known.update({row[0]: row for row in unsaved})
            unsaved.clear()
        unsynced, synced_at = 0, time.monotonic()

    with ThreadPoolExecutor(workers, thread_name_prefix="convert") as pool:
        queue = iter(left)
        running: dict[Future[list[Any]], int] = {}
        try:
            while True:
                while len(running) < QUEUED * workers and (number := next(queue, None)) is not None:
                    unit = work.units[number]
                    running[pool.submit(_do, number, unit, handles[unit.file], exact)] = number
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    size = work.units[running.pop(future)].nbytes
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


def _do(number: int, unit: Unit, handle: int | None, exact: bool) -> list[Any]:
    """Write one unit; the journal's row about it."""
    assert handle is not None, "a file that has its name is complete"
    tally = RoundingTally()
    hashes = [hashlib.sha256() for _ in unit.regions]
    at = [region.offset for region in unit.regions]
    for index, data in unit.produce(tally):
        view = data.reshape(-1).data
        hashes[index].update(view)
        _write_at(handle, view, at[index])
        at[index] += len(view)
    short = [r.name for r, end in zip(unit.regions, at) if end != r.offset + r.nbytes]
    if short:
        raise ConvertError(
            f"{short[0]} came out with another size than planned. The source changed while it was read."
        )
    if exact and tally.changed:
        raise ConvertError(
            f"{unit.name}: {tally.changed} of {tally.numbers} numbers would change (by up to {tally.worst:.3g}), and "
            "exact was asked for. Choose a format that holds them, or leave --exact away."
        )
    return [number, [digest.hexdigest() for digest in hashes], tally.row()]


def _write_at(handle: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(handle, view[done : done + (1 << 30)], offset + done)


def _summarise(work: ConversionPlan, known: dict[int, list[Any]], done: Done) -> None:
    for number, unit in enumerate(work.units):
        _, digests, (numbers, changed, largest, worst) = known[number]
        file = done.hashes.setdefault(work.files[unit.file].path.name, {})
        file.update({region.name: digest for region, digest in zip(unit.regions, digests)})
        row = done.rounding.setdefault(unit.kind, [0, 0, 0.0, 0.0])
        row[0] += numbers
        row[1] += changed
        row[2] = max(row[2], worst / largest if largest else 0.0)
        row[3] = max(row[3], worst)


def _publish(work: ConversionPlan, done: Done) -> None:
    """Give the files their names, the one that says "complete" last."""
    for file in reversed(work.files):
        partial = partial_path(file.path)
        if partial.exists():
            handle = os.open(partial, os.O_RDWR)
            os.fsync(handle)
            os.close(handle)
    manifest = {
        "source": work.source,
        "source_files": [{"name": path.name, "bytes": path.stat().st_size} for path in work.source_files],
        "options": work.options,
        "rounding": {
            k: {"numbers": n, "changed": c, "worst": w} for k, (n, c, w, _) in done.rounding.items()
        },
        "sha256": done.hashes,
    }
    directory = work.destination if work.texts else work.destination.parent
    name = "conversion.json" if work.texts else f"{work.destination.name}.json"
    write_text(directory / name, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
    for file in reversed(work.files):
        if partial_path(file.path).exists():
            os.replace(partial_path(file.path), file.path)
    sync_directory(directory)
    for text_name, text in work.texts.items():
        (directory / text_name).parent.mkdir(parents=True, exist_ok=True)
        write_text(directory / text_name, text)


def _sync(log: Any) -> None:
    log.flush()
    os.fsync(log.fileno())
