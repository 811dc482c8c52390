"""Memory available on the host."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def free_host_bytes() -> int:
    """Return the bytes that can be allocated without swapping, within the limit of a container; all physical memory
    where that is not reported."""
    within = _free_in_container(CGROUP)
    return _free_on_machine() if within is None else min(within, _free_on_machine())


def _free_in_container(folder: Path) -> int | None:
    """What a cgroup's limit leaves, counting its cached files as free; None without a limit."""
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        rows = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        cached = sum(
            int(row.split()[1]) for row in rows if row.startswith(("inactive_file ", "active_file "))
        )
        return None if limit == "max" else max(int(limit) - used + cached, 0)
    except (OSError, ValueError, IndexError):
        return None


def _free_on_machine() -> int:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
