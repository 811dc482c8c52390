"""Memory available on the host."""

from __future__ import annotations

import os
from pathlib import Path


def free_host_bytes() -> int:
    """Return the bytes that can be allocated without swapping; all physical memory where that is not reported."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
