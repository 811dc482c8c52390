"""Threads: as many as the processors that a process may use, by its binding and the quotas of its cgroups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from birkhoff.processors import usable_processors

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
needs_two = pytest.mark.skipif(CORES < 2, reason="one processor has no quota below its own number")
UNIT = "system.slice/birkhoff.service"


def write_v2(folder: Path, limit: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.max").write_text(limit + "\n")


def write_v1(folder: Path, quota: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")


def usable(tmp_path: Path, own: str) -> int:
    (tmp_path / "own").write_text(own)
    return usable_processors(tmp_path / "cgroup", tmp_path / "own")


@needs_two
@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("max 100000", CORES),
        ("100000 100000", 1),
        ("150000 100000", 1),
        ("20000 100000", 1),  # a fifth of a processor
        ("400000 200000", 2),
        ("99900000 100000", CORES),
        ("unreadable", CORES),
    ],
)
def test_the_quota_of_a_container(tmp_path, limit, expected):
    write_v2(tmp_path / "cgroup", limit)
    assert usable(tmp_path, "0::/\n") == expected


@needs_two
@pytest.mark.parametrize("limited", ["system.slice", UNIT])
def test_a_systemd_unit_has_the_quotas_around_it(tmp_path, limited):
    for folder in ("system.slice", UNIT):
        write_v2(tmp_path / "cgroup" / folder, "max 100000")
    assert usable(tmp_path, f"0::/{UNIT}\n") == CORES
    write_v2(tmp_path / "cgroup" / limited, "100000 100000")
    assert usable(tmp_path, f"0::/{UNIT}\n") == 1


@needs_two
def test_version_1(tmp_path):
    write_v1(tmp_path / "cgroup/cpu", -1)
    write_v1(tmp_path / "cgroup/cpu" / UNIT, 100000)
    assert usable(tmp_path, f"5:cpu,cpuacct:/{UNIT}\n4:memory:/x\n0::/\n") == 1
    assert usable(tmp_path, "5:cpu,cpuacct:/elsewhere\n0::/\n") == CORES


@needs_two
@pytest.mark.parametrize(("variable", "threads"), [(None, 1), ("2", 2)])
def test_a_loaded_model_uses_no_more_threads_than_processors(variable, threads):
    """In a process that is bound to one processor after PyTorch counted them."""
    code = (
        "import os, torch; before = torch.get_num_threads(); os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "import birkhoff\nwith birkhoff.load('nano') as engine: engine.generate('a', max_tokens=2)\n"
        "print(before, torch.get_num_threads())"
    )
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    if variable is not None:
        environment["OMP_NUM_THREADS"] = variable
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    before, after = map(int, result.stdout.split())
    assert before >= 2 and after == threads
    assert ("1 thread instead of" in result.stderr) == (variable is None)
