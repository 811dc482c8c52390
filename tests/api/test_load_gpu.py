"""How `load` selects GPU kernels; their results are tested with the model and the kernels."""

from __future__ import annotations

import pytest
import torch

import birkhoff
from birkhoff.api.run_plan import experts_as_stored, select_kernels
from birkhoff.convert.synth import synth
from birkhoff.errors import OptionError
from birkhoff.kernels import gpu
from birkhoff.weights.checkpoint import open_checkpoint


def test_triton_is_refused_where_it_cannot_run(monkeypatch):
    monkeypatch.setattr(gpu, "available", lambda: False)
    with pytest.raises(
        OptionError, match=r"needs the package triton and a CUDA device.*Use 'auto' or 'reference'"
    ):
        birkhoff.load("nano", device="cpu", kernels="triton")
    assert select_kernels("auto", torch.device("cuda")) == "reference"


def test_triton_on_a_cpu_is_only_for_the_interpreter(monkeypatch):
    monkeypatch.setattr(gpu, "available", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(OptionError, match="runs on a CUDA device, but device is 'cpu'"):
        select_kernels("triton", torch.device("cpu"))
    assert (
        select_kernels("auto", torch.device("cuda"))
        == select_kernels("triton", torch.device("cuda"))
        == "triton"
    )
    assert select_kernels("auto", torch.device("cpu")) != "triton"


def test_experts_that_a_gpu_reads_as_stored(tmp_path):
    """Float32 experts stay as they are only in a model that computes in float32."""
    for dense, experts in (("fp8", "fp4"), ("fp8", "bf16"), ("bf16", "fp4"), ("fp8", "fp8"), ("f32", "f32")):
        path = tmp_path / f"{dense}-{experts}"
        synth(path, "tiny", layers=1, dense=dense, experts=experts, mtp=False, tokenizer=False)
        checkpoint = open_checkpoint(path)
        assert experts_as_stored(checkpoint, torch.bfloat16) is (experts != "f32")
        assert experts_as_stored(checkpoint, torch.float32)
