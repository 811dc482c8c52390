"""Memory available on the host.

A process can have less than the machine: the cgroup of its container or systemd unit has a limit, and so may its
address space (`ulimit -v`). The limit of a cgroup holds for those inside it too, so that all around the process count.
"""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

from birkhoff.cgroups import CGROUP, OWN_CGROUPS, cgroup_folders


def free_host_bytes() -> int:
    """Return the bytes that this process can allocate without swapping; all physical memory where that is not
    reported."""
    limits = (free_in_cgroups(CGROUP, OWN_CGROUPS), _free_address_space())
    return min(_free_on_machine(), *(free for free in limits if free is not None))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation or a mapping failed. torch raises `OutOfMemoryError` on a device and a plain `RuntimeError`
    on the host."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def free_in_cgroups(root: Path, own: Path) -> int | None:
    """What the limits of the process's cgroups leave, counting cached files as free; None without a limit. `own` is the
    file that names its cgroups, version 1 or 2, and `root` the directory in which they are mounted."""
    free = [_free_in_cgroup(folder) for folder in cgroup_folders(root, own, "memory")]
    return min((each for each in free if each is not None), default=None)


def _free_in_cgroup(folder: Path) -> int | None:
    """What the limit of one cgroup leaves; None without a limit."""
    for limit, usage, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        try:
            bound = (folder / limit).read_text(encoding="ascii").strip()
            used = int((folder / usage).read_text(encoding="ascii"))
            rows = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
            files = (f"{prefix}inactive_file ", f"{prefix}active_file ")
            cached = sum(int(row.split()[1]) for row in rows if row.startswith(files))
            return None if bound == "max" else max(int(bound) - used + cached, 0)
        except (OSError, ValueError, IndexError):
            continue
    return None


def _free_address_space() -> int | None:
    """What `ulimit -v` leaves; None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        pages = 0
    return max(limit - pages * os.sysconf("SC_PAGE_SIZE"), 0)


def _free_on_machine() -> int:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
