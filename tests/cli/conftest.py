"""Runs the `birkhoff` command in a separate process, with a small checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from birkhoff.convert.synth import synth

COMMAND = [sys.executable, "-m", "birkhoff"]
ROOT = Path(__file__).parent.parent.parent


def clean_environment(**more: str) -> dict[str, str]:
    """The environment without `BIRKHOFF_*` variables and with one thread."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BIRKHOFF_")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "100", **more}


def birkhoff(*arguments: str, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        env=clean_environment(**environment),
        timeout=300,
    )


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("cli") / "tiny"
    synth(path, "tiny")
    return str(path)


def no_trace_of_python(stderr: bytes) -> bool:
    return b"Traceback" not in stderr and b"Exception ignored" not in stderr
