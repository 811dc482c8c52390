"""Failing disks: a failed capture is reported, leaves nothing behind, and the next one works."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from birkhoff.capture.sinks.chunk import Chunk
from birkhoff.capture.sinks.dispatcher import Dispatcher
from birkhoff.capture.sinks.filesystem import FilesystemConsumer
from birkhoff.capture.sinks.result import CaptureFinish, CaptureRequest
from birkhoff.capture.store.file_options import FileOptions
from birkhoff.capture.store.reader import read_request, read_sharded
from birkhoff.capture.store.repair import repair
from birkhoff.capture.store.writer import CaptureWriter
from birkhoff.errors import CaptureLocked, CaptureWriteError
from tests.capture.disks import FaultyDisk, SoftDisk
from tests.capture.sample_chunks import RecordingConsumer, assert_is_prefix, chunk

LAYOUTS = ("packed", "per_file", "sharded")
SITES = [("post_attn", 0), ("mhc_attn_res_mix", 1)]


def capture(files: CaptureWriter, request: str, rows: int = 4):
    for start in range(0, rows, 2):
        for hook, layer in SITES:
            files.append(chunk(request, hook, layer, start, 2))
    return files.finish(CaptureFinish(request, "stop")).result(300)


def entries_of(root: Path, layout: str, request: str) -> dict:
    if layout == "sharded":
        return read_sharded(root / "run").get(request, {}) if (root / "run").exists() else {}
    directory = root / "run" / request
    return read_request(directory) if any(directory.glob("*.json")) else {}


def whole(root: Path, layout: str, request: str, rows: int = 4) -> bool:
    entries = entries_of(root, layout, request)
    for entry in entries.values():
        assert_is_prefix(entry, request)
    return len(entries) == len(SITES) and all(len(entry.array) == rows for entry in entries.values())


class Once:
    """Fails the n-th call of one kind, once."""

    def __init__(self, call: str, skip: int, error: int):
        self.call, self.left, self.error, self.fired = call, skip, error, False
        self.armed = False

    def __call__(self, call: str, path: str) -> int | None:
        if not self.armed or self.fired or call != self.call:
            return None
        self.left -= 1
        if self.left >= 0:
            return None
        self.fired = True
        return self.error


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("open", errno.ENOSPC),
        ("open", errno.EMFILE),
        ("write", errno.ENOSPC),
        ("write", errno.EIO),
        ("fsync", errno.EIO),
        ("sync_directory", errno.EIO),
        ("rename", errno.EROFS),
        ("rename", errno.EACCES),
        ("mkdir", errno.EDQUOT),
        ("unlink", errno.EPERM),
    ],
)
def test_one_failure_anywhere(quick_path, layout, call, error):
    """Fail the first, second, third... call of a kind: the request fails or is complete; others are unaffected."""
    fired, errors = 0, 0
    for skip in range(40):
        root = quick_path / str(skip)
        fault = Once(call, skip, error)
        disk = FaultyDisk(fault)
        options = FileOptions(root, default_layout=layout, coalesce_max_bytes=0, num_shards=1)
        with CaptureWriter(options, disk) as files:
            assert capture(files, "before").status == "ok"
            files.seal()  # a shard must be opened, like the files of the other layouts
            fault.armed = True
            during = capture(files, "during")
            files.seal()
            fault.armed = False
            after = capture(files, "after")
        if not fault.fired:
            break
        fired += 1
        assert after.status == "ok" and whole(root, layout, "after") and whole(root, layout, "before")
        assert during.status in ("ok", "error")
        if during.status == "ok":
            assert whole(root, layout, "during")
        else:
            errors += 1
            assert during.error and not entries_of(root, layout, "during"), (
                "nothing of a failed capture is visible"
            )
        assert disk.synced_after_failure == [], "a descriptor whose sync failed is not synced again"
        report = repair(root, SoftDisk())
        assert not report.failed and whole(root, layout, "before") and whole(root, layout, "after")
        assert not list(root.rglob("*.journal")) and not list(root.rglob("*.tmp"))
    if layout == "sharded" and call == "rename":
        assert (
            fired >= 1 and errors == 0
        )  # an acknowledged request stays acknowledged if sealing its shard fails
    else:
        assert fired >= 1 and (errors >= 1 or call == "unlink")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_disk_that_is_full_for_a_while(quick_path, layout):
    full = [False]
    disk = FaultyDisk(
        lambda call, path: errno.ENOSPC if full[0] and call in ("open", "write", "mkdir") else None
    )
    with CaptureWriter(
        FileOptions(quick_path, default_layout=layout, num_shards=1, coalesce_max_bytes=0), disk
    ) as files:
        assert capture(files, "before").status == "ok"
        full[0] = True
        for index in range(5):
            result = capture(files, f"lost{index}")
            assert result.status == "error" and os.strerror(errno.ENOSPC) in result.error
        full[0] = False
        for index in range(5):
            assert capture(files, f"kept{index}").status == "ok"
    assert whole(quick_path, layout, "before") and all(
        whole(quick_path, layout, f"kept{index}") for index in range(5)
    )
    assert not any(entries_of(quick_path, layout, f"lost{index}") for index in range(5))
    assert not list(quick_path.rglob("*.tmp")) and not list(quick_path.rglob("*.journal"))


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of one mebibyte, if the system allows it."""
    directory = tmp_path / "small"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(directory)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs; the injected ENOSPC above covers the same path")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_real_disk_that_is_full(small_disk, layout):
    """Fill the disk, see the error, free space, continue. What was acknowledged survives."""
    root = small_disk / "root"
    with CaptureWriter(FileOptions(root, default_layout=layout, num_shards=1)) as files:
        assert capture(files, "before").status == "ok"
        ballast = small_disk / "ballast"
        with open(ballast, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
        big = np.zeros((600, 256), np.float32)
        files.append(
            Chunk("big", "run", "post_attn", 0, big, "float32", (256,), range(600), range(600), "p" * 600)
        )
        result = files.finish(CaptureFinish("big")).result(300)
        assert result.status == "error" and "No space left" in result.error
        ballast.unlink()
        assert capture(files, "after").status == "ok"
    assert whole(root, layout, "before") and whole(root, layout, "after")
    assert not entries_of(root, layout, "big") and not list(root.rglob("*.tmp"))


def test_a_real_disk_that_is_read_only(small_disk):
    """Writers and repairs are refused with a reason, readers are not."""
    root = small_disk / "root"
    with CaptureWriter(FileOptions(root)) as files:
        assert capture(files, "before").status == "ok"
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CaptureWriteError, match="Read-only"):
        CaptureWriter(FileOptions(root))
    with pytest.raises(CaptureWriteError, match="Read-only"):
        CaptureWriter(FileOptions(small_disk / "other"))
    with pytest.raises(CaptureWriteError, match="Read-only"):
        repair(root)
    assert whole(root, "packed", "before")
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    with CaptureWriter(FileOptions(root)) as files:
        assert capture(files, "after").status == "ok"
    assert whole(root, "packed", "after")


def test_a_root_that_cannot_be_created_is_refused_by_name(quick_path):
    (quick_path / "file").write_text("x")
    with pytest.raises(CaptureWriteError, match=r"file.* cannot be written|cannot be written to .*file"):
        CaptureWriter(FileOptions(quick_path / "file" / "root"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("short", [1, 7, 100])
def test_short_writes_are_continued(quick_path, layout, short):
    with CaptureWriter(FileOptions(quick_path, default_layout=layout), FaultyDisk(short=short)) as files:
        assert capture(files, "a", 8).status == "ok"
    assert whole(quick_path, layout, "a", 8)


def test_writes_of_zero_bytes_are_an_error_not_a_loop(quick_path):
    class Deaf(SoftDisk):
        deaf = False

        def write(self, file: int, data: memoryview, offset: int) -> int:
            return 0 if self.deaf else super().write(file, data, offset)

    disk = Deaf()
    with CaptureWriter(FileOptions(quick_path), disk) as files:
        disk.deaf = True
        assert capture(files, "a").status == "error"
        disk.deaf = False
        assert capture(files, "b").status == "ok"


@pytest.mark.parametrize("marked", [True, False])
def test_a_failed_sync_of_a_shared_shard_saves_what_was_acknowledged(quick_path, marked):
    """The shard is put aside and copied: earlier requests stay, waiting ones fail, the next uses another shard."""
    fault = Once("fsync", 0, errno.EIO)

    def no_mark(call: str, path: str) -> int | None:  # writing the mark for a later repair may fail too
        return errno.EIO if path.endswith(".poison") and call == "open" else fault(call, path)

    disk = FaultyDisk(fault if marked else no_mark)
    with CaptureWriter(FileOptions(quick_path, default_layout="sharded", num_shards=1), disk) as files:
        for index in range(3):
            assert capture(files, f"early{index}").status == "ok"
        (payload,) = quick_path.rglob("*.bin.tmp")
        inode = payload.stat().st_ino
        descriptor = os.open(payload, os.O_RDONLY)  # so that its inode number is not reused
        fault.armed = True
        assert capture(files, "lost").status == "error"
        assert capture(files, "late").status == "ok"
    os.close(descriptor)
    assert disk.synced_after_failure == []
    requests = read_sharded(quick_path / "run")
    assert set(requests) == {"early0", "early1", "early2", "late"}
    for request in requests:
        assert whole(quick_path, "sharded", request)
    first = quick_path / "run/shard-000-000000.bin"
    assert first.stat().st_ino != inode, "its pages may exist in memory only, so they are written anew"


def test_a_request_that_lost_a_shard_is_not_marked_complete_by_a_later_shard(quick_path):
    """Its rows were in a shard whose sync fails, its end in the next one, and both wait for the same round."""
    gate = threading.Event()
    gate.set()

    class Disk(SoftDisk):
        def fsync(self, file: int) -> None:
            assert gate.wait(300)
            if self.path(file).endswith("shard-000-000000.bin.tmp"):
                raise OSError(errno.EIO, "bad sector")

    options = FileOptions(
        quick_path, default_layout="sharded", num_shards=1, coalesce_max_bytes=0, shard_max_bytes=64
    )
    with CaptureWriter(options, Disk()) as files:
        gate.clear()
        files.begin(CaptureRequest("holdup", "holdup", "run", "packed"))
        files.finish(CaptureFinish("holdup"))  # the committer is busy with this one while the other finishes
        for start in range(0, 6, 2):
            files.append(chunk("a", "post_attn", 0, start, 2))
        future = files.finish(CaptureFinish("a"))
        gate.set()
        assert future.result(300).status == "error"
    listed = [json.loads(path.read_text())["requests"] for path in quick_path.rglob("shard-*.json")]
    assert listed and not any(requests.get("a", {}).get("complete") for requests in listed)
    entries = read_sharded(quick_path / "run").get("a", {})
    assert all(entry.meta["complete"] is False for entry in entries.values())


def test_a_shard_that_cannot_be_saved_waits_for_space(quick_path):
    """Acknowledged rows are on disk; if sealing fails they wait for the end of the writer or a repair."""
    broken = [False]
    disk = FaultyDisk(lambda call, path: errno.ENOSPC if broken[0] and call in ("open", "write") else None)
    options = FileOptions(quick_path / "root", default_layout="sharded", num_shards=1)
    files = CaptureWriter(options, disk)
    assert capture(files, "early").status == "ok"
    broken[0] = True
    assert capture(files, "lost").status == "error"
    shutil.copytree(quick_path / "root", quick_path / "crash")
    broken[0] = False
    files.close()
    assert set(read_sharded(quick_path / "root/run")) == {"early"}
    repair(quick_path / "crash", SoftDisk())
    assert whole(quick_path / "crash", "sharded", "early")


def test_two_writers_on_one_root_are_refused_at_once(quick_path):
    with CaptureWriter(FileOptions(quick_path)) as files:
        waits = []
        for _ in range(5):
            started = time.perf_counter()
            with pytest.raises(CaptureLocked, match=rf"pid {os.getpid()}"):
                CaptureWriter(FileOptions(quick_path))
            with pytest.raises(CaptureLocked, match="being written"):
                repair(quick_path)
            waits.append(time.perf_counter() - started)
        assert min(waits) < 3  # the best of several: the machine may be busy
        assert capture(files, "a").status == "ok"
        code = (
            "import sys, time\nfrom birkhoff.capture.store.writer import *\nfrom birkhoff.errors import CaptureLocked\n"
            "def once():\n start = time.perf_counter()\n try: CaptureWriter(FileOptions(sys.argv[1]))\n"
            " except CaptureLocked: return time.perf_counter() - start\nprint(min(once() for _ in range(5)))"
        )
        other = subprocess.run(
            [sys.executable, "-c", code, str(quick_path)],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert float(other.stdout) < 3, other.stderr
    with CaptureWriter(FileOptions(quick_path)) as files:
        assert capture(files, "b").status == "ok"
    assert whole(quick_path, "packed", "a") and whole(quick_path, "packed", "b")


def test_the_lock_of_a_dead_writer_is_free(quick_path):
    code = (
        "import os, sys\nfrom birkhoff.capture.store.writer import *\n"
        "CaptureWriter(FileOptions(sys.argv[1]))\nos._exit(9)"
    )
    died = subprocess.run([sys.executable, "-c", code, str(quick_path)], cwd=Path(__file__).parents[2])
    assert died.returncode == 9
    with CaptureWriter(FileOptions(quick_path)) as files:
        assert files.repaired is not None and capture(files, "a").status == "ok"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_descriptor_or_thread_is_left_behind(quick_path, layout):
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before, threads = descriptors(), threading.active_count()
    for index in range(3):
        fault = Once("write", 2 + index, errno.EIO)
        with CaptureWriter(
            FileOptions(quick_path / str(index), default_layout=layout, num_shards=2), FaultyDisk(fault)
        ) as files:
            capture(files, "a")
            fault.armed = True
            capture(files, "b")
            capture(files, "c")
    assert descriptors() == before and threading.active_count() == threads


def test_a_clock_that_goes_back_changes_nothing(quick_path, monkeypatch):
    """Times are recorded and never compared."""
    for index, now in enumerate((2e9, 1e9, 0.0)):
        monkeypatch.setattr(time, "gmtime", lambda seconds=None, now=now: time.localtime(now))
        with CaptureWriter(
            FileOptions(quick_path, default_layout="sharded", num_shards=1), SoftDisk()
        ) as files:
            assert capture(files, f"r{index}").status == "ok"
    assert set(read_sharded(quick_path / "run")) == {"r0", "r1", "r2"}


def test_a_failing_disk_never_reaches_the_engine(quick_path):
    """Through the dispatcher, as the engine calls it: nothing raises, and the other consumer receives all rows."""
    bad = [False]
    disk = FaultyDisk(lambda call, path: errno.EIO if bad[0] else None)
    memory = RecordingConsumer()
    consumers = {"files": FilesystemConsumer(str(quick_path), disk, coalesce_max_bytes=0), "memory": memory}
    with Dispatcher(consumers) as dispatcher:
        for index in range(6):
            bad[0] = index in (2, 3)
            name = f"r{index}"
            for consumer in consumers:
                key = f"{name}-{consumer}"
                dispatcher.begin(consumer, CaptureRequest(key, name, "run"))
                dispatcher.submit(replace(chunk(name, "post_attn", 0, 0, 4), request_id=key))
                dispatcher.finish(key, "stop", 4)
            written = dispatcher.result(f"{name}-files", "files", timeout=300)
            assert written.status == ("error" if bad[0] else "ok")
            assert dispatcher.result(f"{name}-memory", "memory", timeout=300).status == "ok"
            assert_is_prefix(memory.entries(f"{name}-memory")["post_attn", 0], name, 4)
        bad[0] = False
    assert [path.name for path in sorted((quick_path / "run").iterdir()) if any(path.iterdir())] == [
        "r0",
        "r1",
        "r4",
        "r5",
    ]
