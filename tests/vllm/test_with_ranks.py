"""Ranks in processes of their own: tensor parallel, pipeline parallel, and vLLM's default of one engine process."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import birkhoff
from birkhoff import Capture
from birkhoff.capture.store.file_options import FileOptions
from birkhoff.capture.store.reader import read_request
from birkhoff.capture.store.writer import CaptureWriter
from birkhoff.errors import CaptureLocked, EngineClosed
from tests.hf.reference import Reference
from tests.vllm.batch import HOOKS, Batch, check_batch
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
            assert any("-pp00" in name for name in written), written
            assert any("-pp01" in name for name in written), written
            kill_a_rank(engine, counts[1]["pid"], batch.prompts[0])
    if "pipeline_parallel_size" in ranks:
        check_what_is_left(root)


def kill_a_rank(engine, pid, prompt):
    """Kill the last stage without warning while it captures."""
    capture = Capture(dict.fromkeys(HOOKS, "all"), "all", request_id="killed", returns="file")
    stream = engine.stream(prompt, capture=capture, max_tokens=150, temperature=0, ignore_eos=True)
    for _ in range(4):
        next(stream)
    os.kill(pid, signal.SIGKILL)
    for _ in stream:
        pass
    output = stream.output
    assert output.finish_reason == "error" and isinstance(output.error, EngineClosed)
    assert output.capture_results["filesystem"].status == "error"
    with pytest.raises(EngineClosed):
        engine.generate(prompt, max_tokens=1)


def check_what_is_left(root):
    """What was acknowledged is there; the next writer of each stage gets its lock, and repairs what was not."""
    acknowledged = {name: sizes(root / "captures" / name) for name in ("steered-4", "written-6")}
    assert all(acknowledged.values())
    for stage in range(2):
        with next_writer(FileOptions(root, pp_rank=stage, pp_size=2)) as writer:
            repaired = writer.repaired
            assert repaired is None or not repaired.failed
        assert stage == 0 or repaired is not None, "the killed stage left its root open"
    assert {name: sizes(root / "captures" / name) for name in acknowledged} == acknowledged
    folder = root / "captures" / "killed"
    left = read_request(folder) if any(folder.glob("*.json")) else {}
    for entry in left.values():  # rows that were not acknowledged may be there, wrong ones may not
        assert (
            list(entry.positions) == list(range(len(entry)))
            and torch.isfinite(torch.from_numpy(entry.values())).all()
        )


def next_writer(options):
    """The other processes of the engine end by themselves, and their locks with them."""
    deadline = time.monotonic() + 300
    while True:
        try:
            return CaptureWriter(options)
        except CaptureLocked:
            assert time.monotonic() < deadline
            time.sleep(0.2)


def sizes(folder):
    return {key: len(entry) for key, entry in read_request(folder).items()}
