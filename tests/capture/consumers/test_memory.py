"""Rows in memory: bounded, joined like files, the oldest finished request first to go."""

from __future__ import annotations

import pytest

from birkhoff.capture.sinks.consumer import Consumer
from birkhoff.capture.sinks.memory_consumer import LABEL_BYTES, MemoryConsumer
from birkhoff.capture.sinks.result import CaptureFinish, CaptureRequest
from birkhoff.capture.store.file_options import FileOptions
from birkhoff.capture.store.reader import read_request
from birkhoff.capture.store.writer import CaptureWriter
from birkhoff.errors import CaptureError, OptionError
from tests.capture.disks import SoftDisk
from tests.capture.made import SHAPES, assert_is_prefix, chunk, same_bits

ROW = 16 + LABEL_BYTES  # of post_attn


def capture(memory: MemoryConsumer, request: str, rows: int = 4):
    for start in range(0, rows, 2):
        memory.submit_chunk(chunk(request, "post_attn", 0, start, min(2, rows - start)))
    return memory.finalize(CaptureFinish(request)).result()


def test_entries_equal_those_read_from_files(tmp_path):
    memory = MemoryConsumer()
    with CaptureWriter(FileOptions(tmp_path), SoftDisk()) as files:
        for start in (0, 3):
            for hook in SHAPES:
                files.append(chunk("a", hook, 2, start, 3))
                memory.submit_chunk(chunk("a", hook, 2, start, 3))
        files.finish(CaptureFinish("a")).result(30)
    result = memory.finalize(CaptureFinish("a", "stop")).result()
    assert result.status == "ok" and result.rows == 6 * len(SHAPES) and result.keys == len(SHAPES)
    stored, held = read_request(tmp_path / "run/a"), memory.entries("a")
    assert set(stored) == set(held)
    for address, entry in held.items():
        other = stored[address]
        assert same_bits(entry.array, other.array) and entry.array.shape == other.array.shape
        for name in ("layer", "hook", "dtype", "positions", "token_ids", "phases", "axes"):
            assert getattr(entry, name) == getattr(other, name), name
        assert entry.scale is None or same_bits(entry.scale, other.scale)


def test_the_ring_is_bounded_and_forgets_the_oldest():
    memory = MemoryConsumer(max_bytes=10 * ROW)
    for name in "abc":
        assert capture(memory, name).status == "ok"  # four rows each: the third needs the room of the first
        assert memory.nbytes <= 10 * ROW
    assert memory.evicted == 1 and memory.get_result("a").status == "not_requested"
    with pytest.raises(CaptureError, match="max_bytes"):
        memory.entries("a")
    for name in "bc":
        assert_is_prefix(memory.entries(name)[0, "post_attn"], name, 4)


def test_unfinished_requests_are_not_evicted_for_others():
    memory = MemoryConsumer(max_bytes=6 * ROW)
    memory.submit_chunk(chunk("open", "post_attn", 0, 0, 4))
    result = capture(memory, "late", 4)
    assert (
        result.status == "partial_error"
        and result.rows == 2
        and result.dropped_rows == 2
        and "240" in result.error
    )
    assert memory.finalize(CaptureFinish("open")).result().status == "ok"
    assert_is_prefix(memory.entries("open")[0, "post_attn"], "open", 4)


def test_a_request_larger_than_the_ring_keeps_its_beginning():
    memory = MemoryConsumer(max_bytes=5 * ROW)
    result = capture(memory, "a", 20)
    assert result.status == "partial_error" and result.rows == 4 and result.dropped_rows == 16
    assert_is_prefix(memory.take("a")[0, "post_attn"], "a", 4)
    assert memory.nbytes == 0 and capture(memory, "b").status == "ok"


def test_states_of_a_request():
    memory = MemoryConsumer()
    assert isinstance(memory, Consumer)
    assert memory.get_result("a").status == "not_requested"
    memory.begin(CaptureRequest("a", "probe", "run"))
    assert memory.get_result("a").status == "pending"
    assert memory.finalize(CaptureFinish("a")).result().id == "probe"
    assert (
        memory.get_result("a").status == "ok"
        and memory.finalize(CaptureFinish("b")).result().status == "not_requested"
    )
    memory.shutdown()
    assert memory.nbytes == 0
    with pytest.raises(OptionError):
        MemoryConsumer(max_bytes=0)
