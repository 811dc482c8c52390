"""Copies captured rows to the host on a separate CUDA stream, through reused pinned memory.

The rows of a step are copied after its last kernel, while the host continues and the next step may start. Jobs receive
them after the next step was launched (`runner.py`). A pinned buffer is reused once all its rows are delivered, so a
running engine needs two of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from birkhoff.hooks.capture_buffer import CaptureBuffer, RowCopyPlan
from birkhoff.hooks.plan import Key

MIN_BUFFER_BYTES = 1 << 16


class _HostBuffer:
    """Host memory, pinned when rows come from a GPU, and the event after which it holds them."""

    def __init__(self, num_bytes: int, pinned: bool):
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self.copied = torch.cuda.Event() if pinned else None


class HostCopier:
    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._last_copied: torch.cuda.Event | None = None
        self._free: list[_HostBuffer] = []

    def wait(self) -> None:
        """Make the current stream wait for the last copy, so that its source can be overwritten."""
        if self._last_copied is not None and not self._last_copied.query():
            torch.cuda.current_stream().wait_event(self._last_copied)

    def copy(self, source: CaptureBuffer, plan: RowCopyPlan) -> PendingRows:
        """Start copying the planned bytes of `source`; the result waits for the copy and returns the rows."""
        data = source.data.view(-1)
        pinned = data.device.type == "cuda"
        buffer = self._allocate(plan.num_bytes, pinned)
        if buffer.copied is None:
            host, device = buffer.bytes.numpy(), data.numpy()
            for first, stop, to in plan.copies:
                host[to : to + stop - first] = device[first:stop]
            return PendingRows(plan, buffer, self._free)
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for first, stop, to in plan.copies:
                buffer.bytes[to : to + stop - first].copy_(data[first:stop], non_blocking=True)
            buffer.copied.record(self._stream)
        data.record_stream(self._stream)  # the pattern that owns it may be evicted before the copy is done
        self._last_copied = buffer.copied
        return PendingRows(plan, buffer, self._free)

    def _allocate(self, num_bytes: int, pinned: bool) -> _HostBuffer:
        """A free buffer that is large enough, or a new one; free buffers that are too small are dropped."""
        while self._free:
            buffer = self._free.pop()
            if len(buffer.bytes) >= num_bytes:
                return buffer
        return _HostBuffer(max(MIN_BUFFER_BYTES, 1 << (num_bytes - 1).bit_length()), pinned)


class PendingRows:
    """The rows of one step, by job index. Each job's rows are taken once; then the buffer is free again."""

    def __init__(self, plan: RowCopyPlan, buffer: _HostBuffer, free: list[_HostBuffer]):
        self._plan = plan
        self._buffer = buffer
        self._free = free
        self._remaining = set(range(len(plan.jobs)))

    def __call__(self, job: int) -> list[tuple[Key, torch.Tensor]]:
        if self._buffer.copied is not None:
            self._buffer.copied.synchronize()
        rows = list(self._plan.rows(job, self._buffer.bytes.numpy()))
        self._remaining.remove(job)
        if not self._remaining:
            self._free.append(self._buffer)
        return rows


class JoinedRows:
    """The rows of jobs with several tokens in a step: `counts` consecutive single rows each, joined."""

    def __init__(self, pending: PendingRows, counts: Sequence[int]):
        self._pending = pending
        self._counts = counts

    def __call__(self, job: int) -> list[tuple[Key, torch.Tensor]]:
        first = sum(self._counts[:job])
        tokens = [self._pending(first + offset) for offset in range(self._counts[job])]
        return [(rows[0][0], torch.cat([row for _, row in rows])) for rows in zip(*tokens)]
