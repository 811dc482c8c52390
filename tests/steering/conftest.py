"""A tiny model, its engine on plain kernels, and the same weights in `transformers`, for the tests of edits."""

from __future__ import annotations

import pytest

import birkhoff
from birkhoff.convert.synth import synth
from tests.oracle import build_oracle


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    synth(path, like="tiny")
    return path


@pytest.fixture(scope="module")
def engine(path):
    with birkhoff.load(path, kernels="reference", max_batch_tokens=24) as engine:
        yield engine


@pytest.fixture(scope="module")
def oracle(engine):
    return build_oracle(engine.model)
