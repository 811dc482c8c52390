"""Asynchronous copies of captured rows from a GPU to pinned host memory, on a CUDA stream of their own.

The rows returned are on the host and not valid yet: `SiteRows.wait` blocks until they are. Selection, projection,
reduction and cast come before, on the GPU, so that no byte crosses that is not asked for. PyTorch keeps pinned memory
that is freed and hands it out again once the copies into it are complete."""

from __future__ import annotations

from dataclasses import replace

import torch

from birkhoff.hooks.plan import SiteRows


class PinnedCopy:
    """Rows that are on the host already are returned as they are."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def __call__(self, rows: SiteRows) -> SiteRows:
        device = rows.tensor.device
        if device.type != "cuda":
            return rows
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        tensor = _copy(rows.tensor, stream)
        scale = None if rows.scale is None else _copy(rows.scale, stream)
        copied = torch.cuda.Event()
        copied.record(stream)
        return replace(rows, tensor=tensor, scale=scale, ready=copied.synchronize)


def _copy(source: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    source.record_stream(stream)  # its memory is not used again before the copy is complete
    return target
