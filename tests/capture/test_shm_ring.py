"""The ring in shared memory: another process reads everything in order; either process may die."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import birkhoff
from birkhoff import Capture
from birkhoff.capture.sinks.chunk import Chunk
from birkhoff.capture.sinks.dispatcher import Dispatcher
from birkhoff.capture.sinks.result import CaptureFinish, CaptureRequest
from birkhoff.capture.sinks.shm_consumer import ShmConsumer
from birkhoff.capture.sinks.shm_ring import HEADER_BYTES, RingReader, RingWriter, encoded
from birkhoff.convert.synth import synth
from birkhoff.errors import CaptureChecksum, CaptureError, CaptureWriteError, OptionError
from tests.capture.reading import described
from tests.capture.sample_chunks import SHAPES, bits, chunk, same_bits, scales, tokens
from tests.cli.conftest import clean_environment
from tests.sizes import scaled


@pytest.fixture
def name():
    chosen = f"birkhoff-test-{uuid.uuid4().hex}"
    yield chosen
    assert not Path("/dev/shm", chosen).exists()  # nothing is left on the machine


class Reading:
    """The reading process."""

    def __init__(self, name: str, pause: float = 0.0):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.capture.reading", name, str(pause)],
            stdout=subprocess.PIPE,
            text=True,
            env=clean_environment(),
        )
        assert self.process.stdout is not None
        self.lines = self.process.stdout

    def opened(self) -> Reading:
        assert self.lines.readline() == "open\n"
        return self

    def listen(self) -> Reading:
        """Read its output while the test writes: a full pipe would block it."""
        self._told: list[str] = []
        self._ear = threading.Thread(target=lambda: self._told.extend(self.lines))
        self._ear.start()
        return self

    def rest(self) -> list[dict]:
        self._ear.join(300)
        assert self.process.wait(300) == 0
        return [json.loads(line) for line in self._told]

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.lines.close()


@pytest.mark.parametrize("max_bytes", [16384, 1 << 20], ids=["tight", "roomy"])
def test_another_process_reads_every_row_in_order(name, max_bytes):
    consumer = ShmConsumer(name, max_bytes, timeout_seconds=60)
    rows = scaled(2000, 200)
    with Reading(name) as reading, Dispatcher({"shm": consumer}, overload_policy="block") as dispatcher:
        reading.opened().listen()
        dispatcher.begin("shm", CaptureRequest("k", "mine", "run", meta={"model": "m"}))
        for start in range(0, rows, 20):
            for hook in SHAPES:
                dispatcher.submit(chunk("k", hook, 3, start, 20))
        dispatcher.finish("k", "length", 4)
        result = dispatcher.result("k", "shm", 300)
        dispatcher.shutdown()
        lines_read = reading.rest()
    assert result.status == "ok" and result.rows == rows * len(SHAPES) and result.keys == len(SHAPES)
    assert lines_read[0] == {"kind": "begin", "request": "k", "id": "mine", "meta": {"model": "m"}}
    assert lines_read[-2] == {"kind": "finish", "request": "k", "dropped": 0, "reason": "length"}
    assert lines_read[-1] == {"kind": "end", "dropped": 0}
    came = dict.fromkeys(SHAPES, 0)
    for line in lines_read[1:-2]:
        start, count, hook = came[line["hook"]], line["rows"], line["hook"]
        assert line == described(chunk("k", hook, 3, start, count)), (hook, start)  # bits, labels and scales
        came[hook] += count
    assert came == dict.fromkeys(SHAPES, rows)


def test_the_writer_waits_for_a_slow_reader(name):
    consumer = ShmConsumer(name, 8192, timeout_seconds=60)
    with (
        Reading(name, pause=0.01) as reading,
        Dispatcher({"shm": consumer}, overload_policy="block") as dispatcher,
    ):
        reading.opened().listen()
        dispatcher.begin("shm", CaptureRequest("k", "k", "run"))
        for start in range(0, 400, 8):
            dispatcher.submit(chunk("k", "mlp_out", 0, start, 8))
        dispatcher.finish("k", "length", 4)
        assert dispatcher.result("k", "shm", 300).status == "ok"
        dispatcher.shutdown()
        lines_read = reading.rest()
    assert sum(line.get("rows", 0) for line in lines_read) == 400 and lines_read[-1]["dropped"] == 0


@pytest.mark.parametrize("overflow", ["drop", "block"])
def test_without_a_reader_the_first_rows_stay_and_the_others_are_counted(name, overflow):
    # Only the first chunk waits: 4 seconds for each of 200 would be longer than a test may take.
    consumer = ShmConsumer(name, 8192, overflow, timeout_seconds=4)
    consumer.begin(CaptureRequest("k", "k", "run"))
    for start in range(0, 2000, 10):
        consumer.submit_chunk(chunk("k", "post_attn", 0, start, 10))
    result = consumer.finalize(CaptureFinish("k", "length", 4)).result(300)
    assert result.status == "partial_error" and result.rows + result.dropped_rows == 2000 and result.rows > 50
    assert "no reader read shared memory" in result.error and name in result.error
    with RingReader(name) as reader:
        assert reader.dropped_rows == result.dropped_rows
        consumer.shutdown()
        chunks = list(reader)
    received = np.concatenate([part.array() for part in chunks])
    assert same_bits(received, bits("k", "post_attn", 0, 0, result.rows))


def test_a_dead_reader_does_not_block_the_writer(name):
    consumer = ShmConsumer(name, 8192, timeout_seconds=900)  # longer than a test may take
    with Reading(name, pause=0.005) as reading:
        reading.opened()
        consumer.submit_chunk(chunk("k", "post_attn", 0, 0, 10))
        reading.lines.readline()
        reading.process.send_signal(signal.SIGKILL)
        reading.process.wait()
    for start in range(10, 2000, 10):
        consumer.submit_chunk(chunk("k", "post_attn", 0, start, 10))
    assert consumer.finalize(CaptureFinish("k")).result(300).status == "partial_error"
    with RingReader(name) as second:  # another reader may continue
        assert isinstance(second.get(1), Chunk)
    consumer.shutdown()


def test_a_reader_is_notified_when_the_writer_dies(name):
    script = """
    import os, sys
    from birkhoff.capture.sinks.result import CaptureFinish
    from birkhoff.capture.sinks.shm_ring import RingWriter, encoded
    RingWriter(sys.argv[1], 4096).put(*encoded(CaptureFinish("k")), 0)
    print("ready", flush=True)
    sys.stdin.read()
    os._exit(9)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=clean_environment(),
    )
    with child:
        assert child.stdout.readline() == b"ready\n"
        with RingReader(name) as reader:
            child.stdin.close()
            assert child.wait(300) == 9
            assert reader.get() == CaptureFinish("k")  # the record is still in the ring
            with pytest.raises(CaptureError, match=f"process {child.pid} that wrote ring"):
                reader.get()
    until = time.monotonic() + 30
    while (
        Path("/dev/shm", name).exists() and time.monotonic() < until
    ):  # Python removes the shared memory of its process
        time.sleep(0.05)


def test_rows_of_an_engine_reach_the_other_process(name, tmp_path):
    synth(tmp_path / "tiny", "tiny")
    with birkhoff.load(tmp_path / "tiny", max_requests=2, cache_bytes=2**24, batch_invariant=True) as engine:
        engine.add_consumer("train", ShmConsumer(name))
        with Reading(name) as reading:
            reading.opened().listen()
            spec, greedy = Capture({"mlp_out": [0, 1]}, positions="all"), {"max_tokens": 6, "temperature": 0}
            local = engine.generate("shared rows", **greedy, capture=spec)
            sent = engine.generate("shared rows", **greedy, capture={"train": spec.to_json()})
            engine.close()
            lines_read = reading.rest()
    result = sent.capture_results["train"]
    assert result.status == "ok" and result.rows == sum(len(rows) for rows in local.acts.values())
    for layer in (0, 1):
        lines = [line for line in lines_read if line.get("layer") == layer]
        rows = local.acts["mlp_out", layer]
        assert tuple(p for line in lines for p in line["positions"]) == rows.positions
        assert tuple(t for line in lines for t in line["token_ids"]) == rows.token_ids
        data = rows.tensor.numpy()
        for line in lines:
            part = data[line["offset"] : line["offset"] + line["rows"]]
            assert line["sha256"] == hashlib.sha256(part.tobytes()).hexdigest()


@settings(max_examples=scaled(300, 40), deadline=None)
@given(
    moves=st.lists(st.one_of(st.integers(1, 900), st.just("take")), max_size=60),
    max_bytes=st.integers(4096, 5000),
)
def test_a_ring_is_a_queue_with_an_end(moves, max_bytes):
    """Against a list: accepted records come out in order, and a record is refused only if there is no space."""
    name = f"birkhoff-test-{uuid.uuid4().hex}"
    writer, expected = RingWriter(name, max_bytes), []
    try:
        with RingReader(name) as reader:
            for index, move in enumerate(moves):
                if move == "take":
                    if expected:
                        assert described(reader.get(0)) == expected.pop(0)
                    else:
                        with pytest.raises(TimeoutError):
                            reader.get(0)
                    continue
                record = chunk(f"r{index}", "mlp_in", 1, index, max(move // 60, 1))
                if writer.put(*encoded(record), 0):
                    expected.append(described(record))
                else:
                    assert expected  # an empty ring takes anything that is not refused
            for line in expected:
                assert described(reader.get(0)) == line
    finally:
        writer.close()


def test_changed_bytes_are_detected(name):
    for offset in (0, 5, 9, 20, 60, 200):
        writer = RingWriter(name, 4096)
        try:
            with RingReader(name) as reader:
                writer.put(*encoded(chunk("k", "post_attn", 0, 0, 10)), 0)
                with Path("/dev/shm", name).open("r+b") as file:
                    file.seek(HEADER_BYTES + offset)
                    (before,) = file.read(1)
                    file.seek(HEADER_BYTES + offset)
                    file.write(bytes([before ^ 0x55]))
                with pytest.raises(CaptureChecksum):
                    reader.get(0)
        finally:
            writer.close()


def test_invalid_options_are_refused(name, tmp_path):
    for bad in ("", "a/b", "../x", ".hidden", 3, "x" * 300):
        with pytest.raises(OptionError, match="name is"):
            ShmConsumer(bad)
        with pytest.raises(OptionError, match="name is"):
            RingReader(bad)
    for fields, words in (
        ({"max_bytes": 100}, "from 4096 to"),
        ({"max_bytes": True}, "from 4096 to"),
        ({"overflow": "spill"}, "block or drop"),
        ({"timeout_seconds": -1}, "a number from 0"),
    ):
        with pytest.raises(OptionError, match=words):
            ShmConsumer(name, **fields)
    with pytest.raises(CaptureWriteError, match="Ask for less"):
        RingWriter(name, 1 << 40)
    with pytest.raises(CaptureError, match="there is no ring"):
        RingReader(name)
    writer = RingWriter(name, 4096)
    with pytest.raises(OptionError, match="is there already"):
        RingWriter(name, 4096)
    with pytest.raises(CaptureWriteError, match="Raise max_bytes to"):
        writer.put({"kind": "chunk"}, bytes(4000), 0)
    with RingReader(name) as reader:
        with pytest.raises(CaptureError, match="One reader at a time"):
            RingReader(name)
    with pytest.raises(CaptureError, match="is closed"):
        reader.get()
    writer.close()
    for content in (b"", b"short", bytes(8192)):
        path = Path("/dev/shm", name)
        path.write_bytes(content)
        with pytest.raises(CaptureError, match=r"not a ring|there is no ring"):
            RingReader(name)
        path.unlink()


def test_a_chunk_larger_than_the_ring_goes_through_in_parts(name):
    consumer = ShmConsumer(name, 4096, timeout_seconds=30)
    whole = chunk("k", "mlp_in", 0, 0, 500)
    with RingReader(name) as reader:
        sender = threading.Thread(target=lambda: (consumer.submit_chunk(whole), consumer.shutdown()))
        sender.start()
        parts = list(reader)
        sender.join()
    assert len(parts) > 4 and [part.row_offset for part in parts] == [part.positions[0] for part in parts]
    assert same_bits(np.concatenate([part.array() for part in parts]), bits("k", "mlp_in", 0, 0, 500))
    assert same_bits(np.concatenate([part.scales() for part in parts]), scales("k", 0, 500))
    assert [t for part in parts for t in part.token_ids] == tokens("k", 0, 500)
