import shutil
from pathlib import Path

import pytest

from birkhoff.convert.synth import synth
from tests.weights.files import SHARD_BYTES


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory) -> Path:
    """A random tiny checkpoint in several shards. Read-only; use `broken` for a modifiable copy."""
    path = tmp_path_factory.mktemp("tiny") / "checkpoint"
    synth(path, "tiny", seed=3, shard_bytes=SHARD_BYTES)
    return path


@pytest.fixture
def broken(tiny_path, tmp_path) -> Path:
    """A modifiable copy of `tiny_path`."""
    return Path(shutil.copytree(tiny_path, tmp_path / "checkpoint"))
