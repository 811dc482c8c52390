"""Interrupted conversions resume with the same command and give identical bytes."""

from __future__ import annotations

import hashlib
import json
import os
import random
from pathlib import Path

import pytest

from birkhoff.convert.convert import _plan, convert
from birkhoff.convert.synth import synth
from birkhoff.convert.write import journal_path, run_conversion
from birkhoff.errors import ConvertError
from birkhoff.weights.checkpoint import open_checkpoint
from tests.capture.test_faults import small_disk  # noqa: F401 (a fixture)
from tests.killed_write import kill_while_writing


class Stop(Exception):
    pass


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("resume") / "tiny"
    synth(path, "tiny", seed=9)
    return path


def digests(path: Path) -> dict[str, str]:
    return {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(path.rglob("*")) if p.is_file()
    }


def plan(tiny: Path, out: Path, to: str):
    formats = ("fp4", "bf16") if to == "gguf" else ("bf16", "fp8")
    return _plan(open_checkpoint(tiny), out, to, *formats, "upstream", True, 400_000)


@pytest.mark.parametrize("to", ["gguf", "safetensors"])
def test_stopped_anywhere_it_goes_on_from_there(to, tiny, tmp_path):
    name = "m.gguf" if to == "gguf" else "m"
    run_conversion(plan(tiny, tmp_path / "whole" / name, to), 2, False)
    expected = digests(tmp_path / "whole")
    rng = random.Random(3)
    stops, resumed = 0, 0
    while True:
        work = plan(tiny, tmp_path / "again" / name, to)
        budget = rng.randrange(1, len(work.units) // 4)

        def progress(done: int, total: int) -> None:
            nonlocal budget
            budget -= 1
            if budget < 0:
                raise Stop

        try:
            done = run_conversion(work, 2, False, progress, sync_bytes=30_000)
        except Stop:
            stops += 1
            assert (
                not (tmp_path / "again" / name).is_file()
                and not (tmp_path / "again" / name / "config.json").exists()
            )
            continue
        resumed = done.resumed_units
        break
    assert stops > 3 and resumed > 0
    assert digests(tmp_path / "again") == expected


@pytest.mark.parametrize("to", ["gguf", "safetensors"])
def test_what_a_process_left_that_was_killed_while_it_published_is_removed(to, tiny, tmp_path):
    out, manifest = tmp_path / "m", tmp_path / "m/conversion.json"
    if to == "gguf":
        out, manifest = tmp_path / "m.gguf", tmp_path / "m.gguf.json"
    manifest.parent.mkdir(exist_ok=True)
    left = kill_while_writing(manifest)
    (tmp_path / "other.json.7.partial").touch()
    run_conversion(plan(tiny, out, to), 2, False)
    assert manifest.is_file() and not left.exists()
    assert (tmp_path / "other.json.7.partial").exists(), "of another file, which may be being written"


def test_a_torn_journal_is_cut_and_a_foreign_one_refused(tiny, tmp_path):
    out = tmp_path / "m.gguf"
    work = plan(tiny, out, "gguf")

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise Stop

    with pytest.raises(Stop):
        run_conversion(work, 1, False, stop, sync_bytes=10_000)
    journal = journal_path(out)
    raw = journal.read_bytes()
    assert len(raw.splitlines()) > 10
    journal.write_bytes(raw[:-7])
    with pytest.raises(ConvertError, match="with other options"):
        convert(tiny, out, experts="f32", dense="f32", shard_bytes=400_000)
    journal.write_bytes(b'{"x"\n' + raw)
    with pytest.raises(ConvertError, match="is damaged"):
        run_conversion(work, 1, False)
    journal.write_bytes(raw[:-7])
    done = run_conversion(plan(tiny, out, "gguf"), 1, False)
    assert done.resumed_units == len(raw.splitlines()) - 2
    run_conversion(plan(tiny, tmp_path / "whole" / "m.gguf", "gguf"), 1, False)
    assert digests(tmp_path / "whole").items() <= digests(tmp_path).items()


def test_two_processes_do_not_write_one_file(tiny, tmp_path):
    import fcntl

    out = tmp_path / "m.gguf"
    with open(journal_path(out), "a+b") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        with pytest.raises(ConvertError, match="held by another process"):
            run_conversion(plan(tiny, out, "gguf"), 1, False)


def test_a_changed_source_does_not_continue_an_old_output(tiny, tmp_path):
    import shutil

    source = Path(shutil.copytree(tiny, tmp_path / "source"))

    def stop(done: int, total: int) -> None:
        if done:
            raise Stop

    with pytest.raises(Stop):
        run_conversion(plan(source, tmp_path / "m.gguf", "gguf"), 1, False, stop)
    os.utime(next(source.glob("*.safetensors")))
    with pytest.raises(ConvertError, match="from other files"):
        run_conversion(plan(source, tmp_path / "m.gguf", "gguf"), 1, False)
    assert json.loads(journal_path(tmp_path / "m.gguf").read_text().splitlines()[0])["conversion"]


@pytest.mark.parametrize("name", ["m.gguf", "m"])
def test_a_disk_that_is_too_small_is_known_before_anything_is_written(tiny, small_disk, name):  # noqa: F811
    with pytest.raises(ConvertError, match="MiB more on disk, and "):
        convert(tiny, small_disk / name, experts="bf16", dense="bf16")
    assert not [path for path in small_disk.rglob("*") if path.is_file()]
