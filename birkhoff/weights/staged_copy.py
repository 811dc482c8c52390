"""Copy stored rows to a GPU as fast as files can be read: threads fill pinned buffers while others are copied.

One thread reads from the page cache at a fraction of what memory and the bus can do, and a copy from memory that is not
pinned waits for the device. Here the rows of all tensors are cut into blocks that are contiguous in a file; a pool of
threads reads one block each into pinned staging buffers, which takes no interpreter lock, and the calling thread
launches the copies of complete blocks on a stream of its own. A buffer is filled again once its copies are done.

What must hold of the values is computed on the device and read once at the end (`StagedCopy.suspects`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from birkhoff.weights.safetensors import TORCH_DTYPES, read_exactly
from birkhoff.weights.tensor_ref import TensorRef, invalid_codes, invalid_scale

BLOCK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of a stored tensor: where they are in a file, and the view that receives them."""

    path: Path
    offset: int
    nbytes: int
    dtype: torch.dtype  # as stored
    target: torch.Tensor
    kind: str  # "codes" and "scale" receive the bytes, "value" the numbers
    name: str


@dataclass(frozen=True, slots=True)
class FileBlock:
    """Rows of one or more tensors that are adjacent in a file, from byte `offset` on."""

    path: Path
    offset: int
    nbytes: int
    rows: tuple[StoredRows, ...]


def stored_rows(ref: TensorRef, target: torch.Tensor, kind: str, max_bytes: int) -> Iterator[StoredRows]:
    """The rows of a tensor in pieces of at most `max_bytes`, or of one row."""
    assert ref.location is not None
    path, offset = ref.location
    row_bytes = ref.nbytes // max(ref.num_rows, 1)
    step = max(1, max_bytes // max(row_bytes, 1))
    dtype = TORCH_DTYPES[ref.dtype]
    for start in range(0, ref.num_rows, step):
        stop = min(ref.num_rows, start + step)
        view = target[start:stop] if ref.shape else target
        yield StoredRows(
            path, offset + start * row_bytes, (stop - start) * row_bytes, dtype, view, kind, ref.name
        )


def blocks(rows: Iterable[StoredRows], max_bytes: int = BLOCK_BYTES) -> Iterator[FileBlock]:
    """Group rows that follow each other in a file into blocks of at most `max_bytes`, or of one piece."""
    group: list[StoredRows] = []
    for piece in sorted(rows, key=lambda piece: (str(piece.path), piece.offset)):
        if group:
            first, last = group[0], group[-1]
            adjacent = piece.path == last.path and piece.offset == last.offset + last.nbytes
            begin = piece.offset - first.offset
            if not adjacent or begin + piece.nbytes > max_bytes or begin % piece.dtype.itemsize:
                yield _block(group)
                group = []
        if piece.nbytes:
            group.append(piece)
    if group:
        yield _block(group)


def _block(group: Sequence[StoredRows]) -> FileBlock:
    first, last = group[0], group[-1]
    return FileBlock(first.path, first.offset, last.offset + last.nbytes - first.offset, tuple(group))


class StagedCopy:
    """Copies blocks to `device` with `readers` threads; on a CPU without pinned memory, one after the other."""

    def __init__(self, device: torch.device, readers: int):
        self.device = device
        self.readers = readers
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._flags: list[tuple[str, torch.Tensor]] = []

    def run(self, work: Sequence[FileBlock]) -> Iterator[int]:
        """Copy all blocks; yields the bytes of each once its copies are launched. Must be run to the end."""
        if not work:
            return
        count = min(self.readers + self.readers // 2 + 1, len(work))
        size = max(block.nbytes for block in work)
        size += -size % 4096
        memory = torch.empty(count * size, dtype=torch.uint8, pin_memory=self._stream is not None)
        free: deque[tuple[torch.Tensor, Any]] = deque((buffer, None) for buffer in memory.split(size))
        reading: deque[tuple[Future[None], torch.Tensor, FileBlock]] = deque()
        with ThreadPoolExecutor(self.readers, "birkhoff-load") as pool:
            try:
                for block in work:
                    if not free:
                        yield self._copy_first(reading, free)
                    buffer, copied = free.popleft()
                    if copied is not None:
                        copied.synchronize()
                    view = buffer[: block.nbytes].numpy().data
                    reading.append((pool.submit(read_exactly, block.path, block.offset, view), buffer, block))
                while reading:
                    yield self._copy_first(reading, free)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
            finally:
                if self._stream is not None:
                    self._stream.synchronize()  # before the buffers go

    def _copy_first(
        self,
        reading: deque[tuple[Future[None], torch.Tensor, FileBlock]],
        free: deque[tuple[torch.Tensor, Any]],
    ) -> int:
        future, buffer, block = reading.popleft()
        future.result()
        with torch.no_grad(), nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for rows in block.rows:
                begin = rows.offset - block.offset
                self._copy(rows, buffer[begin : begin + rows.nbytes])
        copied = None
        if self._stream is not None:
            copied = torch.cuda.Event()
            copied.record(self._stream)
        free.append((buffer, copied))
        return block.nbytes

    def _copy(self, rows: StoredRows, staged: torch.Tensor) -> None:
        target = rows.target
        # Codes and scales are copied as bytes of their own dtype; numbers are converted on the device.
        dtype = rows.dtype if rows.kind == "value" else target.dtype
        source = staged.view(dtype).view(target.shape)
        if dtype != target.dtype or not target.is_contiguous():
            source = source.to(self.device, non_blocking=True)
        target.copy_(source, non_blocking=True)
        invalid = _invalid(rows)
        if invalid is not None:
            self._flags.append((rows.name, invalid))

    def suspects(self) -> set[str]:
        """Names of tensors with values that may be invalid."""
        if not self._flags:
            return set()
        flags = torch.stack([flag for _, flag in self._flags]).tolist()
        return {name for (name, _), flag in zip(self._flags, flags) if flag}


def _invalid(rows: StoredRows) -> torch.Tensor | None:
    """Whether a value is invalid, as a scalar on the device; None if no value can be."""
    target = rows.target
    if rows.kind == "value":  # a finite sum has finite terms only
        return torch.isfinite(target.sum(dtype=torch.float32)).logical_not()
    if rows.kind == "scale":
        return invalid_scale(target.view(torch.uint8)).any()
    invalid = invalid_codes(target)
    return None if invalid is None else invalid.any()
