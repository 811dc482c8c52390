"""Free memory: limits of containers, systemd units and address space count, not only what the machine has."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

from birkhoff.free_memory import free_in_cgroups, is_out_of_memory

GIB = 1 << 30
UNIT = "system.slice/birkhoff.service"


def write_v2(folder: Path, limit: str, used: int, files: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(limit + "\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used - files}\ninactive_file {files}\nactive_file 0\n")


def write_v1(folder: Path, limit: int, used: int, files: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(
        f"inactive_file 0\ntotal_inactive_file {files}\ntotal_active_file 0\n"
    )


def free(tmp_path: Path, own: str) -> int | None:
    (tmp_path / "own").write_text(own)
    return free_in_cgroups(tmp_path / "cgroup", tmp_path / "own")


def test_a_container_with_a_namespace_sees_its_limit_at_the_root(tmp_path):
    write_v2(tmp_path / "cgroup", str(4 * GIB), 2 * GIB, GIB)
    assert free(tmp_path, "0::/\n") == 3 * GIB


@pytest.mark.parametrize("limited", ["system.slice", UNIT])
def test_a_systemd_unit_has_the_limits_around_it(tmp_path, limited):
    for folder in ("system.slice", UNIT):
        write_v2(tmp_path / "cgroup" / folder, "max", 2 * GIB, GIB)
    assert free(tmp_path, f"0::/{UNIT}\n") is None
    write_v2(tmp_path / "cgroup" / limited, str(4 * GIB), 2 * GIB, GIB)
    assert free(tmp_path, f"0::/{UNIT}\n") == 3 * GIB
    assert free(tmp_path, "0::/user.slice\n") is None


def test_version_1(tmp_path):
    no_limit = 9223372036854771712
    write_v1(tmp_path / "cgroup/memory", no_limit, 9 * GIB, 0)
    write_v1(tmp_path / "cgroup/memory" / UNIT, 4 * GIB, 2 * GIB, GIB)
    assert free(tmp_path, f"5:cpu,cpuacct:/x\n4:memory:/{UNIT}\n0::/\n") == 3 * GIB
    assert (free(tmp_path, "4:memory:/a-name-of-the-host\n0::/\n") or 0) > 1000 * GIB


def test_the_limit_of_the_address_space_counts():
    """In a process of its own, because the limit would hold for all following tests."""
    code = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({GIB}, {GIB}))\n"
    code += "from birkhoff.free_memory import free_host_bytes\nprint(free_host_bytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert 0 < int(done.stdout) < GIB


@pytest.mark.parametrize(
    "allocate", [lambda: torch.empty(1 << 60), lambda: numpy.empty(1 << 56), lambda: mmap.mmap(-1, 1 << 60)]
)
def test_failed_allocations_are_known(allocate):
    with pytest.raises(Exception) as failed:
        allocate()
    assert is_out_of_memory(failed.value)
    assert not is_out_of_memory(FileNotFoundError(2, "no such file")) and not is_out_of_memory(
        RuntimeError("x")
    )
