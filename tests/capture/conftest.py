"""Directory for tests of files: in memory if the system has such a file system, so that small files cost no disk."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """An empty directory in memory, or `tmp_path` if there is no file system in memory."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    directory = Path(tempfile.mkdtemp(prefix="birkhoff-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)
