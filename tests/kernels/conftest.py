"""Every operation is tested with each of its twins, the way a model calls them: without gradients being recorded."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from birkhoff.kernels.select import select


@pytest.fixture(scope="module", params=["reference", "cpu"])
def kernels(request):
    chosen = select(request.param)
    if chosen.name != request.param:
        pytest.skip(f"the {request.param} twins cannot run here")
    return replace(
        chosen,
        **{f.name: torch.no_grad()(getattr(chosen, f.name)) for f in fields(chosen) if f.name != "name"},
    )
