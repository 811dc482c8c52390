"""A harvest by several processes: each stores parts of the data set, and one process joins them to one store.

A part is a range of texts, harvested into a folder of its own, `OUT/.parts/000012`. A part whose process dies is
continued by another one: texts that are complete there are kept. A complete part is joined: its files move into the
store, whose manifest holds the settings that all parts must have. So a text is either in the store, or in one part, or
not computed yet. The result is an ordinary store with the same bytes for every text as one process writes; it can be
continued with any number of processes. All of them see `OUT` on one file system.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from birkhoff.analysis import run_manifest
from birkhoff.analysis.harvest import TAG, HarvestReport, harvest
from birkhoff.capture.spec.request import Capture
from birkhoff.capture.store.disk import Disk
from birkhoff.capture.store.finished import forget, survey
from birkhoff.capture.store.join import join
from birkhoff.capture.store.naming import slug
from birkhoff.capture.store.repair import repair
from birkhoff.capture.store.root_lock import RootLock
from birkhoff.data.texts import DatasetText
from birkhoff.errors import CaptureLocked, CaptureSettings
from birkhoff.option_checks import check_int

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine

Result = TypeVar("Result")
LOCK_SECONDS = 60.0  # a process that was declared dead may live on for a moment


def split_texts(
    texts: Iterable[DatasetText], part_texts: int, done: Container[int] = ()
) -> Iterator[tuple[int, list[DatasetText]]]:
    """Yield (number, missing texts) of every part of `part_texts` texts that has some, in order."""
    check_int("part_texts", part_texts)
    for number, part in itertools.groupby(texts, lambda text: text.index // part_texts):
        missing = [text for text in part if text.index not in done]
        if missing:
            yield number, missing


def harvest_part(
    engine: Engine,
    texts: Iterable[DatasetText],
    capture: Capture,
    out: str | Path,
    number: int,
    *,
    source: Mapping[str, Any] | None = None,
    skip_bad: bool = False,
) -> HarvestReport:
    """Harvest one part, going on where another process left it."""
    folder = _folder(Path(out), number)
    return _unlocked(lambda: harvest(engine, texts, capture, folder, source=source, skip_bad=skip_bad))


class PartJoiner:
    """The joining process. While it is open, no other process writes to the store; parts are not affected.

    `done` are the indices of the texts in the store. Opening it joins what earlier runs left in parts.
    """

    def __init__(
        self,
        out: str | Path,
        capture: Capture,
        source: Mapping[str, Any] | None = None,
        disk: Disk | None = None,
    ):
        self._root, self._disk = Path(out), disk or Disk()
        self._tag = slug(str(capture.tag or TAG))
        manifest = run_manifest.read(self._root)
        if manifest is not None:
            self._compare_source(manifest["settings"], source)
            _unlocked(lambda: repair(self._root, self._disk))
        self._root.mkdir(parents=True, exist_ok=True)
        self._lock = RootLock(self._disk, str(self._root))
        self.report = HarvestReport(str(self._root))
        stored = survey(self._root / self._tag)
        forget(self._root / self._tag, stored.unfinished, self._disk)
        self.report.forgotten_texts = len(stored.unfinished)
        self.done = {int(name) for name in stored.finished}
        for progress in stored.finished.values():
            self._count(progress.rows, progress.nbytes)
        try:
            self._join_leftovers()
        except BaseException:
            self._lock.release(clean=True)
            raise

    def commit(self, number: int) -> int:
        """Move a complete part into the store and return the number of texts that it added.

        Calling it again for the same part adds nothing.
        """
        folder = _folder(self._root, number)
        if not folder.is_dir():
            return 0
        manifest = run_manifest.read(folder)
        if manifest is None:  # its process died before it computed anything
            shutil.rmtree(folder)
            return 0
        changed = run_manifest.compare(self._root, manifest)
        notice = f"part {number} differs in {'; '.join(changed)}: its rows may differ in their last bits"
        if changed and len(self.report.notices) < 20:
            self.report.notices.append(notice)
        _unlocked(lambda: repair(folder, self._disk))
        stored = survey(folder / self._tag)
        twice = [name for name in stored.finished if int(name) in self.done]
        forget(folder / self._tag, [*stored.unfinished, *twice], self._disk)
        added = {name: one for name, one in stored.finished.items() if int(name) not in self.done}
        join(folder / self._tag, self._root / self._tag, self._disk)
        for name, progress in added.items():
            self.done.add(int(name))
            self.report.new_texts += 1
            self.report.new_rows += progress.rows
            self._count(progress.rows, progress.nbytes)
        _remove(folder)
        return len(added)

    def close(self) -> None:
        """Release the store. The folder of parts is removed if it is empty."""
        with contextlib.suppress(OSError):
            (self._root / run_manifest.PARTS).rmdir()
        self._lock.release(clean=True)

    def __enter__(self) -> PartJoiner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _join_leftovers(self) -> None:
        parts = self._root / run_manifest.PARTS
        for path in sorted(parts.iterdir()) if parts.is_dir() else ():
            if path.name.isdecimal():
                self.commit(int(path.name))
            else:
                shutil.rmtree(path)

    def _count(self, rows: int, nbytes: int) -> None:
        self.report.texts += 1
        self.report.rows += rows
        self.report.bytes += nbytes

    def _compare_source(self, settings: Mapping[str, Any], source: Mapping[str, Any] | None) -> None:
        """Refuse other texts before any part is computed; other settings are compared when a part is joined."""
        if settings.get("source") != dict(source or {}):
            raise CaptureSettings(
                f"{self._root} was begun with other texts. Use the same ones to go on, or another directory."
            )


def _unlocked(call: Callable[[], Result]) -> Result:
    """Repeat a call while another process has the store, at most for `LOCK_SECONDS`."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return call()
        except CaptureLocked:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _remove(folder: Path) -> None:
    """Remove a joined part. It is renamed first, so that half a folder is never taken for a part."""
    joined = folder.with_name(f"{folder.name}.joined")
    folder.rename(joined)
    shutil.rmtree(joined)


def _folder(root: Path, number: int) -> Path:
    return root / run_manifest.PARTS / f"{number:06d}"
