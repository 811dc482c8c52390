"""Interrupted conversions resume with the same command and give identical bytes."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from birkhoff.convert.convert import _plan, convert
from birkhoff.convert.synth import synth
from birkhoff.convert.write import journal_path, run_conversion
from birkhoff.errors import ConvertError
from birkhoff.weights.checkpoint import open_checkpoint
from tests.sizes import scaled

SLOW = """
import sys, time
from pathlib import Path
from birkhoff.convert.convert import _plan
from birkhoff.convert.write import run_conversion
from birkhoff.weights.checkpoint import open_checkpoint

source, out, to, shard = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
formats = ("mxfp4", "bf16") if to == "gguf" else ("bf16", "fp8")
work = _plan(open_checkpoint(source), out, to, *formats, "upstream", True, shard)
print("ready", flush=True)
run_conversion(work, 2, False, progress=lambda done, total: time.sleep(0.004), sync_bytes=20_000)
"""


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
    formats = ("mxfp4", "bf16") if to == "gguf" else ("bf16", "fp8")
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


@pytest.mark.parametrize("to", scaled(["gguf", "safetensors"], ["gguf"]))
def test_killed_at_random_instants_the_bytes_are_the_same(to, tiny, tmp_path):
    name = "m.gguf" if to == "gguf" else "m"
    run_conversion(plan(tiny, tmp_path / "whole" / name, to), 2, False)
    out = tmp_path / "again" / name
    rng, kills, wanted = random.Random(5), 0, scaled(10, 1)
    command = [sys.executable, "-c", SLOW, str(tiny), str(out), to, "400000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    while kills < wanted:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        assert child.stdout.readline() == b"ready\n"
        time.sleep(rng.random() * (0.35 if wanted > 1 else 0.6))
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        kills += 1
    done = run_conversion(plan(tiny, out, to), 2, False)
    print(f"{to}: {kills} kills, {done.resumed_units} parts were there already")
    assert digests(tmp_path / "again") == digests(tmp_path / "whole")


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
