"""Group commit: all requests that are waiting to become durable share one round of syncing.

A round takes all tasks that arrived during the previous one. Each file is flushed and synced once, each directory
once, and only then are the requests acknowledged; a hundred requests that end together in one shard cost two syncs.
Packed and per_file captures are sealed in the same round; sharded ones are acknowledged once payload and journal are
durable, and their shard is sealed when it is full. A failed capture is removed, unless its file holds rows that were
acknowledged earlier: then the repair saves those. One thread does all of this, so that no file is synced, closed or
removed concurrently.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from birkhoff.capture.store.disk import Disk
from birkhoff.capture.store.open_file import OpenFile, RequestState
from birkhoff.capture.store.repair import RepairReport, repair_file
from birkhoff.capture.store.sealing import Seal, publish, sync_directories
from birkhoff.errors import CaptureError

log = logging.getLogger(__name__)


@dataclass(eq=False)
class CommitTask:
    """A request to acknowledge, a shard to seal, or (neither) a barrier to wait for."""

    state: RequestState | None = None
    seal: OpenFile | None = None
    done: Future[None] = field(default_factory=Future)


class Committer:
    """Runs the rounds. `settled` is called with every request when its result is known."""

    def __init__(
        self, disk: Disk, root: str, sync: bool, queue_size: int, settled: Callable[[RequestState], None]
    ):
        self._disk = disk
        self._root = root
        self._sync = sync
        self._limit = queue_size
        self._settled = settled
        self._jobs: deque[CommitTask] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self.unsealed: list[OpenFile] = []  # shards with acknowledged rows that could not be sealed
        self.left_behind = False  # files of a failed capture could not be removed
        self.rounds = 0
        self._thread = threading.Thread(target=self._run, name="capture-commit", daemon=True)
        self._thread.start()

    def submit(self, job: CommitTask) -> None:
        """Queue a task; blocks while the queue is full."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._jobs) < self._limit)
            self._jobs.append(job)
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until all tasks submitted so far are done."""
        barrier = CommitTask()
        self.submit(barrier)
        barrier.done.result()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    return
                jobs = list(self._jobs)
                self._jobs.clear()
                self._changed.notify_all()
            try:
                self._round(jobs)
            except Exception as error:  # a defect here must not block callers forever
                log.exception("capture commit failed")
                for job in jobs:
                    if job.state is not None and not job.state.future.done():
                        job.state.fail(f"internal error: {error!r}")
                        self._tell(job.state)
            for job in jobs:
                job.done.set_result(None)

    def _round(self, jobs: list[CommitTask]) -> None:
        self.rounds += 1
        states = [job.state for job in jobs if job.state is not None]
        full = [job.seal for job in jobs if job.seal is not None]
        files = dict.fromkeys([*(file for state in states for file in state.files), *full])
        alive = [file for file in files if not file.closed]
        for file in alive:
            if file.error is None and not self._doomed(file, states):
                try:
                    file.flush()
                    file.sync()
                except (OSError, CaptureError):
                    pass  # the file is poisoned and records the reason
        self._sync_directories(alive)
        self._acknowledge([state for state in states if state.layout == "sharded"])
        by_file = {file: state for state in states if state.layout != "sharded" for file in state.files}
        self._seal(
            [file for file in alive if file in by_file or file in full or file.error is not None], by_file
        )
        for state in states:
            if not state.future.done():
                self._tell(state)

    def _doomed(self, file: OpenFile, states: list[RequestState]) -> bool:
        """Whether the file belongs to a failed request alone, so that syncing it is useless."""
        return file.layout != "sharded" and any(state.error for state in states if file in state.files)

    def _sync_directories(self, files: list[OpenFile]) -> None:
        """Sync the directories: a file without a durable directory entry is lost."""
        unsynced = [
            path for file in files if file.error is None for path in sorted(file.unsynced_directories)
        ]
        failed = sync_directories(self._disk, unsynced) if self._sync else {}
        for file in files:
            for path in file.unsynced_directories & failed.keys():
                file.poison(failed[path])
            if file.error is None:
                file.unsynced_directories = set()

    def _acknowledge(self, states: list[RequestState]) -> None:
        for state in states:
            failed = next((file.error for file in state.files if file.error is not None), None)
            if failed is not None:
                state.fail(failed)
                for file in state.files:
                    file.disown(state)
            elif state.error is None:
                for file in state.files:
                    file.acknowledged.add(state.request.request_id)
            self._tell(state)

    def _seal(self, files: list[OpenFile], by_file: dict[OpenFile, RequestState]) -> None:
        seals: dict[Seal, OpenFile] = {}
        for file in files:
            state = by_file.get(file)
            if file.error is None and (state is None or state.error is None):
                try:
                    seals[Seal(self._disk, file.directory, file.journal_name, self._sync)] = file
                except (OSError, ValueError, KeyError) as error:  # the journal cannot be read back
                    file.poison(error)
        failed = publish(list(seals), self._disk, self._sync)
        for seal, file in seals.items():
            if seal in failed:
                file.poison(failed[seal])
                file.interrupted = seal.cleared
        for file in files:
            state = by_file.get(file)
            if state is not None and file.error is not None:
                state.fail(file.error)
            if state is not None and state.error is not None:
                self._undo(file)
            elif file.error is not None:
                self._save(file)
            else:
                file.close()

    def _undo(self, file: OpenFile) -> None:
        """Remove a capture that was never acknowledged, unless it has already displaced another one."""
        try:
            if file.interrupted:
                self.left_behind = True
                file.close()
            else:
                file.discard()
        except OSError as error:
            self.left_behind = True
            log.warning("left behind after a failed capture: %s/%s (%s)", file.relative, file.stem, error)

    def _save(self, file: OpenFile) -> None:
        """Seal the acknowledged rows of a failed shard; if that fails too, the next start repairs it."""
        try:
            file.close()
            repair_file(
                self._disk,
                self._root,
                file.directory,
                file.journal_name,
                RepairReport(),
                sync=self._sync,
                only=file.acknowledged,
                rewrite=file.sync_failed,
            )
        except (OSError, CaptureError) as error:
            log.warning("capture shard %s/%s is left for repair (%s)", file.relative, file.stem, error)
            self.unsealed.append(file)

    def retry_unsealed(self) -> None:
        """Retry the shards that could not be sealed: there may be free space again."""
        waiting = self.unsealed
        self.unsealed = []
        for file in waiting:
            self._save(file)

    def _tell(self, state: RequestState) -> None:
        self._settled(state)
