"""Write a file so that it is complete under its name or absent, also after a crash or a power cut."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_atomic(path: str | Path, data: str | bytes, *, sync: bool = True) -> None:
    """Write `data` to a temporary file in the same directory and rename it to `path`.

    With `sync`, both the file and the directory entry are flushed to disk before returning. Raises OSError and
    removes the temporary file when writing fails."""
    with atomic_path(path, sync=sync) as partial:
        partial.write_bytes(data.encode("utf-8") if isinstance(data, str) else data)


@contextmanager
def atomic_path(path: str | Path, *, sync: bool = True) -> Iterator[Path]:
    """Yield a temporary path; rename it to `path` when the block ends, delete it when the block raises."""
    path = Path(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        if sync:
            _sync(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if sync:
        sync_directory(path.parent)


def remove_partials(directory: Path, name: str = "*") -> None:
    """Delete the temporary files that killed processes left in `directory`. No other process may be writing there.

    `name` is a pattern of the files they were to become."""
    for partial in directory.glob(f"{name}.*.partial"):
        if re.search(r"\.\d+\.partial$", partial.name):
            partial.unlink(missing_ok=True)


def save_tensors(path: str | Path, tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file of PyTorch tensors, readable as other new files are.

    `safetensors` creates its files for the owner only, whatever the umask."""
    from safetensors.torch import save_file

    with atomic_path(path) as partial:
        partial.touch()
        mode = partial.stat().st_mode
        save_file(tensors, partial, metadata)
        partial.chmod(mode)


def sync_directory(path: str | Path) -> None:
    """Make renames in a directory durable; does nothing where directories cannot be opened."""
    try:
        _sync(Path(path))
    except OSError:
        return


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
