"""A small checkpoint with random weights."""

from pathlib import Path

import pytest

from birkhoff.convert.synth import synth


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("validate") / "tiny"
    synth(path, "tiny", seed=11, mtp=False)
    return path
