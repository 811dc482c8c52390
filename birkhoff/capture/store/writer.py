"""The writer of one capture root: requests begin, send chunks, and finish with a durable result.

Files, journals and sealing are in `open_file`, `journal` and `sealing`; syncing is shared by `commit`. `append` and
`finish` do not raise for a bad request or a failing disk: the failure becomes the result of the request.
`begin`, `append` and `finish` of one request are called by one thread; different requests may use different threads. A
root has one writer; files that an earlier writer left open are repaired first.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from birkhoff.capture.sinks.chunk import Chunk
from birkhoff.capture.sinks.result import NOT_REQUESTED, CaptureFinish, CaptureRequest, CaptureResult, Status
from birkhoff.capture.store.commit import CommitTask, Committer
from birkhoff.capture.store.disk import Disk
from birkhoff.capture.store.file_options import FileOptions
from birkhoff.capture.store.naming import JOURNAL, LAYOUTS, stage
from birkhoff.capture.store.open_file import OpenFile, RequestState
from birkhoff.capture.store.paths import PathAllocator
from birkhoff.capture.store.repair import RepairReport, repair_file, repair_held
from birkhoff.capture.store.root_lock import RootLock
from birkhoff.capture.store.sealing import RESERVED, sync_directories
from birkhoff.capture.store.shard_writer import ShardWriter
from birkhoff.errors import CaptureError, CaptureWriteError, quoted


class CaptureWriter:
    """`repaired` is the report of the repair on opening, or None if the root was clean."""

    def __init__(self, options: FileOptions, disk: Disk | None = None):
        self.options = options
        self._disk = disk or Disk()
        self._closed = False
        self.root = os.path.abspath(os.fspath(options.root))
        self._stage = stage(options.pp_rank, options.pp_size)
        try:
            self._make_root()
            self._lock = RootLock(self._disk, self.root, self._stage, options.fsync)
        except OSError as error:
            raise CaptureWriteError(
                f"captures cannot be written to {self.root} ({error.strerror}). Choose a directory on a disk that can "
                "be written."
            ) from None
        try:
            self.repaired: RepairReport | None = None
            if self._lock.dirty:
                self.repaired = repair_held(self.root, self._disk, self._stage, options.fsync)
            self._pool = ThreadPoolExecutor(2 * options.writer_threads, "capture-sums")  # threads as needed
            self._states: dict[str, RequestState] = {}
            self._states_lock = threading.Lock()
            self._places = PathAllocator(self._disk, self.root, options.on_collision, self._stage)
            self._committer = Committer(
                self._disk, self.root, options.fsync, options.queue_size, self._settle
            )
            self._shards = ShardWriter(
                self.root,
                self._stage,
                options.num_shards,
                options.shard_max_bytes,
                max(options.fd_cache_size // 2, 1),
                self._open_shard,
                lambda file: self._committer.submit(CommitTask(seal=file)),
            )
        except BaseException:
            self._lock.release(clean=False)
            raise

    def begin(self, request: CaptureRequest) -> None:
        """Announce a request. A problem with it becomes its result, not an exception."""
        if self._closed:
            raise CaptureWriteError(f"the writer of {self.root} is closed. Open another one.")
        layout = request.layout or self.options.default_layout
        state = RequestState(request, layout)
        with self._states_lock:
            if request.key in self._states:
                raise CaptureWriteError(
                    f"request {quoted(request.key)} has begun already. Give every request its key."
                )
            self._states[request.key] = state
        try:
            self._place(state)
        except Exception as error:
            _note(state, error)

    def append(self, chunk: Chunk) -> None:
        state = self._states.get(chunk.request_id)
        if state is None:
            self.begin(CaptureRequest(chunk.request_id, chunk.request_id, chunk.tag))
            state = self._states[chunk.request_id]
        if state.error is not None or any(file.error is not None for file in state.files):
            state.lost_rows += chunk.num_rows
            return
        try:
            chunk.check()
        except CaptureError as error:  # other chunks of this request are still valid
            state.lost_rows += chunk.num_rows
            state.warning = state.warning or str(error)
            return
        try:
            if state.layout == "sharded":
                self._shards.append(state, chunk)
            else:
                state.files[0].append(state, chunk)
        except Exception as error:
            _note(state, error)

    def finish(self, finish: CaptureFinish) -> Future[CaptureResult]:
        """Mark the end of a request. The future is done when the capture is durable or has failed."""
        with self._states_lock:
            state = self._states.get(finish.key)
        if state is None:
            missing: Future[CaptureResult] = Future()
            missing.set_result(NOT_REQUESTED)
            return missing
        state.finish = finish
        try:
            for file in state.files:
                if file.error is not None:
                    state.fail(file.error)
            if state.error is None:
                if state.layout == "sharded":
                    self._shards.finish(state, finish)
                else:
                    state.files[0].finish(state, finish)
        except Exception as error:
            _note(state, error)
        self._committer.submit(CommitTask(state=state))
        return state.future

    def seal(self) -> None:
        """Make every acknowledged row visible: seal the open shards and wait."""
        self._shards.retire_all()
        self._committer.drain()

    def close(self) -> None:
        """Seal open files, including those of unfinished requests, and release the root."""
        if self._closed:
            return
        self._closed = True
        with self._states_lock:
            unfinished = [state for state in self._states.values() if state.finish is None]
        for state in unfinished:
            state.abandoned = True
            if any(file.replaces for file in state.files):
                state.fail(
                    "the writer was closed before the request finished; the capture it would replace is kept"
                )
            self._committer.submit(CommitTask(state=state))
        self.seal()
        self._committer.close()
        self._pool.shutdown()
        self._committer.retry_unsealed()
        self._lock.release(clean=not self._committer.unsealed and not self._committer.left_behind)

    def __enter__(self) -> CaptureWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def rounds(self) -> int:
        """Number of commit rounds so far."""
        return self._committer.rounds

    def _make_root(self) -> None:
        missing = []
        path = self.root
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for path in reversed(missing):
            self._disk.mkdir(path)
        if self.options.fsync:
            for error in sync_directories(self._disk, [os.path.dirname(path) for path in missing]).values():
                raise error
            # An existing root may have been created moments ago; if its parent cannot be opened, it is older.
            sync_directories(self._disk, [os.path.dirname(self.root)])

    def _place(self, state: RequestState) -> None:
        request = state.request
        if state.layout not in LAYOUTS:
            raise CaptureWriteError(
                f"layout is {quoted(state.layout)}, expected one of {', '.join(LAYOUTS)}."
            )
        reserved = sorted(RESERVED & set(request.meta))
        if reserved:
            raise CaptureWriteError(
                f"the facts about request {quoted(request.request_id)} use {', '.join(reserved)}, which the sidecar "
                "needs itself. Use another name."
            )
        try:
            json.dumps(dict(request.meta), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CaptureWriteError(
                f"the facts about request {quoted(request.request_id)} are not JSON ({error})."
            ) from None
        if state.layout == "sharded":
            state.directory = self._places.tag(request.tag)
            name = self._places.claim_in_shards(state.directory, request.request_id)
            state.request = replace(request, request_id=name)
            return
        state.directory, replaces = self._places.claim(request.tag, request.request_id)
        stem = ("packed" if state.layout == "packed" else "per_file") + self._stage
        header = {
            "layout": state.layout,
            "request_id": request.request_id,
            "tag": request.tag,
            "replace": replaces,
        }
        try:
            file = self._open(state.directory, stem, header)
        except BaseException:
            self._places.release(state.directory)
            raise
        tag_directory = os.path.dirname(state.directory)
        file.unsynced_directories |= {os.path.join(self.root, tag_directory)} | self._places.unsynced(
            tag_directory
        )
        file.begin(state)

    def _open_shard(self, directory: str, stem: str, header: dict[str, Any]) -> OpenFile:
        file = self._open(directory, stem, {**header, "request_id": "", "replace": False})
        file.unsynced_directories |= self._places.unsynced(directory)
        return file

    def _open(self, directory: str, stem: str, header: dict[str, Any]) -> OpenFile:
        options = self.options
        header = {
            **header,
            "write_id": uuid.uuid4().hex,
            "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "pp_rank": options.pp_rank,
            "pp_size": options.pp_size,
        }
        full = os.path.join(self.root, directory)
        # A journal of a failed capture that could not be removed.
        if os.path.lexists(os.path.join(full, stem + JOURNAL)):
            repair_file(self._disk, self.root, full, stem + JOURNAL, RepairReport(), sync=options.fsync)
        # the replaced capture stays until the new one is complete
        atomic = options.atomic_publish or header["replace"]
        return OpenFile(
            self._disk,
            self.root,
            directory,
            stem,
            header,
            sync=options.fsync,
            atomic=atomic,
            coalesce_bytes=options.coalesce_max_bytes,
            fd_cache_size=options.fd_cache_size,
            pool=self._pool,
        )

    def _settle(self, state: RequestState) -> None:
        """Set the result of a request and forget its state."""
        with self._states_lock:
            self._states.pop(state.request.key, None)
        if state.layout != "sharded":
            self._places.release(state.directory)
        finish = state.finish or CaptureFinish(state.request.key)
        identity = (
            state.directory if state.layout != "sharded" else f"{state.directory}/{state.request.request_id}"
        )
        if state.error is not None:
            state.future.set_result(
                CaptureResult("error", identity, state.error, dropped_rows=state.lost_rows)
            )
            return
        self._places.settle(state.directory.split("/")[0])
        dropped = state.lost_rows + finish.dropped_rows
        warning = finish.error or state.warning
        if warning is None and state.abandoned:
            warning = "the writer was closed before the request finished"
        if warning is None and dropped:
            warning = f"{dropped} rows were dropped: the capture queue was full"
        status: Status = "ok" if warning is None else "partial_error"
        sums = {path: running.hexdigest() for path, running in state.sums.items()}
        result = CaptureResult(
            status,
            identity,
            warning,
            state.rows,
            state.nbytes,
            len(state.keys),
            dropped,
            tuple(sums),
            sums,
            self.options.fsync,
        )
        state.future.set_result(result)


def _note(state: RequestState, error: Exception) -> None:
    """Record the reason of a failure; unexpected errors include their class name."""
    state.fail(str(error) if isinstance(error, CaptureError) else f"{type(error).__name__}: {error}")
