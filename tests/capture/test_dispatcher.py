"""The dispatcher: order, bounds, overload policies, and that it never raises."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from birkhoff.capture.sinks.chunk import Chunk
from birkhoff.capture.sinks.consumer import Consumer
from birkhoff.capture.sinks.dispatcher import Dispatcher
from birkhoff.capture.sinks.filesystem import FilesystemConsumer
from birkhoff.capture.sinks.result import CaptureFinish, CaptureRequest, CaptureResult, done
from birkhoff.capture.sinks.spill_queue import Spill
from birkhoff.capture.store.reader import read_request
from birkhoff.errors import CaptureError, OptionError
from tests.capture.disks import FaultyDisk, SoftDisk
from tests.capture.sample_chunks import SHAPES, RecordingConsumer, assert_is_prefix, bits, chunk, same_bits
from tests.sizes import scaled


class Gate:
    """A consumer that accepts nothing until it is opened, and records what it receives."""

    reads_client_spec = True

    def __init__(self, threads: int = 1, fail: Exception | None = None, fail_at: str = ""):
        self.writer_threads, self.open = threads, threading.Event()
        self.taken: list[Chunk] = []
        self.finishes: dict[str, CaptureFinish] = {}
        self.begun: list[str] = []
        self._fail, self._fail_at = fail, fail_at
        self._lock = threading.Lock()
        self.closed = False

    def global_capture_spec(self):
        return None

    def validate_client_spec(self, spec, path):
        pass

    def begin(self, request: CaptureRequest) -> None:
        self.begun.append(request.key)
        if self._fail_at == "begin":
            raise self._fail

    def submit_chunk(self, chunk: Chunk) -> None:
        assert self.open.wait(300)
        with self._lock:
            self.taken.append(chunk)
        if self._fail_at == "submit":
            raise self._fail

    def finalize(self, finish: CaptureFinish) -> Future[CaptureResult]:
        self.finishes[finish.key] = finish
        if self._fail_at == "finalize":
            raise self._fail
        if self._fail_at == "result":
            failed: Future[CaptureResult] = Future()
            failed.set_exception(self._fail)
            return failed
        rows = sum(part.num_rows for part in self.taken if part.request_id == finish.key)
        return done(CaptureResult("ok", finish.key, None, rows))

    def get_result(self, key: str) -> CaptureResult:
        return CaptureResult("ok")

    def shutdown(self) -> None:
        self.closed = True
        if self._fail_at == "shutdown":
            raise self._fail


def begin(dispatcher: Dispatcher, consumer: str, *keys: str) -> None:
    for key in keys:
        dispatcher.begin(consumer, CaptureRequest(key, key, "run"))


def send(dispatcher: Dispatcher, requests: dict[str, int], seed: int = 0) -> None:
    """Send rows of several requests and two sites, interleaved at random, in order for each of them."""
    begin(dispatcher, "gate", *requests)
    chance = random.Random(seed)
    left = {(name, hook): 0 for name in requests for hook in ("post_attn", "mhc_attn_res_mix")}
    while left:
        name, hook = chance.choice(sorted(left))
        start = left[name, hook]
        count = min(chance.randint(1, 3), requests[name] - start)
        dispatcher.submit(chunk(name, hook, 1, start, count))
        left[name, hook] = start + count
        if start + count == requests[name]:
            del left[name, hook]


def until(so, seconds: float = 300) -> None:
    """Wait for a condition set by another thread."""
    given_up = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < given_up, "it never came so far"
        time.sleep(0.005)


def waits(dispatcher: Dispatcher) -> bool:
    """Whether a thread waits for room in the queue."""
    return bool(dispatcher.queues["gate"]._room._waiters)


def in_order(taken: list[Chunk], requests: dict[str, int]) -> None:
    """Check that every row of every request arrived once, in order, with its bits."""
    for name, rows in requests.items():
        for hook in ("post_attn", "mhc_attn_res_mix"):
            parts = [part for part in taken if (part.request_id, part.hook) == (name, hook)]
            assert [position for part in parts for position in part.positions] == list(range(rows))
            assert [part.row_offset for part in parts] == [part.positions[0] for part in parts]
            assert same_bits(np.concatenate([part.array() for part in parts]), bits(name, hook, 1, 0, rows))


REQUESTS = {f"r{index}": 12 for index in range(6)}


@pytest.mark.parametrize("threads", [1, 3])
def test_t_cap_8_block_keeps_every_row(quick_path, threads):
    gate = Gate(threads)
    with Dispatcher({"gate": gate}, queue_size=4, overload_policy="block") as dispatcher:
        engine = threading.Thread(target=send, args=(dispatcher, REQUESTS))
        engine.start()
        until(lambda: waits(dispatcher))
        assert engine.is_alive() and dispatcher.queues["gate"].depth <= 4, (
            "the engine waits at the queue's limit"
        )
        gate.open.set()
        engine.join(300)
        for name in REQUESTS:
            dispatcher.finish(name, "stop")
            assert dispatcher.result(name, "gate", 300).status == "ok"
        counters = dispatcher.queues["gate"].counters
        assert counters.blocked_seconds > 0 and counters.dropped_rows == counters.spilled_chunks == 0
        assert counters.submitted_rows == counters.delivered_rows == 2 * 12 * len(REQUESTS)
    in_order(gate.taken, REQUESTS)


@pytest.mark.parametrize("threads", [1, 3])
def test_t_cap_8_drop_counts_exactly(quick_path, threads):
    gate = Gate(threads)
    with Dispatcher({"gate": gate}, queue_size=4, overload_policy="drop") as dispatcher:
        send(dispatcher, REQUESTS)
        gate.open.set()
        results = {}
        for name in REQUESTS:
            dispatcher.finish(name, "stop")
            results[name] = dispatcher.result(name, "gate", 300)
        counters = dispatcher.queues["gate"].counters
    sent = 2 * 12 * len(REQUESTS)
    kept = sum(part.num_rows for part in gate.taken)
    assert 0 < kept < sent and counters.delivered_rows == kept and counters.dropped_rows == sent - kept
    assert counters.submitted_rows == sent
    for name, result in results.items():
        delivered = sum(part.num_rows for part in gate.taken if part.request_id == name)
        assert result.dropped_rows == 24 - delivered == gate.finishes[name].dropped_rows
        assert result.status == ("partial_error" if delivered < 24 else "ok")
        assert delivered == 24 or "dropped" in result.error
    for part in gate.taken:  # what was delivered is complete and correct
        assert same_bits(part.array(), bits(part.request_id, part.hook, 1, part.positions[0], part.num_rows))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("room", [1 << 30, 4000])
def test_t_cap_8_spill_keeps_order(quick_path, threads, room):
    """Chunks wait on disk at their place in the queue; if the disk share is full the engine waits. Nothing is lost."""
    gate = Gate(threads)
    spill = quick_path / "spill"
    options = {"overload_policy": "spill", "spill_dir": str(spill), "spill_max_bytes": room}
    with Dispatcher({"gate": gate}, queue_size=4, **options) as dispatcher:
        engine = threading.Thread(target=send, args=(dispatcher, REQUESTS))
        engine.start()
        counters = dispatcher.queues["gate"].counters
        if room < 1 << 20:
            until(lambda: waits(dispatcher))
        else:
            engine.join(300)
            assert not engine.is_alive(), "with room it never waits"
        assert counters.spilled_chunks > 5
        assert os.listdir(spill) == [], "spilled files have no name: nothing is left if we die"
        gate.open.set()
        engine.join(300)
        for name in REQUESTS:
            dispatcher.finish(name)
            assert dispatcher.result(name, "gate", 300).status == "ok"
        assert counters.dropped_rows == 0 and counters.delivered_rows == 2 * 12 * len(REQUESTS)
        assert (counters.blocked_seconds > 0) == (room < 1 << 20)
    in_order(gate.taken, REQUESTS)


def test_a_spill_disk_that_is_full_makes_the_engine_wait(quick_path):
    gate, disk = Gate(), FaultyDisk(lambda call, path: errno.ENOSPC if call == "write" else None)
    options = {"overload_policy": "spill", "spill_dir": str(quick_path), "disk": disk}
    with Dispatcher({"gate": gate}, queue_size=2, **options) as dispatcher:
        engine = threading.Thread(target=send, args=(dispatcher, {"a": 12}))
        engine.start()
        until(lambda: waits(dispatcher))
        gate.open.set()
        engine.join(300)
        dispatcher.finish("a")
        assert dispatcher.result("a", "gate", 300).status == "ok"
    in_order(gate.taken, {"a": 12})


@pytest.mark.parametrize("hook", SHAPES)
def test_a_spilled_chunk_is_read_back_unchanged(quick_path, hook):
    spill = Spill(str(quick_path), 1 << 20, SoftDisk())
    sent = [chunk("a", hook, 3, start, 2) for start in (0, 2, 4)]
    sent.append(Chunk(**{**vars(sent[0]), "positions": None, "token_ids": None, "phases": None}))
    waiting = [spill.put(part) for part in sent]
    for before, spilled in zip(sent, waiting):
        after = spill.take(spilled)
        after.check()
        assert same_bits(after.array(), before.array())
        for name in (
            "request_id",
            "tag",
            "hook",
            "layer",
            "dtype",
            "row_shape",
            "positions",
            "token_ids",
            "phases",
            "row_offset",
            "step_index",
        ):
            assert getattr(after, name) == getattr(before, name), name
        assert (after.scale is None) == (before.scale is None)
        assert before.scale is None or same_bits(after.scales(), before.scales())
    assert spill.held_bytes == 0
    spill.close()


def test_spilled_space_is_reclaimed(quick_path):
    """Segments are closed after reading; one file is reused while the queue runs empty."""
    spill = Spill(str(quick_path), 1 << 30, SoftDisk())
    before = len(os.listdir("/proc/self/fd"))
    big = np.zeros((1 << 14, 256), np.float32)  # 16 MiB: five fill a segment
    part = Chunk("a", "run", "x", 0, big, "float32", (256,), range(1 << 14), range(1 << 14), "p" * (1 << 14))
    waiting = [spill.put(part) for _ in range(10)]
    assert len(os.listdir("/proc/self/fd")) == before + 3
    for spilled in waiting:
        spill.take(spilled)
    assert spill.held_bytes == 0 and len(os.listdir("/proc/self/fd")) == before + 1
    spill.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("fail_at", ["begin", "submit", "finalize", "result", "shutdown"])
@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "bad disk"), CaptureError("no"), KeyError("x"), MemoryError()]
)
def test_a_consumer_that_raises_does_not_affect_others(fail_at, error):
    bad, good = Gate(fail=error, fail_at=fail_at), RecordingConsumer()
    bad.open.set()
    dispatcher = Dispatcher({"bad": bad, "good": good})
    for name in ("a", "b"):
        begin(dispatcher, "bad", name + "-bad")
        begin(dispatcher, "good", name)
        for start in range(0, 6, 2):
            for key in (name + "-bad", name):
                dispatcher.submit(chunk(key, "post_attn", 0, start, 2))
        for key in (name + "-bad", name):
            dispatcher.finish(key, "stop", 4)
        result = dispatcher.result(name, "good", 300)
        assert result.status == "ok" and result.rows == 6
        assert_is_prefix(good.entries(name)["post_attn", 0], name, 6)
        expected = {"finalize": "error", "result": "error", "shutdown": "ok"}.get(fail_at, "partial_error")
        failed = dispatcher.result(name + "-bad", "bad", 300)
        assert failed.status == expected and (expected == "ok" or failed.error)
    if fail_at == "submit":
        assert len(bad.taken) == 2, "after a failure the rest of a request is not offered again"
    dispatcher.shutdown()
    assert bad.closed


def test_bad_chunks_become_results_not_exceptions():
    gate = Gate()
    gate.open.set()
    with Dispatcher({"gate": gate}) as dispatcher:
        begin(dispatcher, "gate", "a")
        good = chunk("a", "post_attn", 0, 0, 2)
        dispatcher.submit(good)
        for wrong in (
            {"positions": [0]},
            {"dtype": "int3"},
            {"rows": np.zeros(3)},
            {"rows": None},
            {"phases": "xx"},
        ):
            dispatcher.submit(Chunk(**{**vars(good), **wrong}))
        dispatcher.finish("a")
        result = dispatcher.result("a", "gate", 300)
    assert result.status == "partial_error" and "positions" in result.error and len(gate.taken) == 1


def test_requests_reach_the_consumer_they_name():
    one, two = RecordingConsumer(), RecordingConsumer()
    with Dispatcher({"one": one, "two": two}) as dispatcher:
        dispatcher.begin("one", CaptureRequest("a", "probe", "run"))
        dispatcher.begin("two", CaptureRequest("b", "other", "run"))
        assert dispatcher.result("b", "two").status == "pending"
        for name in ("a", "b"):
            dispatcher.submit(chunk(name, "post_attn", 0, 0, 2))
        dispatcher.submit(chunk("b", "mlp_out", 0, 0, 2))
        for name in ("a", "b"):
            dispatcher.finish(name)
        assert dispatcher.result("a", "one", 300).keys == 1 and dispatcher.result("b", "two", 300).keys == 2
        assert dispatcher.result("b", "two").id == "other"
        for key, consumer in (("a", "two"), ("b", "one"), ("never", "one")):
            assert dispatcher.result(key, consumer).status == "not_requested"
        begin(dispatcher, "one", "c")
        for consumer, key in (("three", "d"), ("one", "c")):
            with pytest.raises(CaptureError):
                begin(dispatcher, consumer, key)
    with pytest.raises(CaptureError, match="shut down"):
        begin(dispatcher, "one", "e")
    dispatcher.submit(chunk("e", "post_attn", 0, 0, 2))  # the engine may still run: ignored, not raised
    dispatcher.finish("e")
    dispatcher.shutdown()


def test_shutting_down_finishes_open_requests(quick_path):
    dispatcher = Dispatcher({"files": FilesystemConsumer(str(quick_path), SoftDisk())})
    begin(dispatcher, "files", "a")
    for start in range(0, 40, 2):
        dispatcher.submit(chunk("a", "post_attn", 0, start, 2))
    dispatcher.shutdown()
    entry = read_request(quick_path / "run/a")["post_attn", 0]
    assert_is_prefix(entry, "a", 40)
    result = dispatcher.result("a", "files")
    assert result.status == "partial_error" and "shut down" in result.error


def test_shutting_down_wakes_an_engine_that_waits():
    gate = Gate()
    dispatcher = Dispatcher({"gate": gate}, queue_size=1, overload_policy="block")
    engine = threading.Thread(target=send, args=(dispatcher, {"a": 12}))
    engine.start()
    until(lambda: waits(dispatcher))
    closer = threading.Thread(target=dispatcher.shutdown)
    closer.start()
    engine.join(300)
    assert not engine.is_alive()
    gate.open.set()
    closer.join(300)
    counters = dispatcher.queues["gate"].counters
    assert counters.dropped_rows + counters.delivered_rows == counters.submitted_rows <= 24
    assert counters.dropped_rows > 0 and "shut down" in dispatcher.result("a", "gate").error


def test_results_wait_no_longer_than_the_timeout():
    gate = Gate()
    with Dispatcher({"gate": gate}) as dispatcher:
        begin(dispatcher, "gate", "a")
        dispatcher.submit(chunk("a", "post_attn", 0, 0, 2))
        dispatcher.finish("a")
        started = time.monotonic()
        result = dispatcher.result("a", "gate", timeout=0.2)
        assert 0.15 < time.monotonic() - started < 60 and result.status == "pending"
        gate.open.set()
        assert dispatcher.result("a", "gate", 300).status == "ok"


@pytest.mark.parametrize(
    "wrong", [{"overload_policy": "panic"}, {"queue_size": 0}, {"queue_size": True}, {"spill_max_bytes": -1}]
)
def test_options_are_checked(wrong):
    with pytest.raises(OptionError):
        Dispatcher({}, **wrong)


def test_the_gate_is_a_consumer():
    assert isinstance(Gate(), Consumer)


@pytest.mark.parametrize("policy", ["block", "drop", "spill"])
def test_a_storm_obeys_the_policy_and_the_memory_stays(quick_path, policy):
    """More rows than the disk can take: rows are kept or counted, and memory never exceeds the queue."""

    class Slow(SoftDisk):
        def write(self, file: int, data: memoryview, offset: int) -> int:
            time.sleep(0.002)
            return super().write(file, data, offset)

    files = FilesystemConsumer(str(quick_path), Slow(), coalesce_max_bytes=0, writer_threads=2)
    rows, requests = scaled(400, 60), 4
    most = 0
    with Dispatcher({"files": files}, queue_size=16, overload_policy=policy) as dispatcher:
        queue = dispatcher.queues["files"]
        begin(dispatcher, "files", *(f"r{index}" for index in range(requests)))
        for row in range(rows):
            for index in range(requests):
                dispatcher.submit(chunk(f"r{index}", "mhc_streams_pre_attn", 0, row, 1))
            most = max(most, queue._in_memory)
        for index in range(requests):
            dispatcher.finish(f"r{index}", "stop", 4)
        results = [dispatcher.result(f"r{index}", "files", 300) for index in range(requests)]
        counters = queue.counters
    assert most <= 16
    assert (
        sum(result.rows + result.dropped_rows for result in results)
        == rows * requests
        == counters.submitted_rows
    )
    assert counters.delivered_rows + counters.dropped_rows == rows * requests
    if policy == "drop":
        assert counters.dropped_rows > 0 and any(result.status == "partial_error" for result in results)
    else:
        assert all(result.status == "ok" and result.rows == rows for result in results)
    for index, result in enumerate(results):
        directory = quick_path / "run" / f"r{index}"
        entry = read_request(directory)["mhc_streams_pre_attn", 0]
        assert len(entry.array) == result.rows and entry.positions == sorted(set(entry.positions))
        for stored, position in zip(entry.array, entry.positions):
            assert stored.tobytes() == bits(f"r{index}", "mhc_streams_pre_attn", 0, position, 1).tobytes()
        sidecar = json.loads((directory / "packed.json").read_text())
        assert sidecar.get("dropped_rows", 0) == result.dropped_rows


def test_memory_is_flat_while_a_million_small_rows_are_written(quick_path):
    """Twice as many rows need no more memory: per-row data is on the disk. Measured in a separate process."""
    import subprocess
    import sys

    code = """
import re, sys
import numpy as np
from birkhoff.capture.sinks.chunk import Chunk
from birkhoff.capture.sinks.filesystem import FilesystemConsumer
from birkhoff.capture.sinks.dispatcher import Dispatcher
from birkhoff.capture.sinks.result import CaptureRequest
from tests.capture.disks import SoftDisk
def peak():  # not ru_maxrss, which remembers the process that started us
    with open("/proc/self/status") as file:
        return re.search(r"VmHWM:\\s+(\\d+)", file.read())[1]
root, layout, total = sys.argv[1], sys.argv[2], int(sys.argv[3])
files = FilesystemConsumer(root, SoftDisk(), default_layout=layout, shard_max_bytes=4 << 20)
peaks, step, block = [], 50, np.arange(200, dtype=np.float32).reshape(50, 4)
with Dispatcher({"files": files}, overload_policy="block") as dispatcher:
    dispatcher.begin("files", CaptureRequest("a", "a", "run"))
    for start in range(0, total, step):
        labels = np.arange(start, start + step)
        site = ("a", "run", "mhc_attn_post_mix", 0)
        dispatcher.submit(Chunk(*site, block, "float32", (4,), labels, labels, "d" * step, start))
        if (start + step) % (total // 4) == 0:
            peaks.append(peak())
    dispatcher.finish("a", "stop")
    assert dispatcher.result("a", "files", 120).rows == total
peaks.append(peak())
print(*peaks)
"""
    total = scaled(1_000_000, 200_000)
    for layout in ("packed", "sharded"):
        ran = subprocess.run(
            [sys.executable, "-c", code, str(quick_path / layout), layout, str(total)],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert ran.returncode == 0, ran.stderr
        peaks = [int(word) / 1024 for word in ran.stdout.split()]
        print(
            f"{layout}, {total} rows: peak at each quarter and after sealing {[round(p, 1) for p in peaks]} MiB"
        )
        assert peaks[-1] - peaks[0] < 12, (
            "labels of a row alone would be 100 bytes in Python, 100 MB in a million"
        )
