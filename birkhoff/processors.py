"""Processors that this process may use, and as many threads.

A container with a quota of one processor still shows all those of its host, and PyTorch starts a thread for each. The
kernel then stops the process for most of every period, while threads wait for each other: nano decodes at half of the
speed of one thread. OpenMP knows which processors a process is bound to (`taskset`), but no quota.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from birkhoff.cgroups import CGROUP, OWN_CGROUPS, cgroup_folders


def usable_processors(root: Path = CGROUP, own: Path = OWN_CGROUPS) -> int:
    """How many processors this process can keep busy: those it is bound to, within the quotas of its cgroups.

    A quota of one and a half counts as one, because a second thread would be stopped half of the time while the first
    waits for it."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [_quota(folder) for folder in cgroup_folders(root, own, "cpu")]
    return max(1, min([bound, *(int(quota) for quota in quotas if quota is not None)]))


def limit_threads(usable: int) -> str | None:
    """Lower PyTorch's number of threads, which the native kernels use too, to `usable` processors; returns what was
    done, or None. `OMP_NUM_THREADS` is a decision of the user and stays."""
    threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ or threads <= usable:
        return None
    torch.set_num_threads(usable)
    return (
        f"{usable} {'thread' if usable == 1 else 'threads'} instead of {threads}: this process may use no more "
        "processors. OMP_NUM_THREADS overrides it"
    )


def _quota(folder: Path) -> float | None:
    """Processors of one cgroup; None without a limit."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
