"""Open capture files: one journal and its payloads.

Rows are buffered until they take a megabyte, so that many small steps become one entry per hook and layer. `flush`
writes bytes first, then their journal lines. Any failed call poisons the whole object: nothing more is written, and a
descriptor whose sync failed is never synced again, because the kernel may have dropped the pages and would report
success. Appending is safe from several threads; syncing, closing and discarding are done by one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from birkhoff.capture.sinks.chunk import PHASES, Chunk, plain_ints
from birkhoff.capture.sinks.result import CaptureFinish, CaptureRequest, CaptureResult
from birkhoff.capture.store.disk import CREATE, READ_WRITE, Disk, remove, write_all
from birkhoff.capture.store.journal import Journal
from birkhoff.capture.store.naming import JOURNAL, OPEN, PAYLOAD, POISON, SIDECAR, per_file_stem
from birkhoff.errors import CaptureWriteError
from birkhoff.hooks.sites import BY_NAME

T = TypeVar("T")
_MATRICES = frozenset(name for name, site in BY_NAME.items() if site.shape == "mm")
MAX_ENTRY_ROWS = 1 << 16  # limits the size of a journal line and of a reader's unit of work
MAX_ENTRIES = 1 << 20  # of one packed file: the readers' limit
MAX_PATIENCE = 64 << 20
POOLED_BYTES = 1 << 20  # of an entry whose checksums are worth another thread
ROW_OVERHEAD, CHUNK_OVERHEAD = 64, 1024  # approximate memory of buffered labels


@dataclass(eq=False)
class RequestState:
    """State of one request that is being written."""

    request: CaptureRequest
    layout: str
    directory: str = ""  # relative to the root
    files: list[OpenFile] = field(default_factory=list)
    offered_rows: int = 0  # accepted by `append`
    rows: int = 0  # written to the file
    nbytes: int = 0
    keys: set[tuple[int, str]] = field(default_factory=set)
    lost_rows: int = 0
    error: str | None = None  # the capture is lost
    warning: str | None = None  # some rows are lost
    abandoned: bool = False  # the writer was closed before the request finished
    sums: dict[str, Any] = field(default_factory=dict)  # running sha256 by relative path
    finish: CaptureFinish | None = None
    future: Future[CaptureResult] = field(default_factory=Future)

    def fail(self, error: BaseException | str) -> None:
        self.error = self.error or (error if isinstance(error, str) else f"{type(error).__name__}: {error}")


class _Payload:
    """One growing payload: its size and, if open, its descriptor."""

    def __init__(self, path: str, relative: str):
        self.path = path
        self.relative = relative
        self.file: int | None = None
        self.created = False
        self.size = 0
        self.sum = 0


@dataclass(eq=False)
class _Entry:
    """Rows of one request, hook and layer at their place in a payload."""

    state: RequestState
    layer: int
    hook: str
    run: list[Chunk]
    payload: _Payload
    offset: int
    pieces: list[memoryview]
    nbytes: int
    crc32: Future[int]


class OpenFile:
    """`header` is the first line of the journal; `directory` is relative to `root`. Checksums of large entries are
    computed in `pool`, beside the writing."""

    def __init__(
        self,
        disk: Disk,
        root: str,
        directory: str,
        stem: str,
        header: dict[str, Any],
        *,
        sync: bool,
        atomic: bool,
        coalesce_bytes: int,
        fd_cache_size: int,
        pool: Executor,
    ):
        self._disk = disk
        self._pool = pool
        self._sync = sync
        self._atomic = atomic
        self._coalesce = coalesce_bytes
        self._fd_cache = fd_cache_size
        self.directory, self.relative, self.stem = os.path.join(root, directory), directory, stem
        self.layout = header["layout"]
        self.replaces = header["replace"]
        self.lock = threading.RLock()
        self.error: BaseException | None = None
        self.sync_failed = False  # a failed sync cannot be repeated: the pages may be lost
        self.interrupted = False  # sealing failed after it had displaced a previous capture
        self.closed = False
        self.acknowledged: set[str] = set()  # request ids whose rows in this file are durable
        self.unsynced_directories = {self.directory}
        self._waiting: OrderedDict[tuple[RequestState, int, str], list[Chunk]] = OrderedDict()
        self._weight = 0
        self._begun = set[str]()
        self._payloads: dict[str, _Payload] = {}
        # payloads with a descriptor, least recently used first
        self._cached: OrderedDict[str, _Payload] = OrderedDict()
        self.num_entries = 0
        self._journal = Journal(disk, os.path.join(self.directory, stem + JOURNAL))
        self._journal.add("open", {**header, "stem": stem, "atomic": atomic})
        if self.layout != "per_file":
            try:
                self._payload(stem)
            except BaseException:
                self._journal.close()
                remove(disk, self._journal.path)
                raise

    @property
    def journal_name(self) -> str:
        return self.stem + JOURNAL

    @property
    def nbytes(self) -> int:
        return sum(payload.size for payload in self._payloads.values())

    @property
    def num_lines(self) -> int:
        """Number of entries and requests that the sidecar will list."""
        return self.num_entries + len(self._begun)

    @property
    def weight(self) -> int:
        """Bytes of buffered rows."""
        return self._weight

    def begin(self, state: RequestState) -> None:
        """Record the request in the journal, once."""
        name = state.request.request_id
        with self.lock:
            if name not in self._begun:
                self._begun.add(name)
                state.files.append(self)
                facts = {**state.request.meta, "request_id": name, "tag": state.request.tag}
                if state.offered_rows:  # the repair must not keep this part if an earlier one is lost
                    facts["continues"] = state.offered_rows
                self._journal.add("begin", facts)
                if self.layout == "packed":  # the file exists even if no row arrives
                    state.sums[f"{self.relative}/{self.stem}{PAYLOAD}"] = hashlib.sha256()

    def append(self, state: RequestState, chunk: Chunk) -> None:
        with self.lock:
            self._refuse_if_poisoned()
            self._waiting.setdefault((state, chunk.layer, chunk.hook), []).append(chunk)
            state.offered_rows += chunk.num_rows
            self._weight += chunk.nbytes + ROW_OVERHEAD * chunk.num_rows + CHUNK_OVERHEAD
            if self._weight >= self._patience():
                self.flush()

    def finish(self, state: RequestState, finish: CaptureFinish) -> None:
        with self.lock:
            self._refuse_if_poisoned()
            self.flush()  # the end of a request is written after its rows
            facts: dict[str, Any] = {
                "request_id": state.request.request_id,
                "finish_reason": finish.finish_reason,
            }
            facts["rows"] = state.offered_rows  # over all files: readers can detect a missing one
            if finish.prompt_len is not None:
                facts["prompt_len"] = finish.prompt_len
            lost = finish.dropped_rows + state.lost_rows
            self._journal.add("finish", facts | ({"dropped_rows": lost} if lost else {}))

    def disown(self, state: RequestState) -> None:
        """Revoke the end of a request whose rows in another file were lost."""
        with self.lock:
            if self.error is None and not self.closed:
                self._journal.add("finish", {"request_id": state.request.request_id, "error": state.error})

    def flush(self) -> None:
        """Write everything that is buffered: payload, then journal."""
        with self.lock:
            self._refuse_if_poisoned()
            try:
                entries = [
                    self._place(state, layer, hook, run)
                    for (state, layer, hook), chunks in self._waiting.items()
                    for run in _runs(chunks)
                ]
                hashed = self._hash(entries)
                self._write([(entry.payload, piece) for entry in entries for piece in entry.pieces])
                for entry in entries:
                    self._enter(entry)
                self._journal.flush()
                for each in hashed:
                    each.result()
            except Exception as error:
                self.poison(error)
                raise
            finally:
                self._waiting.clear()
                self._weight = 0

    def sync(self) -> None:
        """Make flushed data durable, except for directory entries (`unsynced_directories`)."""
        if not self._sync:
            return
        try:
            with self.lock:
                files = [payload.file for payload in self._cached.values()]
            for file in files:  # without the lock: rows keep arriving while the disk works
                assert file is not None
                self._disk.fsync(file)
            self._journal.sync()
        except OSError as error:
            self.sync_failed = True
            self.poison(error)
            raise

    def close(self) -> None:
        """Close the descriptors. The files stay as they are."""
        with self.lock:
            if not self.closed:
                self.closed = True
                self._journal.close()
                while self._cached:
                    _, payload = self._cached.popitem()
                    self._disk.close(payload.file)  # type: ignore[arg-type]
                    payload.file = None

    def poison(self, error: BaseException) -> None:
        """Stop writing. A file whose sync failed is marked, so that the repair copies it."""
        with self.lock:
            self.error = self.error or error
            if self.sync_failed:
                with contextlib.suppress(OSError):  # on a failing disk; the capture has failed either way
                    self._disk.close(
                        self._disk.open(os.path.join(self.directory, self.stem + POISON), CREATE)
                    )

    def discard(self) -> None:
        """Remove all files of a capture that failed before it was acknowledged."""
        self.close()
        for stem, payload in self._payloads.items():
            final = os.path.join(self.directory, stem)
            for path in (final + SIDECAR, payload.path.removesuffix(OPEN)) if not self.replaces else ():
                remove(self._disk, path)  # sealing may have failed half-way
            for path in (final + SIDECAR + OPEN, payload.path):
                remove(self._disk, path)
        remove(self._disk, os.path.join(self.directory, self.journal_name))
        remove(self._disk, os.path.join(self.directory, self.stem + POISON))

    def _patience(self) -> int:
        """Bytes that may be buffered; grows with the capture, so that its sidecar stays within the readers' limits."""
        doublings = self.num_entries // (MAX_ENTRIES // 8)
        return max(min(self._coalesce << doublings, MAX_PATIENCE), self._coalesce)

    def _refuse_if_poisoned(self) -> None:
        if self.error is not None:
            raise CaptureWriteError(f"{self.relative}/{self.stem} failed earlier ({self.error}).")

    def _place(self, state: RequestState, layer: int, hook: str, run: list[Chunk]) -> _Entry:
        """Choose the place of an entry and begin with its checksum."""
        if self.num_entries >= MAX_ENTRIES:
            raise CaptureWriteError(
                f"{self.relative}/{self.stem} has {MAX_ENTRIES} entries, as many as readers take. Use the sharded "
                "layout, or raise coalesce_max_bytes."
            )
        payload = self._payload(per_file_stem(layer, hook) if self.layout == "per_file" else self.stem)
        pieces = [chunk.data() for chunk in run]
        nbytes = sum(map(len, pieces))
        crc = self._start(nbytes, _crc32, pieces)
        entry = _Entry(state, layer, hook, run, payload, payload.size, pieces, nbytes, crc)
        payload.size += nbytes
        self.num_entries += 1
        return entry

    def _hash(self, entries: list[_Entry]) -> list[Future[None]]:
        """Add the bytes of the entries to the running sums of their requests."""
        pieces: dict[tuple[RequestState, str], list[memoryview]] = {}
        for entry in entries:
            pieces.setdefault((entry.state, entry.payload.relative), []).extend(entry.pieces)
        return [
            self._start(sum(map(len, each)), _update, state.sums.setdefault(path, hashlib.sha256()), each)
            for (state, path), each in pieces.items()
        ]

    def _start(self, nbytes: int, work: Callable[..., T], *given: Any) -> Future[T]:
        """`work` beside the writing of its bytes; at once if there are few."""
        if nbytes >= POOLED_BYTES:
            return self._pool.submit(work, *given)
        done: Future[T] = Future()
        done.set_result(work(*given))
        return done

    def _enter(self, entry: _Entry) -> None:
        """Add the line of an entry to the journal."""
        state, run, payload = entry.state, entry.run, entry.payload
        rows = sum(chunk.num_rows for chunk in run)
        first = run[0]
        line: dict[str, Any] = {
            "layer": entry.layer,
            "hook": entry.hook,
            "offset": entry.offset,
            "nbytes": entry.nbytes,
            "shape": [rows, first.width],
            "dtype": first.dtype,
            **_labels(run),
            "row_offset": first.row_offset,
            "steps": [first.step_index, run[-1].last_step],
            "crc32": entry.crc32.result(),
        }
        if self.layout == "sharded":
            line["request_id"] = state.request.request_id
        if self.layout == "per_file":
            payload.sum = _crc32(entry.pieces, payload.sum)
            line |= {"file": per_file_stem(entry.layer, entry.hook), "file_crc32": payload.sum}
        self._journal.add("entry", line)
        state.rows += rows
        state.nbytes += entry.nbytes
        state.keys.add((entry.layer, entry.hook))

    def _write(self, batch: list[tuple[_Payload, memoryview]]) -> None:
        """Write pieces at the offsets chosen by `_enter`; adjacent pieces are written in one call."""
        starts: dict[_Payload, int] = {}
        for payload, piece in batch:
            starts[payload] = starts.get(payload, payload.size) - len(piece)
        buffer = bytearray()
        file_offset = 0
        target = None
        for payload, piece in batch:
            if payload is not target or len(buffer) + len(piece) > self._coalesce:
                self._put(target, buffer, file_offset)
                buffer = bytearray()
                target = payload
                file_offset = starts[payload]
            if not buffer and len(piece) >= self._coalesce:
                self._put(payload, piece, file_offset)  # large rows are written without another copy
                file_offset += len(piece)
            else:
                buffer += piece
            starts[payload] += len(piece)
        self._put(target, buffer, file_offset)

    def _put(self, payload: _Payload | None, data: bytearray | memoryview, file_offset: int) -> None:
        if payload is not None and len(data):
            write_all(self._disk, self._descriptor(payload), data, file_offset)

    def _payload(self, stem: str) -> _Payload:
        if stem not in self._payloads:
            name = stem + PAYLOAD
            path = os.path.join(self.directory, name + (OPEN if self._atomic else ""))
            payload = self._payloads[stem] = _Payload(path, f"{self.relative}/{name}")
            self._descriptor(payload)
        return self._payloads[stem]

    def _descriptor(self, payload: _Payload) -> int:
        """The descriptor of a payload, reopened if it was closed by the cache."""
        if payload.file is None:
            while len(self._cached) >= self._fd_cache:
                _, oldest = self._cached.popitem(last=False)
                assert oldest.file is not None
                file = oldest.file
                oldest.file = None
                if self._sync:  # while this descriptor can still report a failed write-back
                    self._disk.fsync(file)
                self._disk.close(file)
            payload.file = self._disk.open(payload.path, READ_WRITE if payload.created else CREATE)
            payload.created = True
        self._cached[payload.path] = payload
        self._cached.move_to_end(payload.path)
        return payload.file


def _crc32(pieces: list[memoryview], total: int = 0) -> int:
    for piece in pieces:
        total = zlib.crc32(piece, total)
    return total


def _update(running: hashlib._Hash, pieces: list[memoryview]) -> None:
    for piece in pieces:
        running.update(piece)


def _runs(chunks: list[Chunk]) -> list[list[Chunk]]:
    """Group consecutive chunks that one entry can describe."""
    runs: list[list[Chunk]] = []
    rows = 0
    for chunk in _small_enough(chunks):
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and last.row_offset + last.num_rows == chunk.row_offset
            and last.form == chunk.form
            and rows + chunk.num_rows <= MAX_ENTRY_ROWS
        ):
            runs[-1].append(chunk)
            rows += chunk.num_rows
        else:
            runs.append([chunk])
            rows = chunk.num_rows
    return runs


def _small_enough(chunks: list[Chunk]) -> Iterator[Chunk]:
    for chunk in chunks:
        if chunk.num_rows <= MAX_ENTRY_ROWS:
            yield chunk
            continue
        for first in range(0, chunk.num_rows, MAX_ENTRY_ROWS):
            yield chunk.part(first, first + MAX_ENTRY_ROWS)


def _labels(run: list[Chunk]) -> dict[str, Any]:
    """Labels of the rows, and how to decode them."""
    first = run[0]
    labels: dict[str, Any] = {} if len(first.row_shape) == 1 else {"row_shape": list(first.row_shape)}
    if first.positions is not None:
        labels["positions"] = [position for chunk in run for position in plain_ints(chunk.positions)]
    if first.token_ids is not None:
        labels["token_ids"] = [token for chunk in run for token in plain_ints(chunk.token_ids)]
    if first.phases is not None:
        letters = "".join(chunk.letters() or "" for chunk in run)
        labels["phase"] = (
            PHASES[letters[0]] if len(set(letters)) == 1 else [PHASES[letter] for letter in letters]
        )
    if len(first.row_shape) == 2 and first.hook in _MATRICES:  # a projected row is not a matrix
        labels["axes"] = ["from", "to"]
    scales = [chunk.scales() for chunk in run]
    if scales[0] is not None:
        labels["scale"] = [value for scale in scales if scale is not None for value in scale.tolist()]
    return labels
