"""How big a test runs: the sizes a claim names under `make test-all`, about a tenth of them under `make test`."""

from __future__ import annotations

import os

FULL = os.environ.get("BIRKHOFF_FULL") == "1"


def scaled(full: int, small: int | None = None) -> int:
    """`full` when everything is run, else `small` or a tenth of it (at least 1)."""
    if FULL:
        return full
    return small if small is not None else max(1, full // 10)
