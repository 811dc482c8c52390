from __future__ import annotations

import pytest
import torch

import birkhoff
from tests.hf.models import TYPES, make
from tests.hf.reference import Reference

ON_CUDA = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
DEVICES = ("cpu", pytest.param("cuda", marks=ON_CUDA))


@pytest.fixture(scope="module", params=DEVICES)
def device(request) -> str:
    """Where the engine runs. The reference stays on the CPU, so that a GPU is compared with it."""
    return request.param


@pytest.fixture(scope="module", params=TYPES)
def pair(request, device, tmp_path_factory):
    """An engine of small steps (prompts are cut, requests join and leave), and the reference for the same weights."""
    folder = tmp_path_factory.mktemp(request.param)
    reference = Reference(make(request.param, folder / "model"))
    options = {
        "max_requests": 3,
        "max_batch_tokens": 24,
        "cache_bytes": 1 << 24,
        "device": device,
        "dtype": "float32",
    }
    with birkhoff.load(folder / "model", capture_root=folder / "captures", **options) as engine:
        yield engine, reference
