"""Ranks in processes of their own: tensor parallel, pipeline parallel, and vLLM's default of one engine process."""

from __future__ import annotations

import pytest

import birkhoff
from tests.hf.reference import Reference
from tests.vllm.batch import Batch, check_batch
from tests.vllm.models import make_model
from tests.vllm.test_with_families import SMALL

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return folder / "model", Reference(make_model("llama", folder / "model"))


@pytest.mark.parametrize(
    "ranks",
    [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {}],
    ids=["tensor", "pipeline", "one process"],
)
def test_a_mixed_batch_on_several_ranks(model, ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    path, reference = model
    batch = Batch()
    root = tmp_path / "captures"
    with birkhoff.load(path, backend="vllm", capture_root=root, **ranks, **SMALL) as engine:
        batch.register(engine, tmp_path)
        check_batch(engine, reference, batch, root)
        counts = engine._core.ranks.call("birkhoff_counts")
    size = ranks.get("tensor_parallel_size", 1) * ranks.get("pipeline_parallel_size", 1)
    assert len(counts) == size and all(rank["hooked_steps"] > 10 for rank in counts)
    if "pipeline_parallel_size" in ranks:
        assert [rank["sites"] for rank in counts] == [6, 6]
        written = {path.name for path in (root / "captures" / "steered-4").iterdir()}
        assert any("-pp00" in name for name in written) and any("-pp01" in name for name in written), written
    assert not list(root.rglob("*.lock.open"))
