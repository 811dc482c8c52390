"""Repair of what a dead writer leaves: torn tails, kills, interrupted repairs, poisoned files."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from birkhoff.capture.sinks.chunk import Chunk
from birkhoff.capture.sinks.result import CaptureFinish, CaptureRequest
from birkhoff.capture.store.file_options import FileOptions
from birkhoff.capture.store.journal import Journal
from birkhoff.capture.store.reader import read_request, read_sharded
from birkhoff.capture.store.repair import repair
from birkhoff.capture.store.writer import CaptureWriter
from birkhoff.errors import CaptureFileError
from tests.capture.disks import SoftDisk, Stopped, StoppingDisk
from tests.capture.sample_chunks import assert_is_prefix, bits, chunk, same_bits
from tests.capture.victim import SITES as VICTIM_SITES
from tests.sizes import scaled

LAYOUTS = ("packed", "per_file", "sharded")


def left_by_a_crash(
    target: Path, layout: str, steps: int = 4, acknowledged: tuple[str, ...] = ("z",), **options
) -> None:
    """The files of a writer that died: request `a` in the middle of its rows, others finished and acknowledged."""
    source = target.with_name(target.name + "-live")
    defaults = {"default_layout": layout, "coalesce_max_bytes": 0, "num_shards": 1}
    files = CaptureWriter(FileOptions(source, **{**defaults, **options}), SoftDisk())
    for name in acknowledged:
        files.append(chunk(name, "post_attn", 0, 0, 3))
        assert files.finish(CaptureFinish(name)).result(300).status == "ok"
    for step in range(steps):
        files.append(chunk("a", "post_attn", 0, step, 1))
        files.append(chunk("a", "mhc_attn_res_mix", 1, step, 1))
    shutil.copytree(source, target)
    files.close()
    shutil.rmtree(source)


def rows_of(root: Path, layout: str, request: str) -> dict:
    if layout == "sharded":
        return read_sharded(root / "run").get(request, {})
    directory = root / "run" / request
    return read_request(directory) if any(directory.glob("*.json")) else {}


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def restore(root: Path, files: dict[str, bytes]) -> None:
    for path in sorted(root.rglob("*"), reverse=True):
        if path.is_file() and str(path.relative_to(root)) not in files:
            path.unlink()
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_interrupted_request_keeps_its_beginning(quick_path, layout):
    root = quick_path / "root"
    left_by_a_crash(root, layout)
    assert not rows_of(root, layout, "a")
    report = repair(root, SoftDisk())
    assert report.sealed and not report.failed and report.dropped_records == 0
    for entry in rows_of(root, layout, "a").values():
        assert_is_prefix(entry, "a", 4)
        assert entry.meta["complete"] is False
    (entry,) = rows_of(root, layout, "z").values()
    assert_is_prefix(entry, "z", 3)
    assert entry.meta["complete"] is True
    before = tree(root)
    again = repair(root, SoftDisk())
    assert tree(root) == before and not again.sealed and not again.removed


@pytest.mark.parametrize("damage", ["truncate", "zero"])
@pytest.mark.parametrize("target", ["payload", "journal"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_torn_tail_at_every_byte_of_the_last_three_records(quick_path, layout, target, damage):
    """Cut or blank the file from every byte on: complete records before it are kept, and none is ever wrong."""
    root = quick_path / "root"
    left_by_a_crash(root, layout)
    saved = tree(root)
    (journal,) = [name for name in saved if name.endswith(".journal")]
    lines = saved[journal].splitlines(keepends=True)
    entries = [json.loads(line.split(b" ", 2)[2]) for line in lines if line[9:].startswith(b"entry ")]
    journal_stem = Path(journal).name.removesuffix(".journal")
    ends = np.cumsum([len(line) for line in lines])[
        -len(entries) :
    ]  # of the journal's lines: entries come last
    if target == "journal":
        name, first = journal, int(ends[-4])
    else:  # the payload of the last record; in a per_file capture that is a separate file
        stem = entries[-1].get("file", journal_stem)
        name = str(Path(journal).with_name(f"{stem}.bin.tmp"))
        first = [entry for entry in entries if entry.get("file", journal_stem) == stem][-3]["offset"]
    size, kept_counts = len(saved[name]), set()
    for cut in range(first, size):
        restore(root, saved)
        (root / name).write_bytes(saved[name][:cut] + (bytes(size - cut) if damage == "zero" else b""))
        assert not repair(root, SoftDisk()).failed
        whole = 0  # records of `a` before the first one that the tear reaches
        for entry, end in zip(entries, ends):
            torn = (
                end > cut
                if target == "journal"
                else entry.get("file", journal_stem) == stem and entry["offset"] + entry["nbytes"] > cut
            )
            if torn:
                break
            whole += entry.get("request_id", "a") == "a"
        entries_read = rows_of(root, layout, "a")
        for entry in entries_read.values():
            assert_is_prefix(entry, "a")
            assert entry.meta["complete"] is False
        num_rows = sum(len(entry.array) for entry in entries_read.values())
        assert num_rows == whole or (damage == "zero" and num_rows > whole), (
            f"cut at {cut}"
        )  # bytes that were zero anyway
        kept_counts.add(num_rows)
        (entry,) = rows_of(root, layout, "z").values()
        assert_is_prefix(entry, "z", 3)
    assert len(kept_counts) >= 3, "the tear moved through records"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ended", [False, True])
def test_a_repair_that_is_killed_can_be_repeated(quick_path, layout, ended):
    """Stop before every call that changes something; the next repair has the result of an uninterrupted one."""
    root = quick_path / "root"
    left_by_a_crash(root, layout)
    if ended:  # a torn tail as well
        for payload in root.rglob("*.bin.tmp"):
            os.truncate(payload, payload.stat().st_size - 1)
    saved = tree(root)
    repair(root, SoftDisk())
    expected = {name: data for name, data in tree(root).items() if name != ".lock"}
    for stop in range(10_000):
        restore(root, saved)
        try:
            repair(root, StoppingDisk(stop))
            break
        except Stopped:
            pass
        for sidecar in root.rglob("*.json"):
            assert sidecar.with_suffix(".bin").exists(), "a sidecar implies its payload, at every instant"
        repair(root, SoftDisk())
        assert {name: data for name, data in tree(root).items() if name != ".lock"} == expected, (
            f"stopped at {stop}"
        )
    assert stop > 5


@pytest.mark.parametrize("layout", ("packed", "per_file"))
def test_a_replacement_that_never_finished_does_not_replace(quick_path, layout):
    root = quick_path / "root"
    with CaptureWriter(FileOptions(root, default_layout=layout), SoftDisk()) as files:
        files.append(chunk("a", "mlp_out", 0, 0, 3))
        files.finish(CaptureFinish("a")).result(300)
    files = CaptureWriter(
        FileOptions(root, default_layout=layout, on_collision="overwrite", coalesce_max_bytes=0), SoftDisk()
    )
    files.begin(CaptureRequest("new", "a", "run"))
    files.append(chunk("new", "post_attn", 0, 0, 3))
    shutil.copytree(root, quick_path / "crash")
    files.close()
    report = repair(quick_path / "crash", SoftDisk())
    assert report.removed and not report.sealed
    (entry,) = read_request(quick_path / "crash/run/a").values()
    assert_is_prefix(entry, "a", 3)
    assert len(os.listdir(quick_path / "crash/run/a")) == 2


@pytest.mark.parametrize("layout", ("packed", "per_file"))
def test_a_replacement_stopped_at_any_call_is_old_or_new(quick_path, layout):
    """Kill the writer while it replaces a capture: after the repair there is one complete capture, never a mixture."""
    root, seen = quick_path / "root", set()
    for stop in range(10_000):
        shutil.rmtree(root, ignore_errors=True)
        with CaptureWriter(FileOptions(root, default_layout=layout), SoftDisk()) as files:
            for hook in ("mlp_out", "post_attn"):
                files.append(chunk("old", hook, 0, 0, 3))
            files.begin(CaptureRequest("x", "x", "run"))
            files.finish(CaptureFinish("old")).result(300)
            files.finish(CaptureFinish("x")).result(300)
        os.rename(root / "run/old", root / "run/a")
        for sidecar in (root / "run/a").glob("*.json"):
            sidecar.write_text(sidecar.read_text().replace('"request_id": "old"', '"request_id": "a"'))
        snapshots = Snapshots(root, quick_path / "crash", stop)
        options = FileOptions(root, default_layout=layout, on_collision="overwrite", coalesce_max_bytes=0)
        with CaptureWriter(options, snapshots) as files:
            files.begin(CaptureRequest("new", "a", "run"))
            for hook in ("post_attn", "mlp_in"):
                files.append(chunk("new", hook, 0, 0, 3))
            assert files.finish(CaptureFinish("new")).result(300).status == "ok"
        if not (quick_path / "crash").exists():
            break
        assert not repair(quick_path / "crash", SoftDisk()).failed
        entries = read_request(quick_path / "crash/run/a")
        kinds = {hook for hook, _ in entries}
        key = "old" if "mlp_out" in kinds else "new"
        assert kinds == ({"mlp_out", "post_attn"} if key == "old" else {"post_attn", "mlp_in"})
        for entry in entries.values():
            assert_is_prefix(entry, key, 3)
        seen.add(key)
        shutil.rmtree(quick_path / "crash")
    assert seen == {"old", "new"} and stop > 10


class Snapshots(SoftDisk):
    """Copies the root before the n-th call: the state that a kill at that instant leaves."""

    def __init__(self, root: Path, target: Path, index: int):
        super().__init__()
        self._root, self._target, self._index = root, target, index

    def note(self, call: str, path: str) -> None:
        super().note(call, path)
        if sum(self.calls.values()) == self._index + 1:
            shutil.copytree(self._root, self._target)


def test_kill_nine_at_a_random_instant(tmp_path):
    """Kill a real process without warning: every acknowledged request exists, and nothing is wrong."""
    kills, total, repaired_bytes = scaled(25, 4), 0, 0
    for kill in range(kills):
        root = tmp_path / str(kill)
        chance = random.Random(kill)
        victim = subprocess.Popen(
            [sys.executable, "-m", "tests.capture.victim", str(root), str(kill)],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            text=True,
        )
        assert victim.stdout is not None
        lines = [victim.stdout.readline()]  # it has begun
        time.sleep(chance.uniform(0.02, 0.5))
        os.kill(victim.pid, signal.SIGKILL)
        lines += victim.stdout.read().splitlines(keepends=True)
        victim.stdout.close()
        victim.wait()
        lines_read = [json.loads(line) for line in lines if line.endswith("\n")]
        assert lines_read and all(line["status"] == "ok" for line in lines_read), lines_read
        with CaptureWriter(FileOptions(root)) as files:  # opening repairs
            assert files.repaired is not None and not files.repaired.failed
            repaired_bytes += files.repaired.checked_bytes
        sharded = read_sharded(root / "run")
        for line in lines_read:
            request = line["request"]
            entries = (
                sharded[request] if line["layout"] == "sharded" else read_request(root / "run" / request)
            )
            assert set(entries) == set(VICTIM_SITES)
            for entry in entries.values():
                assert_is_prefix(entry, request, line["rows"])
                assert entry.meta["complete"] is True
        named = {line["request"] for line in lines_read}
        others = {
            path.name: read_request(path) for path in (root / "run").iterdir() if any(path.glob("*.json"))
        }
        for request, entries in {**others, **sharded}.items():
            for entry in entries.values():
                assert_is_prefix(entry, request)  # unacknowledged rows may be there; wrong ones may not
        total += len(named)
    print(
        f"{kills} kills, {total} acknowledged requests, all there; {repaired_bytes} bytes checked by repairs"
    )


def test_opening_a_root_that_was_closed_does_not_search_it(quick_path):
    with CaptureWriter(FileOptions(quick_path), SoftDisk()) as files:
        assert files.repaired is not None  # a new root has no note yet
        files.append(chunk("a", "post_attn", 0, 0, 2))
        files.finish(CaptureFinish("a")).result(300)
    with CaptureWriter(FileOptions(quick_path), SoftDisk()) as files:
        assert files.repaired is None
    left_by_a_crash(quick_path / "b", "packed")
    with CaptureWriter(FileOptions(quick_path / "b"), SoftDisk()) as files:
        assert files.repaired is not None and files.repaired.sealed == ["run/a/packed.bin"]


def test_a_damaged_record_in_an_open_shard_costs_its_request_only(quick_path):
    """Bits rot before a shard is sealed: other requests in it, acknowledged later, stay."""
    root = quick_path / "root"
    left_by_a_crash(root, "sharded", acknowledged=("x", "y", "z"))
    (payload,) = root.rglob("*.bin.tmp")
    raw = bytearray(payload.read_bytes())
    raw[2] ^= 1  # the first record, of x
    payload.write_bytes(raw)
    report = repair(root, SoftDisk())
    assert report.dropped_records == 1
    entries_read = read_sharded(root / "run")
    assert set(entries_read) == {"a", "y", "z"}
    for request, rows in (("a", 4), ("y", 3), ("z", 3)):
        for entry in entries_read[request].values():
            assert_is_prefix(entry, request, rows)


def test_invalid_journals_are_refused_by_name(quick_path):
    """Nonsense with correct checksums: reported, left unchanged, and other files are unaffected."""
    root = quick_path / "root"
    left_by_a_crash(root, "packed")
    header = {"layout": "packed", "write_id": "0" * 32, "request_id": "q", "stem": "packed", "replace": False}
    invalid_journals = [
        [("open", {"layout": "zip", "write_id": "0" * 32})],
        [("open", header), ("entry", {"offset": -1, "nbytes": 4, "crc32": 0})],
        [("open", header), ("entry", {"offset": 0, "nbytes": 10**400, "crc32": 0})],
        [("open", header), ("entry", {})],
        [("entry", {"offset": 0, "nbytes": 0, "crc32": 0})],
        [
            ("open", {**header, "layout": "per_file"}),
            ("entry", {"file": "../../../x", "offset": 0, "nbytes": 0}),
        ],
        [("open", header), ("finish", {"request_id": []})],
        [("open", [])],
    ]
    for index, lines in enumerate(invalid_journals):
        directory = root / "run" / f"bad{index}"
        directory.mkdir()
        journal = Journal(SoftDisk(), str(directory / "packed.journal"))
        for kind, body in lines:
            journal.add(kind, body)
        journal.flush()
        journal.close()
    report = repair(root, SoftDisk())
    assert sorted(report.failed) == [
        f"run/bad{index}/packed.journal" for index in range(len(invalid_journals))
    ]
    assert all("not a capture journal" in reason for reason in report.failed.values())
    for entry in rows_of(root, "packed", "a").values():
        assert_is_prefix(entry, "a", 4)
    assert not (quick_path / "x").exists()


def test_random_bytes_in_a_journal_never_give_wrong_rows(quick_path):
    """Mutated journals and payloads: a prefix of the written rows, or nothing."""
    for layout in LAYOUTS:
        root = quick_path / layout
        left_by_a_crash(root, layout)
        saved = tree(root)
        names = [name for name in saved if name.endswith((".journal", ".tmp"))]
        chance = random.Random(layout)
        for _ in range(scaled(2000, 100)):
            restore(root, saved)
            name = chance.choice(names)
            raw = bytearray(saved[name])
            for _ in range(chance.randint(1, 3)):
                offset = chance.randrange(len(raw))
                raw[offset : offset + chance.randint(0, 3)] = chance.randbytes(chance.randint(0, 4))
            (root / name).write_bytes(raw)
            assert not repair(root, SoftDisk()).failed
            for entry in rows_of(root, layout, "a").values():
                assert_is_prefix(entry, "a")


def test_files_without_a_journal_are_cleared_away(quick_path):
    directory = quick_path / "run/a"
    directory.mkdir(parents=True)
    for name in ("packed.bin.tmp", "packed.json.tmp", "notes.txt", "packed.poison"):
        (directory / name).write_text("x")
    report = repair(quick_path, SoftDisk())
    assert sorted(report.removed) == ["run/a/packed.bin.tmp", "run/a/packed.json.tmp", "run/a/packed.poison"]
    assert os.listdir(directory) == ["notes.txt"]
    with pytest.raises(CaptureFileError, match="not a directory"):
        repair(quick_path / "nowhere", SoftDisk())


def test_the_repair_keeps_up_with_a_gigabyte_a_second_or_so(quick_path):
    """Checking and sealing are one pass over the payload: the time per byte is that of reading and summing."""
    rows, width = scaled(65536, 8192), 2048
    files = CaptureWriter(
        FileOptions(quick_path / "live", default_layout="sharded", num_shards=1, shard_max_bytes=1 << 30),
        SoftDisk(),
    )
    block = np.arange(256 * width, dtype=np.uint16).reshape(256, width)
    for start in range(0, rows, 256):
        files.append(
            Chunk(
                "a",
                "run",
                "post_attn",
                0,
                block,
                "bfloat16",
                (width,),
                range(start, start + 256),
                range(256),
                "p" * 256,
                start,
            )
        )
    assert files.finish(CaptureFinish("a")).result(300).status == "ok"
    shutil.copytree(quick_path / "live", quick_path / "crash")
    files.close()
    report = repair(quick_path / "crash", SoftDisk())
    assert report.checked_bytes == rows * width * 2
    rate = report.checked_bytes / report.seconds
    print(f"repair: {report.checked_bytes >> 20} MiB in {report.seconds:.3f} s, {rate / 2**30:.2f} GiB/s")
    assert rate > 2**30 / 5  # a fifth of the goal: this machine may be busy
    entry = read_sharded(quick_path / "crash/run")["a"]["post_attn", 0]
    assert len(entry.array) == rows and same_bits(entry.array[-256:], block)


def test_poisoned_files_are_copied_not_trusted(quick_path):
    """After a failed sync the pages may be in memory only; the repair writes them again, to a new file."""
    root = quick_path / "root"
    left_by_a_crash(root, "sharded")
    (payload,) = root.rglob("*.bin.tmp")
    poison = payload.with_name(payload.name.replace(".bin.tmp", ".poison"))
    poison.touch()
    inode = payload.stat().st_ino
    descriptor = os.open(payload, os.O_RDONLY)  # so that its inode number is not reused
    repair(root, SoftDisk())
    (sealed,) = root.rglob("shard-*.bin")
    assert sealed.stat().st_ino != inode and not poison.exists() and not list(root.rglob("*.copy"))
    os.close(descriptor)
    assert same_bits(read_sharded(root / "run")["z"]["post_attn", 0].array, bits("z", "post_attn", 0, 0, 3))


class HeldDisk(SoftDisk):
    """Syncs wait while the gate is closed, so that nothing is sealed unnoticed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def fsync(self, file: int) -> None:
        assert self.gate.wait(300)


@pytest.mark.parametrize("torn", [True, False])
def test_a_request_that_lost_an_earlier_shard_does_not_keep_a_later_one(quick_path, torn):
    """Rows 0 to 3 are in one shard and 4 to 7 in the next; when the first is torn, the second has no beginning."""
    disk, live, root = HeldDisk(), quick_path / "live", quick_path / "root"
    options = FileOptions(
        live, default_layout="sharded", num_shards=1, coalesce_max_bytes=0, shard_max_bytes=8 * 16
    )
    files = CaptureWriter(options, disk)
    disk.gate.clear()
    for start in range(0, 8, 2):
        for request in ("a", "b"):
            files.append(chunk(request, "post_attn", 0, start, 2))
    shutil.copytree(live, root)
    disk.gate.set()
    files.close()
    first, second = sorted(root.rglob("shard-*.bin.tmp"))
    assert (first.stat().st_size, second.stat().st_size) == (8 * 16, 8 * 16)
    if torn:
        os.truncate(first, 16 * 5)  # a's second record and b's second record are cut
    assert not repair(root, SoftDisk()).failed
    for request, entries in read_sharded(root / "run").items():
        assert_is_prefix(entries["post_attn", 0], request, 2 if torn else 8)
