"""Chunks whose bits follow from their names, so that any row that is read back can be checked."""

from __future__ import annotations

import math
import zlib

import numpy as np

from birkhoff.capture.sinks.chunk import Chunk
from birkhoff.capture.sinks.consumer import CountingConsumer
from birkhoff.capture.spec.dtypes import STORED
from birkhoff.capture.store.reader import CaptureEntry

SHAPES = {
    "post_attn": ("bfloat16", (8,)),
    "mhc_streams_pre_attn": ("bfloat16", (4, 6)),
    "mhc_attn_res_mix": ("float32", (4, 4)),
    "mlp_out": ("float16", (8,)),
    "mlp_in": ("fp8_e4m3", (8,)),
}


def bits(request: str, hook: str, layer: int, start: int, rows: int) -> np.ndarray:
    """Rows [start, start + rows) of one site of one request, as stored: [rows, width]."""
    dtype, shape = SHAPES[hook]
    width, stored = math.prod(shape), STORED[dtype]
    base = zlib.crc32(f"{request}/{hook}/{layer}".encode())
    values = (np.arange(start * width, (start + rows) * width, dtype=np.uint64) + base) * 2654435761
    return (values >> 7).astype(f"u{stored.itemsize}").view(stored).reshape(rows, width)


def scales(request: str, start: int, rows: int) -> np.ndarray:
    return ((np.arange(start, start + rows) + zlib.crc32(request.encode()) % 97) / 8 + 0.125).astype(
        np.float32
    )


def tokens(request: str, start: int, rows: int) -> list[int]:
    return [(zlib.crc32(request.encode()) + 31 * row) % 129280 for row in range(start, start + rows)]


def chunk(
    request: str, hook: str, layer: int, start: int, rows: int, *, tag: str = "run", prompt: int = 4, **extra
):
    dtype, shape = SHAPES[hook]
    return Chunk(
        request_id=request,
        tag=tag,
        hook=hook,
        layer=layer,
        rows=bits(request, hook, layer, start, rows),
        dtype=dtype,
        row_shape=shape,
        positions=list(range(start, start + rows)),
        token_ids=tokens(request, start, rows),
        phases="".join("p" if row < prompt else "d" for row in range(start, start + rows)),
        row_offset=start,
        step_index=start,
        scale=scales(request, start, rows) if dtype == "fp8_e4m3" else None,
        **extra,
    )


def same_bits(actual: np.ndarray, expected: np.ndarray) -> bool:
    """Whether the arrays are equal as stored, NaN included."""
    return actual.dtype == expected.dtype and actual.tobytes() == expected.tobytes()


def assert_is_prefix(entry, request: str, rows: int | None = None) -> None:
    """Check that the entry holds the first rows made by `chunk`, with labels; all `rows` of them if given."""
    count = len(entry.array)
    dtype, shape = SHAPES[entry.hook]
    assert entry.dtype == dtype and entry.array.shape == (count, *shape)
    assert same_bits(entry.array, bits(request, entry.hook, entry.layer, 0, count).reshape(count, *shape))
    assert entry.positions == list(range(count)) and entry.token_ids == tokens(request, 0, count)
    if dtype == "fp8_e4m3":
        assert same_bits(entry.scale, scales(request, 0, count))
    assert rows is None or count == rows, (
        f"{entry.hook}[{entry.layer}] of {request}: {count} rows, expected {rows}"
    )


class RecordingConsumer(CountingConsumer):
    """A consumer that keeps every chunk; `entries` joins them as a reader of files does."""

    def __init__(self):
        super().__init__()
        self.chunks: dict[str, list[Chunk]] = {}

    def submit_chunk(self, chunk: Chunk) -> None:
        super().submit_chunk(chunk)
        self.chunks.setdefault(chunk.request_id, []).append(chunk)

    def entries(self, request: str) -> dict[tuple[str, int], CaptureEntry]:
        sites: dict[tuple[str, int], list[Chunk]] = {}
        for part in self.chunks[request]:
            sites.setdefault((part.hook, part.layer), []).append(part)
        return {
            (hook, layer): CaptureEntry(
                layer,
                hook,
                np.concatenate([part.array() for part in parts]).reshape(-1, *parts[0].row_shape),
                parts[0].dtype,
                [position for part in parts for position in part.positions],
                [token for part in parts for token in part.token_ids],
            )
            for (hook, layer), parts in sites.items()
        }
