"""How `load` selects GPU kernels; their results are tested with the model and the kernels."""

from __future__ import annotations

import pytest
import torch

import birkhoff
from birkhoff.api.load import _select_kernels, _stored_packed
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
    assert _select_kernels("auto", torch.device("cuda")) == "reference"


def test_triton_on_a_cpu_is_only_for_the_interpreter(monkeypatch):
    monkeypatch.setattr(gpu, "available", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(OptionError, match="runs on a CUDA device, but device is 'cpu'"):
        _select_kernels("triton", torch.device("cpu"))
    assert (
        _select_kernels("auto", torch.device("cuda"))
        == _select_kernels("triton", torch.device("cuda"))
        == "triton"
    )
    assert _select_kernels("auto", torch.device("cpu")) != "triton"


def test_only_released_formats_are_kept_packed(tmp_path):
    for dense, experts, packed in (("fp8", "fp4", True), ("fp8", "bf16", False), ("bf16", "fp4", False)):
        path = tmp_path / f"{dense}-{experts}"
        synth(path, "tiny", layers=1, dense=dense, experts=experts, mtp=False, tokenizer=False)
        assert _stored_packed(open_checkpoint(path)) is packed
