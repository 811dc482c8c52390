"""Compilation of CPU twins: Numba, when it is installed.

The twins are plain loops over rows, compiled once per machine and kept in the compiler's own cache (beside the source,
else in the user's cache folder, else nowhere: an installation that cannot be written works too). Sums may be
reassociated (that is what lets them use vector registers) but infinities and NaN keep their meaning, because masks and
health checks rely on them. Without Numba there are no CPU twins and the plain ones run.

Compiled code contains the code of what it calls, in other files too, but the compiler keeps it by the text of its own
file alone. So the texts of all kernels are stamped together, and what was kept is dropped when any of them has changed.
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
    """Compile on first use; the plain function where there is no compiler (it is then never called)."""
    if not AVAILABLE:
        return function
    import numba

    how: dict[str, Any] = {"fastmath": MATH, "nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **how)(function)
    except (
        RuntimeError
    ):  # neither the package's folder nor the user's cache can be written: compile in every process
        return numba.njit(**how)(function)


def forget_stale(kernels: Path) -> None:
    """Drop compiled code that was kept beside the sources, unless every source is what it was."""
    try:
        texts = sorted(kernels.rglob("*.py"))
        now = hashlib.sha256(b"".join(text.read_bytes() for text in texts)).hexdigest()
        stamp = kernels / "__pycache__" / "sources.sha256"
        if stamp.is_file() and stamp.read_text() == now:
            return
        for index in kernels.rglob("__pycache__/*.nbi"):
            index.unlink(missing_ok=True)
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(now)
    except OSError:  # what cannot be written holds nothing that we kept
        return


if AVAILABLE:
    forget_stale(Path(__file__).parent)
