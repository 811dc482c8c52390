"""Power failure at any instant: acknowledged captures exist, existing ones are correct, and sidecars are true."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from birkhoff.capture.sinks.result import CaptureFinish, CaptureRequest
from birkhoff.capture.store.file_options import FileOptions
from birkhoff.capture.store.reader import read_request, read_sharded
from birkhoff.capture.store.repair import repair
from birkhoff.capture.store.sidecar import CaptureFile
from birkhoff.capture.store.writer import CaptureWriter
from birkhoff.errors import CaptureFileError
from tests.capture.disks import SoftDisk
from tests.capture.power import RecordingDisk, after_power_loss
from tests.capture.sample_chunks import assert_is_prefix, chunk
from tests.sizes import scaled

SITES = [("post_attn", 0), ("mhc_attn_res_mix", 1)]


def record(root: Path, layout: str, seed: int) -> list:
    """Run a writer: overlapping requests, several files, some requests replaced, none waiting for another."""
    chance = random.Random(seed)
    disk = RecordingDisk(root)
    options = FileOptions(
        root,
        default_layout=layout,
        coalesce_max_bytes=chance.choice([0, 2500]),
        num_shards=2,
        shard_max_bytes=700,
        on_collision="overwrite" if layout != "sharded" else "error",
    )
    root.mkdir(parents=True)
    files = CaptureWriter(options, disk)
    futures = []
    for batch in range(4):
        # With `overwrite` the same ids come again, as other captures: the key says which.
        names = [f"r{index}" if layout != "sharded" else f"r{batch}-{index}" for index in range(3)]
        keys = {name: f"{name}/{batch}" for name in names}
        for name, key in keys.items():
            files.begin(CaptureRequest(key, name, "run", meta={"key": key}))
        for start in range(0, 6, 2):
            for key in keys.values():
                for hook, layer in SITES:
                    files.append(chunk(key, hook, layer, start, 2))
        for name, key in keys.items():
            disk.mark("finishing", name, key)
            future = files.finish(CaptureFinish(key))
            future.add_done_callback(lambda f, n=name, k=key: disk.mark("ack", n, k, f.result().status))
            futures.append(future)
        if batch == 3 or layout != "sharded":  # a name is free again when its capture is done
            for future in futures:
                assert future.result(300).status == "ok"
    files.close()
    return disk.log


def read_captures(root: Path, layout: str) -> dict[str, dict]:
    """Everything that can be read, by request id. A read error fails the test."""
    if not (root / "run").is_dir():
        return {}
    if layout == "sharded":
        return read_sharded(root / "run")
    captures = {}
    for directory in sorted((root / "run").iterdir()):
        if any(directory.glob("*.json")):
            captures[directory.name] = read_request(directory)
    return captures


def check(root: Path, layout: str, log: list) -> int:
    """Compare a repaired root with the log of calls. Returns the number of requests found."""
    acknowledged = {event[1]: event[2] for event in log if event[0] == "ack"}
    captures = read_captures(root, layout)
    for name, entries in captures.items():
        for entry in entries.values():
            key = entry.meta["key"]
            assert key.startswith(f"{name}/")
            assert_is_prefix(entry, key)  # never a wrong row
            assert not entry.meta["complete"] or len(entry.array) == 6
    for name, key in acknowledged.items():
        assert name in captures, f"{name} was acknowledged and is gone"
        entries = captures[name]
        assert set(entries) == set(SITES)
        finishing = {event[2] for event in log if event[0] == "finishing" and event[1] == name}
        for entry in entries.values():
            # A later capture of the same id may have replaced it, but only a complete one that had finished.
            assert entry.meta["key"] == key or entry.meta["key"] in finishing
            assert entry.meta["key"].split("/")[-1] >= key.split("/")[-1]
            assert_is_prefix(entry, entry.meta["key"], 6)
            assert entry.meta["complete"]
    return len(captures)


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("layout", ["sharded", "packed", "per_file"])
def test_power_loss_at_any_instant(quick_path, layout):
    """Crash points over the whole life of a writer; the repaired root holds every acknowledged request, bit for bit."""
    points = scaled(300, 60)
    log: list = []
    recovered = acknowledged = 0
    for point in range(points):
        if point % 25 == 0:
            log = record(quick_path / f"life{point}", layout, point)
        chance = random.Random(f"{layout}/{point}")
        cut = chance.randint(1, len(log))
        root = quick_path / f"crash{point}"
        after_power_loss(log[:cut], chance, root)
        for sidecar in root.rglob("*.json"):  # before any repair: what is visible is complete
            with CaptureFile(sidecar) as file:
                for entry in file.records:
                    file.read(entry)
        report = repair(root, SoftDisk())
        assert not report.failed
        recovered += check(root, layout, log[:cut])
        acknowledged += sum(event[0] == "ack" for event in log[:cut])
        assert not list(root.rglob("*.journal")) and not list(root.rglob("*.tmp"))
        before = tree(root)
        again = repair(root, SoftDisk())
        assert tree(root) == before and not again.sealed and not again.removed, (
            "a second repair changes nothing"
        )
    print(
        f"{layout}: {points} crash points, {acknowledged} acknowledged requests seen, {recovered} recovered"
    )
    assert acknowledged > points, "most crash points must come after acknowledgements, or nothing is tested"


def test_the_model_of_power_loss_loses_what_was_not_synced(quick_path):
    """The same run without syncing must fail the check; otherwise the test above could not fail."""
    log = [
        event for event in record(quick_path / "life", "packed", 0) if event[0] not in ("fsync", "syncdir")
    ]
    bad = 0
    for point in range(30):
        chance = random.Random(point)
        root = quick_path / f"crash{point}"
        after_power_loss(log[: chance.randint(len(log) // 2, len(log))], chance, root)
        try:
            repair(root, SoftDisk())
            check(root, "packed", log)
        except (AssertionError, CaptureFileError):
            bad += 1
    assert bad == 30


@pytest.mark.parametrize("missing", ["fsync payload", "fsync journal", "fsync sidecar", "syncdir"])
def test_each_kind_of_sync_is_needed(quick_path, missing):
    """Leave one kind of sync out of the log: some crash point must then lose or break something."""
    layout = "sharded" if missing == "fsync journal" else "packed"
    bad = 0
    for seed in range(6):
        log = record(quick_path / f"life{seed}", layout, seed)
        inodes = {event[2]: event[1] for event in log if event[0] == "create"}
        endings = {"payload": ".bin.tmp", "journal": ".journal", "sidecar": ".json.tmp"}

        def left_out(event: tuple, inodes=inodes, endings=endings) -> bool:
            kind, _, ending = missing.partition(" ")
            return event[0] == kind and (kind == "syncdir" or inodes[event[1]].endswith(endings[ending]))

        reduced_log = [event for event in log if not left_out(event)]
        assert len(reduced_log) < len(log)
        for point in range(25):
            chance = random.Random(f"{seed}/{point}")
            part = reduced_log[: chance.randint(1, len(reduced_log))]
            root = quick_path / f"crash{seed}-{point}"
            after_power_loss(part, chance, root)
            try:
                for sidecar in root.rglob("*.json"):
                    with CaptureFile(sidecar) as file:
                        for entry in file.records:
                            file.read(entry)
                repair(root, SoftDisk())
                check(root, layout, part)
            except (AssertionError, CaptureFileError):
                bad += 1
    assert bad > 0
