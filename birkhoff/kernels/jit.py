"""Compilation of the CPU twins with Numba, if it is installed.

The twins are plain loops over rows, compiled once per machine and cached by Numba (next to the source, else in the
user's cache folder, else not at all, so that a read-only installation works). Sums may be reassociated, which allows
vectorisation; infinities and NaN keep their meaning, since masks and health checks rely on them. Without Numba the
reference twins are used.

Compiled code inlines functions of other files, but Numba invalidates its cache by the text of one file only.
Therefore a digest of all kernel sources is stored, and the cache is dropped when any of them has changed.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

AVAILABLE = importlib.util.find_spec("numba") is not None
MATH = {"reassoc", "contract", "arcp", "nsz"}


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile on first use; without Numba the function itself, which is then never called."""
    if not AVAILABLE:
        return function
    import numba

    options: dict[str, Any] = {"fastmath": MATH, "nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no writable cache folder: compile in every process
        return numba.njit(**options)(function)


def drop_stale_cache(kernels: Path) -> None:
    """Delete compiled code cached next to the sources if any source has changed."""
    try:
        sources = sorted(kernels.rglob("*.py"))
        digest = hashlib.sha256(b"".join(text.read_bytes() for text in sources)).hexdigest()
        stamp = kernels / "__pycache__" / "sources.sha256"
        if stamp.is_file() and stamp.read_text() == digest:
            return
        for index in kernels.rglob("__pycache__/*.nbi"):
            index.unlink(missing_ok=True)
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(digest)
    except OSError:  # a folder that cannot be written holds no cache
        return


if AVAILABLE:
    drop_stale_cache(Path(__file__).parent)
