"""A process that is killed while it writes a file."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from birkhoff.atomic_file import atomic_path


def kill_while_writing(path: Path) -> Path:
    """Fork a process that is killed in the middle of writing `path`; returns the temporary file that it leaves."""
    before = set(path.parent.iterdir())
    child = os.fork()
    if not child:
        with atomic_path(path) as partial:
            partial.write_bytes(b"torn")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (left,) = set(path.parent.iterdir()) - before
    return left
