"""Time to load a checkpoint: reading its files alone, and `birkhoff.load` with all that follows.

Reading is measured with one and with more threads into buffers that are then forgotten; what the files take from disk
the first time is a row of its own (`first`), since later rows read the page cache. `load` is timed from its first
report of progress to its last (`weights_s`), and from call to return."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from birkhoff.api.load import load
from birkhoff.api.options import EngineOptions
from birkhoff.bench.report import Row, facts, significant
from birkhoff.option_checks import check_int
from birkhoff.weights.checkpoint import open_checkpoint
from birkhoff.weights.locate import locate
from birkhoff.weights.safetensors import read_exactly

PIECE_BYTES = 16 << 20
MAX_READ_BYTES = 8 << 30  # of a checkpoint, for the rows that only read
THREADS = (1, 4, 16)


def read_rate(files: Sequence[Path], threads: int, max_bytes: int = MAX_READ_BYTES) -> tuple[int, float]:
    """Bytes read and seconds taken by `threads` threads with a buffer each."""
    pieces = [
        (path, offset, min(PIECE_BYTES, path.stat().st_size - offset))
        for path in files
        for offset in range(0, path.stat().st_size, PIECE_BYTES)
    ][: max(1, max_bytes // PIECE_BYTES)]
    buffers = [torch.zeros(PIECE_BYTES, dtype=torch.uint8) for _ in range(threads)]

    def read(first: int) -> None:
        view = buffers[first].numpy().data
        for path, offset, nbytes in pieces[first::threads]:
            read_exactly(path, offset, view[:nbytes])

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))
    return sum(nbytes for _, _, nbytes in pieces), time.perf_counter() - began


def bench_load(model: str, device: str, rounds: int = 2, max_requests: int = 8) -> Iterator[Row]:
    """Rows of reading and of loading, `rounds` times."""
    check_int("rounds", rounds)
    options = EngineOptions(device=device, max_requests=max_requests)
    checkpoint = open_checkpoint(locate(model))
    common = facts() | {"bench": "load", "model": model, "device": device}
    for number, threads in enumerate((THREADS[-1], *THREADS)):
        nbytes, seconds = read_rate(checkpoint.files, threads)
        yield common | {
            "kind": "read, first" if number == 0 else "read",
            "readers": threads,
            "bytes": nbytes,
            "seconds": significant(seconds),
            "gb_per_s": significant(nbytes / seconds / 1e9),
        }
    for _ in range(rounds):
        seen: list[tuple[float, int]] = []
        began = time.perf_counter()
        engine = load(
            model,
            options=options,
            progress=lambda done, total, seen=seen: seen.append((time.perf_counter(), done)),  # type: ignore[misc]
        )
        total = time.perf_counter() - began
        engine.close()
        del engine
        (start, _), (end, nbytes) = seen[0], seen[-1]
        yield common | {
            "kind": "load",
            "bytes": nbytes,
            "weights_s": significant(end - start),
            "gb_per_s": significant(nbytes / (end - start) / 1e9),
            "before_weights_s": significant(start - began),
            "total_s": significant(total),
        }
