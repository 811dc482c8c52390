"""Test sizes: full under `make test-all`, about a tenth of that under `make test`."""

from __future__ import annotations

import os

FULL = os.environ.get("BIRKHOFF_FULL") == "1"


def scaled(full: int, small: int | None = None) -> int:
    """Return `full` under `make test-all`, else `small` or a tenth of `full` (at least 1)."""
    if FULL:
        return full
    return small if small is not None else max(1, full // 10)
