"""The cgroups of this process: those of its container or systemd unit, and the ones around it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def cgroup_folders(root: Path, own: Path, controller: str) -> Iterator[Path]:
    """The directories in which a controller such as "memory" limits the process, outermost first.

    `own` is the file that names its cgroups, version 1 or 2, and `root` the directory in which they are mounted. In a
    container the name may be one of the host, which is not there; the container's cgroup is then the root."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        folder = root / controller if controllers else root
        yield folder
        for part in Path(path).parts[1:]:
            folder = folder / part
            yield folder
