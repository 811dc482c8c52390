"""Rows of a whole run in batches: each exactly once, in bounded memory, in an order fixed by the seed."""

from __future__ import annotations

import gc
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from birkhoff.capture.sinks.chunk import Chunk
from birkhoff.capture.sinks.result import CaptureFinish, CaptureRequest
from birkhoff.capture.spec.dtypes import to_float32
from birkhoff.capture.store.file_options import FileOptions
from birkhoff.capture.store.reader import iter_rows
from birkhoff.capture.store.writer import CaptureWriter
from birkhoff.errors import CaptureChecksum, CaptureFileError, OptionError
from tests.capture.disks import SoftDisk
from tests.capture.sample_chunks import bits, chunk, same_bits, scales, tokens
from tests.sizes import scaled

COUNTS = {"a": 5, "b": 17, "c": 1, "d": 30}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Four requests of different lengths in all three layouts, two sites each."""
    root = tmp_path_factory.mktemp("rows")
    with CaptureWriter(FileOptions(root, coalesce_max_bytes=300, shard_max_bytes=400), SoftDisk()) as files:
        for layout, (request, rows) in zip(("packed", "sharded", "per_file", "sharded"), COUNTS.items()):
            files.begin(CaptureRequest(request, request, "run", layout=layout))
            for start in range(0, rows, 3):
                for hook in ("mhc_streams_pre_attn", "mlp_in"):
                    files.append(chunk(request, hook, 2, start, min(3, rows - start)))
            assert files.finish(CaptureFinish(request)).result(300).status == "ok"
    return root / "run"


def expected() -> dict[bytes, tuple[str, int, int]]:
    """The expected labels of each row, by its bits."""
    return {
        bits(request, "mhc_streams_pre_attn", 2, row, 1).tobytes(): (request, row, tokens(request, row, 1)[0])
        for request, rows in COUNTS.items()
        for row in range(rows)
    }


@given(
    batch=st.integers(1, 60),
    shuffle=st.booleans(),
    pool=st.none() | st.integers(1, 80),
    seed=st.integers(0, 3),
)
def test_every_row_comes_once_with_its_labels(run, batch, shuffle, pool, seed):
    batches = list(
        iter_rows(run, "mhc_streams_pre_attn", 2, batch, shuffle, seed, labels=True, pool_rows=pool)
    )
    assert [len(rows_read) for rows_read in batches[:-1]] == [batch] * (len(batches) - 1) and 0 < len(
        batches[-1]
    ) <= batch
    truth, seen = expected(), []
    for rows_read in batches:
        assert rows_read.array.shape[1:] == (4, 6) and rows_read.array.dtype == np.uint16
        for row, position, token, request in zip(
            rows_read.array, rows_read.positions, rows_read.token_ids, rows_read.requests
        ):
            assert truth[row.tobytes()] == (request, position, token)
            seen.append(row.tobytes())
    assert sorted(seen) == sorted(truth)


def test_in_order_without_shuffling(run):
    (whole,) = iter_rows(run, "mhc_streams_pre_attn", 2, 1000, labels=True)
    for request, rows in COUNTS.items():
        positions_of_request = [
            position for name, position in zip(whole.requests, whole.positions) if name == request
        ]
        assert positions_of_request == list(range(rows))


def test_a_seed_fixes_the_order_and_another_changes_it(run):
    def order(seed):
        return b"".join(
            rows_read.array.tobytes()
            for rows_read in iter_rows(run, "mhc_streams_pre_attn", 2, 4, True, seed)
        )

    assert order(1) == order(1) != order(2)


def test_shuffling_mixes_requests(run):
    first = next(iter_rows(run, "mhc_streams_pre_attn", 2, 16, shuffle=True, seed=0, labels=True))
    assert len(set(first.requests)) > 1


def test_a_shuffled_pool_is_never_emptied_at_once(quick_path):
    """Rows of one block are spread over more batches than the pool holds: they mix with rows read later."""
    with CaptureWriter(FileOptions(quick_path), SoftDisk()) as files:
        for request_index in range(40):
            name, block = f"r{request_index}", np.full((8, 2), request_index, np.uint16)
            files.append(Chunk(name, "run", "x", 0, block, "bfloat16", (2,), range(8), range(8), "p" * 8))
            assert files.finish(CaptureFinish(name)).result(300).status == "ok"
    seen: dict[int, list[int]] = {}
    for batch_index, rows_read in enumerate(
        iter_rows(quick_path / "run", "x", 0, 8, shuffle=True, seed=3, pool_rows=32)
    ):
        for request_index in rows_read.array[:, 0]:
            seen.setdefault(int(request_index), []).append(batch_index)
    assert all(len(batch_indices) == 8 for batch_indices in seen.values()) and len(seen) == 40
    assert max(max(batch_indices) - min(batch_indices) for batch_indices in seen.values()) >= 32 // 8


def test_decoding_and_dropping_the_last(run):
    rows_read = list(iter_rows(run, "mlp_in", 2, 10, dtype="float32", drop_last=True))
    assert [len(batch) for batch in rows_read] == [10] * (sum(COUNTS.values()) // 10)
    first = next(iter_rows(run, "mlp_in", 2, 10, dtype="float32", labels=True))
    raw = np.concatenate(
        [bits(name, "mlp_in", 2, int(p), 1) for name, p in zip(first.requests, first.positions)]
    )
    scale = np.concatenate([scales(name, int(p), 1) for name, p in zip(first.requests, first.positions)])
    assert np.array_equal(first.array, to_float32(raw, "fp8_e4m3", scale), equal_nan=True)


def test_one_request_alone(run):
    (rows_read,) = iter_rows(run / "a", "mhc_streams_pre_attn", 2, 100)
    assert same_bits(rows_read.array, bits("a", "mhc_streams_pre_attn", 2, 0, 5).reshape(5, 4, 6))


def test_invalid_arguments_are_refused_at_once(run, quick_path):
    with pytest.raises(CaptureFileError, match="no finished capture"):
        iter_rows(run, "mhc_streams_pre_attn", 3, 4)
    with pytest.raises(CaptureFileError, match="cannot be listed"):
        iter_rows(quick_path / "nowhere", "post_attn", 0, 4)
    for wrong in ({"batch": 0}, {"batch": True}, {"batch": 4, "pool_rows": 0}, {"batch": 4, "dtype": "int8"}):
        with pytest.raises(OptionError):
            iter_rows(run, "mhc_streams_pre_attn", 2, **wrong)


def test_dtypes_are_not_mixed_unless_decoded(quick_path):
    with CaptureWriter(FileOptions(quick_path), SoftDisk()) as files:
        files.append(chunk("a", "post_attn", 0, 0, 2))
        floats = np.arange(16, dtype=np.float32).reshape(2, 8)
        files.append(Chunk("b", "run", "post_attn", 0, floats, "float32", (8,), [0, 1], [0, 1], "pp"))
        for request in "ab":
            assert files.finish(CaptureFinish(request)).result(300).status == "ok"
    with pytest.raises(CaptureFileError, match="dtype='float32'"):
        iter_rows(quick_path / "run", "post_attn", 0, 4)
    (rows_read,) = iter_rows(quick_path / "run", "post_attn", 0, 4, dtype="float32")
    assert np.array_equal(rows_read.array[2:], floats)


def test_damage_is_reported_when_it_is_read(run, quick_path):
    with CaptureWriter(FileOptions(quick_path), SoftDisk()) as files:
        for request in "ab":
            files.append(chunk(request, "post_attn", 0, 0, 6))
            files.finish(CaptureFinish(request)).result(300)
    payload = quick_path / "run/b/packed.bin"
    raw = bytearray(payload.read_bytes())
    raw[-1] ^= 1
    payload.write_bytes(raw)
    batches = iter_rows(quick_path / "run", "post_attn", 0, 2)
    assert same_bits(np.concatenate([next(batches).array for _ in range(3)]), bits("a", "post_attn", 0, 0, 6))
    with pytest.raises(CaptureChecksum):
        next(batches)
    assert sum(map(len, iter_rows(quick_path / "run", "post_attn", 0, 2, verify=False))) == 12


@pytest.mark.parametrize("shuffle", [False, True])
def test_memory_does_not_grow_with_the_run(quick_path, shuffle):
    """Twenty times the rows need the same memory, except for the index."""
    width, rows = 1024, 256

    def peak(requests: int) -> int:
        root = quick_path / str(requests)
        with CaptureWriter(
            FileOptions(root, default_layout="sharded", shard_max_bytes=8 << 20), SoftDisk()
        ) as files:
            for request_index in range(requests):
                name, block = f"r{request_index}", np.full((rows, width), request_index, np.uint16)
                files.append(
                    Chunk(
                        name,
                        "run",
                        "post_attn",
                        0,
                        block,
                        "bfloat16",
                        (width,),
                        range(rows),
                        range(rows),
                        "p" * rows,
                    )
                )
                assert files.finish(CaptureFinish(name)).result(300).status == "ok"
        gc.collect()
        tracemalloc.start()
        count = sum(
            len(rows_read)
            for rows_read in iter_rows(root / "run", "post_attn", 0, 128, shuffle, pool_rows=512)
        )
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert count == requests * rows
        return used

    small, large = peak(scaled(20, 8)), peak(scaled(400, 80))
    total = scaled(400, 80) * rows * width * 2
    assert large < small + total // 20, (
        f"{small} bytes for the small run, {large} for the large one of {total}"
    )


def test_files_of_other_writers_are_rows_too(quick_path):
    rows = np.arange(24, dtype="<f4").reshape(6, 4)
    directory = quick_path / "old/x"
    directory.mkdir(parents=True)
    (directory / "packed.bin").write_bytes(rows.tobytes())
    entry = {"layer": 1, "hook": "post_mlp", "offset": 0, "nbytes": 96, "shape": [6, 4]}
    index = {"request_id": "x", "layout": "packed", "dtype": "float32", "entries": [entry]}
    (directory / "packed.json").write_text(json.dumps(index))
    rows_read = list(iter_rows(quick_path / "old", "post_mlp", 1, 4, labels=True))
    assert same_bits(np.concatenate([batch.array for batch in rows_read]), rows)
    assert rows_read[0].positions == [-1] * 4 and rows_read[0].requests == ["x"] * 4
