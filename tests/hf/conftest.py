from __future__ import annotations

import pytest

import birkhoff
from tests.hf.models import TYPES, make
from tests.hf.reference import Reference


@pytest.fixture(scope="module", params=TYPES)
def pair(request, tmp_path_factory):
    """An engine of small steps (prompts are cut, requests join and leave), and the reference for the same weights."""
    folder = tmp_path_factory.mktemp(request.param)
    reference = Reference(make(request.param, folder / "model"))
    options = {"max_requests": 3, "max_batch_tokens": 24, "cache_bytes": 1 << 24, "device": "cpu"}
    with birkhoff.load(folder / "model", capture_root=folder / "captures", **options) as engine:
        yield engine, reference
