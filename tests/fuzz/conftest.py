"""Fixtures: one server for all attacks of this folder, with a short context so that no body runs for long."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sae.reference import random_sae
from tests.server.conftest import Served, serving


@contextlib.contextmanager
def victim(folder: Path, *flags: str) -> Iterator[Served]:
    """A server with the SAEs that the bodies name."""
    sae = random_sae("jumprelu", 48, 384, seed=4, hook="mlp_out", layer=2, view="single")
    files = sae.save(folder / "sae")
    attached = ("--sae", f"delta={files}", "--sae-full", f"full={files}", "--max-context", "768")
    with serving(folder / "served", *attached, *flags) as running:
        yield running


@pytest.fixture(scope="session")
def attacked(tmp_path_factory) -> Iterator[Served]:
    with victim(tmp_path_factory.mktemp("attacked")) as running:
        yield running
