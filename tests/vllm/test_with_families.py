"""Ordinary families on vLLM, one process, eager: captures and edits of a mixed batch against Transformers."""

from __future__ import annotations

import pytest

import birkhoff
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
