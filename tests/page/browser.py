"""Finds the Chromium that the page tests run in."""

from __future__ import annotations

import os
import shutil

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
REQUIRED = os.environ.get("BIRKHOFF_PAGE") == "1"
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]


def missing() -> str | None:
    """The reason why page tests cannot run here, or None."""
    if CHROMIUM is None:
        return "needs Chromium (Debian: apt-get install chromium); make test-page insists on it"
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "needs playwright (requirements-test.txt)"
    return None
