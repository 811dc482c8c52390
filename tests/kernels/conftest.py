"""Fixture that runs each operation with both of its twins under `no_grad`, as a model does in inference."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from birkhoff.kernels.select import select


@pytest.fixture(scope="module", params=["reference", "cpu"])
def kernels(request):
    kernel_set = select(request.param)
    if kernel_set.name != request.param:
        pytest.skip(f"the {request.param} twins cannot run here")
    return replace(
        kernel_set,
        **{
            f.name: torch.no_grad()(getattr(kernel_set, f.name))
            for f in fields(kernel_set)
            if f.name != "name"
        },
    )
