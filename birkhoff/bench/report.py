"""What all benchmark rows have in common: machine, versions, commit, summary statistics, JSON output, settings.

Every row repeats these facts, so that it can be judged by itself; among them the load of the machine, which shows
whether other processes were running.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from birkhoff.config import V4Config
from birkhoff.convert.synth import synth
from birkhoff.errors import OptionError
from birkhoff.kernels.packed.compile import native_architecture
from birkhoff.processors import usable_processors

Row = dict[str, Any]
Progress = Callable[[int, int], None]  # rounds done, rounds in all
PACKAGE = Path(__file__).resolve().parent.parent
SOURCES = ("*.py", "*.cu", "*.cuh", "*.cpp", "*.h")
PACKAGES = ("torch", "numba", "transformers", "numpy")


def facts() -> Row:
    """Machine, versions and commit at this time."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "sources": sources(),
        "machine": {
            "cpu": cpu_model(),
            "cores": usable_processors(),
            "load": round(os.getloadavg()[0], 2),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "threads": torch.get_num_threads(),
        "native": native_architecture(),
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
    """The commit of the running code, with a + if it was changed since; None outside a checkout, and None for a copy
    inside another checkout, whose files git does not track."""

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
    """Twelve hex digits of a digest over the names and contents of all source files of the package."""
    digest = hashlib.sha256()
    for file in sorted(path for kind in SOURCES for path in package.rglob(kind)):
        digest.update(f"{file.relative_to(package).as_posix()}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile."""
    spread = torch.tensor(values, dtype=torch.float64).quantile(
        torch.tensor([0.5, 0.1, 0.9], dtype=torch.float64)
    )
    return dict(zip(("median", "p10", "p90"), (significant(value) for value in spread.tolist())))


def significant(value: float, digits: int = 4) -> float:
    """Round to `digits` significant digits."""
    return float(f"{value:.{digits}g}")


def check_positive(setting: object, *names: str) -> None:
    """Raise `OptionError` unless the named fields of a setting (default: all) are positive."""
    for name in names or vars(setting):
        if getattr(setting, name) < 1:
            raise OptionError(f"{name} is {getattr(setting, name)}, expected a positive whole number.")


def checkpoint(model: str | Path | None, folder: str | Path) -> tuple[str | Path, str]:
    """The checkpoint to measure and its name in rows; without `model` a random one of nano's size, in `folder`."""
    if model is not None:
        return model, str(model)
    path = Path(folder) / "nano"
    synth(path, "nano")
    return path, "synth nano"


def stream_shape(config: V4Config) -> Row:
    """The sizes that the cost of capture depends on."""
    return {"layers": config.num_hidden_layers, "hidden": config.hidden_size, "streams": config.hc_mult}
