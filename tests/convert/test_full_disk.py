"""A disk that runs full while a checkpoint is written: an error with numbers, nothing that loads, a clean rerun."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from birkhoff.convert.convert import convert
from birkhoff.convert.synth import synth
from birkhoff.errors import BirkhoffError, CapacityError, ConvertError, DiskFull
from birkhoff.free_disk import check_free_disk
from birkhoff.weights.checkpoint import open_checkpoint
from tests.capture.test_faults import small_disk  # noqa: F401 (a fixture)
from tests.convert.files import same_bytes


def filling(ballast: Path, after: int = 1) -> Callable[[int, int], None]:
    """A progress callback that fills the disk of `ballast` at its `after`-th call, as another program would."""
    calls = 0

    def progress(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls != after:
            return
        with open(ballast, "wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                return

    return progress


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("full") / "source"
    synth(path, "tiny", layers=2, seed=4)
    return path


@pytest.mark.parametrize("name", ["m.gguf", "m"])
def test_a_conversion_keeps_what_it_has_and_continues(source, small_disk, tmp_path, name):  # noqa: F811
    target, ballast = small_disk / name, small_disk / "ballast"
    with pytest.raises(
        DiskFull, match=r"needs \d+.* more on disk, and .* are free in .* it continues"
    ) as raised:
        convert(source, target, dense="bf16", workers=1, progress=filling(ballast, 40))
    assert isinstance(raised.value, ConvertError) and isinstance(raised.value, CapacityError)
    with pytest.raises(BirkhoffError):
        open_checkpoint(target)
    assert not list(small_disk.rglob("*.gguf")) and not list(small_disk.rglob("*.safetensors"))
    ballast.unlink()
    convert(source, target, dense="bf16")
    convert(source, tmp_path / name, dense="bf16")
    if target.is_dir():
        assert same_bytes(target, tmp_path / name) == []
    else:
        assert target.read_bytes() == (tmp_path / name).read_bytes()
    left = {
        path.name for path in small_disk.rglob("*") if path.name.startswith(".") or ".partial" in path.name
    }
    assert not left


@pytest.mark.parametrize("after", [1, 30])
def test_a_random_checkpoint_leaves_nothing_and_starts_again(source, small_disk, after):  # noqa: F811
    target, ballast = small_disk / "s", small_disk / "ballast"
    with pytest.raises(DiskFull, match=r"needs .* more on disk"):
        synth(target, "tiny", layers=2, seed=4, shard_bytes=100_000, progress=filling(ballast, after))
    assert list(target.iterdir()) == []
    ballast.unlink()
    synth(target, "tiny", layers=2, seed=4)
    assert same_bytes(source, target) == []


def test_files_may_be_limited(source, tmp_path):
    """`ulimit -f`, on the command line."""
    limit = 100 << 10

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    for words in (["convert", str(source), "m.gguf"], ["convert", str(source), "m"], ["synth", "s"]):
        done = subprocess.run(
            [sys.executable, "-m", "birkhoff", *words],
            cwd=tmp_path,
            preexec_fn=limited,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert "disk-full" in done.stderr and "may write files of up to 100.00 KiB (ulimit -f)" in done.stderr
        with pytest.raises(BirkhoffError):
            open_checkpoint(tmp_path / words[-1])
    convert(source, tmp_path / "m.gguf")
    convert(source, tmp_path / "m")
    synth(tmp_path / "s")


def test_the_free_bytes_are_returned_or_named(tmp_path):
    free = check_free_disk("it", tmp_path / "not/yet/there", 1)
    assert free > 1
    with pytest.raises(DiskFull, match=f"it needs .* free in {tmp_path}. Do this."):
        check_free_disk("it", tmp_path / "x", free, "Do this.", reserve=free)
