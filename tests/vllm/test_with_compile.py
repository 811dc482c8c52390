"""torch.compile, vLLM's default on a CPU: the sites stay in the compiled graph, and nothing else changes."""

from __future__ import annotations

import pytest

import birkhoff
from tests.hf.reference import Reference
from tests.vllm.batch import Batch, check_batch
from tests.vllm.models import make_model
from tests.vllm.test_with_families import SMALL

pytestmark = pytest.mark.vllm


def test_a_mixed_batch_in_a_compiled_model(tmp_path):
    model = make_model("llama", tmp_path / "model")
    batch = Batch()
    options = {**SMALL, "vllm": {**SMALL["vllm"], "enforce_eager": False}}
    root = tmp_path / "captures"
    with birkhoff.load(tmp_path / "model", backend="vllm", capture_root=root, **options) as engine:
        assert engine.settings["compiled"]
        batch.register(engine, tmp_path)
        check_batch(engine, Reference(model), batch, root, tolerance=1e-3)
