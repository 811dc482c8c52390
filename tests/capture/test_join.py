"""Stores joined to one: every request once, complete, in one of the two, wherever the join stops."""

from __future__ import annotations

import shutil

import pytest

from birkhoff.capture.sinks.result import CaptureFinish, CaptureRequest
from birkhoff.capture.store.file_options import FileOptions
from birkhoff.capture.store.finished import survey
from birkhoff.capture.store.join import join
from birkhoff.capture.store.reader import read_request, read_sharded
from birkhoff.capture.store.writer import CaptureWriter
from tests.capture.disks import SoftDisk, Stopped, StoppingDisk
from tests.capture.sample_chunks import assert_is_prefix, chunk


def stored(root, requests, layout="sharded"):
    with CaptureWriter(
        FileOptions(root, coalesce_max_bytes=0, num_shards=2, default_layout=layout), SoftDisk()
    ) as files:
        for request in requests:
            files.begin(CaptureRequest(request, request, "run", meta={"model": "nano"}, layout=layout))
            files.append(chunk(request, "mlp_out", 3, 0, 4))
            assert files.finish(CaptureFinish(request, "stop", 4)).result(300).status == "ok"
    return root / "run"


def finished(directory):
    return sorted(survey(directory).finished)


@pytest.mark.parametrize("layout", ["sharded", "packed", "per_file"])
def test_every_request_of_both_is_in_the_target(quick_path, layout):
    first, second = ["a", "b", "c", "d"], ["e", "f", "g"]
    target, source = stored(quick_path / "1", first, layout), stored(quick_path / "2", second, layout)
    assert join(source, target) > 0 and not source.exists()
    assert finished(target) == first + second
    if layout == "sharded":
        entries = read_sharded(target)
    else:
        entries = {name: read_request(target / name) for name in first + second}
    for name in first + second:
        assert_is_prefix(entries[name]["mlp_out", 3], name, 4)
    assert join(source, target) == 0  # nothing is left to move


@pytest.mark.parametrize("layout", ["sharded", "packed"])
def test_a_join_that_is_killed_anywhere_goes_on(quick_path, layout):
    names = ["a", "b", "c", "d", "e"]
    made = [stored(quick_path / "1", names[:2], layout), stored(quick_path / "2", names[2:], layout)]
    stops = 0
    while True:
        target, source = (quick_path / "try" / str(number) for number in (1, 2))
        for whole, copy in zip(made, (target, source)):
            shutil.copytree(whole, copy)
        try:
            join(source, target, StoppingDisk(stops))
            break
        except Stopped:
            stops += 1
        moved = set(finished(target))
        left = set(finished(source)) if source.is_dir() else set()
        assert moved | left == set(names) and not moved & left
        join(source, target)
        assert finished(target) == names and not source.exists()
        shutil.rmtree(quick_path / "try")
    assert stops >= 5
