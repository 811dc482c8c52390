"""Selection of kernels: equal signatures of twins, gradients, and the reference set where the fast one cannot run."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
import torch

from birkhoff.kernels import jit
from birkhoff.kernels.select import TWINS, KernelSet, select


@pytest.mark.parametrize("name", TWINS)
def test_twins_have_the_same_signature(name):
    plain, fast = TWINS[name]
    assert [(p.name, p.default) for p in inspect.signature(plain).parameters.values()] == [
        (p.name, p.default) for p in inspect.signature(fast).parameters.values()
    ]


def test_a_kernel_set_has_every_operation():
    assert {f.name for f in fields(KernelSet)} == {"name", *TWINS}
    plain = select("reference")
    assert plain.name == "reference" and all(getattr(plain, name) is pair[0] for name, pair in TWINS.items())


@pytest.mark.skipif(not jit.AVAILABLE, reason="no compiler for the CPU twins")
def test_the_reference_runs_while_gradients_are_recorded():
    fast = select("cpu")
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    weight = torch.randn(3, 8, generator=torch.Generator().manual_seed(2))
    fast.rms_norm(fast.linear(x, weight), None, 1e-6).sum().backward()
    assert fast.name == "cpu" and x.grad is not None and x.grad.abs().sum() > 0
    with torch.no_grad():
        assert not fast.linear(x, weight).requires_grad


def test_without_a_compiler_the_reference_set_is_selected(monkeypatch):
    monkeypatch.setattr(jit, "AVAILABLE", False)
    assert select("cpu").name == "reference"
