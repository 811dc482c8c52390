"""Compilation of CPU twins: Numba, when it is installed.

The twins are plain loops over rows, compiled once per machine and kept in the compiler's own cache (beside the source,
else in the user's cache folder, else nowhere: an installation that cannot be written works too). Sums may be
reassociated (that is what lets them use vector registers) but infinities and NaN keep their meaning, because masks and
health checks rely on them. Without Numba there are no CPU twins and the plain ones run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
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
    except RuntimeError:  # neither the package's folder nor the user's cache can be written: compile in every process
        return numba.njit(**how)(function)
