"""Compiled graphs agree with the plain functions, and a compiler failure falls back to them."""

from __future__ import annotations

import pytest
import torch

from tests.training.tiny import SETTINGS, bench
from training.preflight import check_compiled, check_kernels

# The tracer reads .grad of non-leaf tensors; its warning filter is ineffective when warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture
def backend(monkeypatch):
    """`torch.compile` with a tracing-only backend, which is fast and needs no C compiler."""
    original = torch.compile

    def use(name) -> None:
        monkeypatch.setattr(torch, "compile", lambda f, **options: original(f, backend=name, **options))

    yield use
    torch._dynamo.reset()


def test_a_whole_layer_is_one_graph_and_computes_the_same(data, tmp_path, backend):
    backend("aot_eager")
    shared = bench(data, tmp_path)
    result = check_compiled(shared, SETTINGS)
    assert result["agrees"] and result["error"] is None and shared.forward.compiled
    assert result["compiled"] == pytest.approx(result["plain"], abs=1e-4)


def test_measuring_and_training_share_their_graphs(data, tmp_path, backend):
    """Recompiling a function would take minutes on the device."""
    compiled = []
    backend(lambda graph, inputs: compiled.append(1) or graph.forward)
    shared = bench(data, tmp_path)
    check_compiled(shared, SETTINGS)
    # Three kinds of layer (hashed, CSA, MTP), enter, enter_mtp, collapse, and the losses.
    assert len(compiled) == 7


def test_a_compiler_that_fails_leaves_the_plain_functions(data, tmp_path, backend):
    def broken(graph, inputs):
        raise RuntimeError("no such instruction")

    backend(broken)
    shared = bench(data, tmp_path)
    result = check_compiled(shared, SETTINGS)
    assert not result["agrees"] and "no such instruction" in result["error"] and not shared.forward.compiled


def test_kernels_are_checked_only_where_they_run():
    assert check_kernels(torch.device("cpu")) == 0.0
