"""Captured rows on their way to the host: on a stream of their own, through page-locked memory that is used again.

A step's rows are copied behind its last kernel, while the host goes on and the next step may begin; who they belong to
gets them when it asks, which is after the next step was launched (`runner.py`). Page-locked buffers go back when
everybody has his rows, so two of them serve a running engine.
"""

from __future__ import annotations

import torch

from birkhoff.hooks.capture_buffer import CaptureBuffer, RowCopyPlan
from birkhoff.hooks.plan import Key

SMALLEST = 1 << 16  # bytes of a buffer


class _Buffer:
    """Host memory, page-locked where rows come from a GPU, and the moment from which it holds them."""

    def __init__(self, num_bytes: int, pinned: bool):
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self.arrived = torch.cuda.Event() if pinned else None


class HostCopier:
    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._arrived: torch.cuda.Event | None = None
        self._free: list[_Buffer] = []

    def wait(self) -> None:
        """Whatever the current stream is given from now on may write over what `take` was asked for."""
        if self._arrived is not None and not self._arrived.query():
            torch.cuda.current_stream().wait_event(self._arrived)

    def take(self, tray: CaptureBuffer, cut: RowCopyPlan) -> PendingRows:
        """Begin to copy what is wanted of a tray; the answer waits for it and gives it out."""
        flat = tray.data.view(-1)
        pinned = flat.device.type == "cuda"
        buffer = self._buffer(cut.num_bytes, pinned)
        if buffer.arrived is None:
            host, source = buffer.bytes.numpy(), flat.numpy()
            for first, stop, to in cut.copies:
                host[to : to + stop - first] = source[first:stop]
            return PendingRows(cut, buffer, self._free)
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for first, stop, to in cut.copies:
                buffer.bytes[to : to + stop - first].copy_(flat[first:stop], non_blocking=True)
            buffer.arrived.record(self._stream)
        flat.record_stream(self._stream)  # its pattern may be let go before the copy has ended
        self._arrived = buffer.arrived
        return PendingRows(cut, buffer, self._free)

    def _buffer(self, num_bytes: int, pinned: bool) -> _Buffer:
        """One that is large enough; those that are not go."""
        while self._free:
            found = self._free.pop()
            if len(found.bytes) >= num_bytes:
                return found
        return _Buffer(max(SMALLEST, 1 << (num_bytes - 1).bit_length()), pinned)


class PendingRows:
    """The rows of one step, by the number of who wants them. Each is asked for once; then the memory goes back."""

    def __init__(self, cut: RowCopyPlan, buffer: _Buffer, free: list[_Buffer]):
        self._cut = cut
        self._buffer = buffer
        self._free = free
        self._left = set(range(len(cut.jobs)))

    def __call__(self, number: int) -> list[tuple[Key, torch.Tensor]]:
        if self._buffer.arrived is not None:
            self._buffer.arrived.synchronize()
        rows = list(self._cut.rows(number, self._buffer.bytes.numpy()))
        self._left.remove(number)
        if not self._left:
            self._free.append(self._buffer)
        return rows
