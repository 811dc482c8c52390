"""Ordinary families on vLLM, one process, eager: captures and edits of a mixed batch against Transformers."""

from __future__ import annotations

import pytest

import birkhoff
from birkhoff.vllm import open_engine
from tests.hf.reference import Reference
from tests.vllm.batch import Batch, check_batch
from tests.vllm.models import CONTEXT, FAMILIES, make_model

pytestmark = pytest.mark.vllm
# Three slots and steps of 32 tokens: prompts are cut, requests join and leave in the middle of others.
SMALL = {
    "dtype": "float32",
    "max_requests": 3,
    "max_batch_tokens": 32,
    "max_context": CONTEXT,
    "cache_bytes": 64 << 20,
    "vllm": {"enforce_eager": True, "enable_chunked_prefill": True, "seed": 0},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_batch_equals_transformers(family, tmp_path):
    model = make_model(family, tmp_path / "model")
    batch = Batch(25.0 if family == "gemma2" else 1.0)
    options = {"backend": "vllm", "capture_root": tmp_path / "captures", **SMALL}
    with birkhoff.load(tmp_path / "model", **options) as engine:
        batch.register(engine, tmp_path)
        check_batch(engine, Reference(model), batch, tmp_path / "captures")
        assert engine.settings["backend"] == "vllm"


def test_a_mixed_batch_by_the_operations_of_recorded_graphs(tmp_path, monkeypatch):
    """Steps whose requests all fit run the fixed operations, the others do not; both give the same answers."""
    monkeypatch.setattr(open_engine, "CPU_WORKER", "tests.vllm.recorded_worker.RecordedCpuWorker")
    model = make_model("llama", tmp_path / "model")
    batch = Batch()
    options = {"backend": "vllm", "capture_root": tmp_path / "captures", **SMALL}
    with birkhoff.load(tmp_path / "model", **options) as engine:
        worker = engine._core.engine.model_executor.driver_worker.worker
        at_start = worker.model_runner.forced
        batch.register(engine, tmp_path)
        check_batch(engine, Reference(model), batch, tmp_path / "captures")
        (counts,) = engine._core.ranks.call("birkhoff_counts")
        assert 5 < worker.recorded_steps < counts["steps"], (worker.recorded_steps, counts)
        forced = worker.model_runner.forced - at_start
        assert forced == counts["steps"] - worker.recorded_steps, (
            "those of requests that do not fit, and no other"
        )
