"""What every measurement carries: the machine, the versions, the commit, and how numbers are summed up.

A number without its machine and its command is a rumour, so each line of a benchmark repeats these facts. Load is
among them: a line that was taken while others used the machine says so itself.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "numba", "transformers", "numpy")


def facts() -> dict[str, Any]:
    """Machine, versions and commit, as they are now."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "sources": sources(),
        "machine": {
            "cpu": cpu_model(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "load": round(os.getloadavg()[0], 2),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
    }


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit(package: Path = PACKAGE) -> str | None:
    """The commit of the code that runs, with a + when it was changed since; None outside a checkout. A copy that
    lies inside some other checkout has no commit: the files that run must be the ones git keeps there."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(package), *words], capture_output=True, text=True, timeout=30)
        if done.returncode:
            raise OSError(done.stderr)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "--", "__init__.py", "bench/report.py")
        if Path(git("rev-parse", "--show-toplevel")).resolve() != package.parent:
            return None
        changed = git("status", "--porcelain", "--untracked-files=no", "--", str(package))
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.TimeoutExpired):
        return None


def sources(package: Path = PACKAGE) -> str:
    """Twelve digits that name the code itself, wherever it lies: of every source file of the package and its name."""
    digest = hashlib.sha256()
    for file in sorted(path for kind in ("*.py", "*.cu") for path in package.rglob(kind)):
        digest.update(f"{file.relative_to(package).as_posix()}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, tenth and ninetieth percentile."""
    spread = torch.tensor(values, dtype=torch.float64).quantile(
        torch.tensor([0.5, 0.1, 0.9], dtype=torch.float64)
    )
    return dict(zip(("median", "p10", "p90"), (significant(value) for value in spread.tolist())))


def significant(value: float, digits: int = 4) -> float:
    """Rounded to what a measurement can bear."""
    return float(f"{value:.{digits}g}")
