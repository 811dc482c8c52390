"""Complete requests, and removal of the others: in every layout, over shards, interrupted anywhere."""

from __future__ import annotations

import pytest

from birkhoff.capture.sinks.result import CaptureFinish, CaptureRequest
from birkhoff.capture.store.disk import Disk
from birkhoff.capture.store.file_options import FileOptions
from birkhoff.capture.store.finished import forget, survey
from birkhoff.capture.store.reader import read_request, read_sharded
from birkhoff.capture.store.repair import repair
from birkhoff.capture.store.writer import CaptureWriter
from tests.capture.sample_chunks import assert_is_prefix, chunk

ENDS = {"whole": "length", "stopped": "stop", "cancelled": "cancelled", "failed": "error", "open": None}


def write(root, layout: str, names=ENDS, shard_max_bytes: int = 900) -> None:
    """Twelve rows of two hooks per name; small shards, so that every request spans several."""
    options = FileOptions(root, default_layout=layout, num_shards=2, shard_max_bytes=shard_max_bytes)
    with CaptureWriter(options) as writer:
        for name in names:
            writer.begin(CaptureRequest(name, name, "run"))
        for start in range(0, 12, 3):
            for name in names:
                for hook in ("mlp_out", "mhc_attn_res_mix"):
                    writer.append(chunk(name, hook, 1, start, 3))
        for name in names:
            if ENDS[name] is not None:
                writer.finish(CaptureFinish(name, ENDS[name], 4)).result(300)


def read_all(root, layout: str):
    tag = root / "run"
    return (
        read_sharded(tag)
        if layout == "sharded"
        else {path.name: read_request(path) for path in tag.iterdir()}
    )


@pytest.mark.parametrize("layout", ["sharded", "packed", "per_file"])
def test_only_requests_that_ended_well_are_finished_and_the_others_can_be_written_again(tmp_path, layout):
    write(tmp_path, layout)
    result = survey(tmp_path / "run")
    assert sorted(result.finished) == ["stopped", "whole"] and result.unfinished == [
        "cancelled",
        "failed",
        "open",
    ]
    assert {(p.rows, p.nbytes) for p in result.finished.values()} == {(24, 12 * 16 + 12 * 64)}
    forget(tmp_path / "run", result.unfinished)
    remaining = read_all(tmp_path, layout)
    assert sorted(remaining) == ["stopped", "whole"]
    for name, entries in remaining.items():
        assert len(entries) == 2
        for entry in entries.values():
            assert_is_prefix(entry, name, 12)
    write(tmp_path, layout, names=["cancelled"])  # refused if a trace of the name were left
    assert "cancelled" in read_all(tmp_path, layout)


def test_a_request_whose_shard_is_gone_is_not_finished(tmp_path):
    write(tmp_path, "sharded", names=["whole"])
    shards = sorted((tmp_path / "run").glob("shard-*.json"))
    assert len(shards) > 2
    shards[0].unlink()
    assert survey(tmp_path / "run").unfinished == ["whole"]


class Cut(BaseException):
    pass


class FailingDisk(Disk):
    """Executes a number of changes, then behaves like a machine that was switched off."""

    def __init__(self, changes: int):
        self.left = changes

    def _spend(self) -> None:
        if not self.left:
            raise Cut
        self.left -= 1

    def write(self, file, data, offset):
        self._spend()
        return super().write(file, data, offset)

    def rename(self, old, new):
        self._spend()
        super().rename(old, new)

    def unlink(self, path):
        self._spend()
        super().unlink(path)

    def rmdir(self, path):
        self._spend()
        super().rmdir(path)


@pytest.mark.parametrize("layout", ["sharded", "packed", "per_file"])
def test_forgetting_may_be_interrupted_anywhere(tmp_path, layout):
    cuts = 0
    while True:
        root = tmp_path / str(cuts)
        write(root, layout, names=["whole", "open", "cancelled"], shard_max_bytes=3000)
        unfinished = survey(root / "run").unfinished
        assert unfinished == ["cancelled", "open"]
        try:
            forget(root / "run", unfinished, FailingDisk(cuts))
        except Cut:
            cuts += 1
            repair(root)
            again = survey(root / "run")
            assert list(again.finished) == [
                "whole"
            ]  # never lost, and no partial request taken for a complete one
            forget(root / "run", again.unfinished)
        else:
            break
        finally:
            remaining = read_all(root, layout)
            assert list(remaining) == ["whole"] and all(
                len(entry) == 12 for entry in remaining["whole"].values()
            )
    assert cuts >= 3


def test_a_missing_directory_holds_nothing(tmp_path):
    assert survey(tmp_path / "nowhere").requests == {}
    forget(tmp_path / "nowhere", [])
