"""Captures as safetensors files."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from birkhoff.capture.sinks.result import CaptureFinish, CaptureRequest
from birkhoff.capture.store.export import to_safetensors
from birkhoff.capture.store.file_options import FileOptions
from birkhoff.capture.store.reader import read_request, to_torch
from birkhoff.capture.store.writer import CaptureWriter
from birkhoff.errors import CaptureFileError, CaptureWriteError
from tests.capture.disks import SoftDisk
from tests.capture.sample_chunks import chunk

SITES = [("mhc_streams_pre_attn", 2), ("mhc_attn_res_mix", 0), ("mlp_in", 1)]


@pytest.fixture
def directory(quick_path):
    with CaptureWriter(FileOptions(quick_path, coalesce_max_bytes=0), SoftDisk()) as files:
        files.begin(CaptureRequest("a", "a", "run", meta={"model": "nano"}))
        for start in (0, 2):
            for hook, layer in SITES:
                files.append(chunk("a", hook, layer, start, 2))
        assert files.finish(CaptureFinish("a", "stop", 4)).result(300).status == "ok"
    return quick_path / "run/a"


def test_every_tensor_and_label_arrives(directory, quick_path):
    out = quick_path / "a.safetensors"
    names = to_safetensors(out, directory)
    tensors, entries = load_file(out), read_request(directory)
    assert set(tensors) == set(names) and len(names) == 3 * 3 + 1
    for (hook, layer), entry in entries.items():
        name = f"{hook}.{layer}"
        assert tensors[name].dtype == to_torch(entry).dtype
        assert torch.equal(tensors[name].view(torch.uint8), to_torch(entry).view(torch.uint8))
        assert tensors[f"{name}.positions"].tolist() == entry.positions
        assert tensors[f"{name}.token_ids"].tolist() == entry.token_ids
    assert tensors["mlp_in.1.scale"].tolist() == entries["mlp_in", 1].scale.tolist()
    with safe_open(out, "pt") as file:
        assert file.metadata()["model"] == "nano" and file.metadata()["finish_reason"] == "stop"


def test_names_of_another_tool(directory, quick_path):
    names = to_safetensors(quick_path / "b.safetensors", read_request(directory), names="transformer_lens")
    assert {"blocks.2.hook_in", "blocks.0.attn_hc.hook_comb", "blocks.1.mlp_hc.hook_out.scale"} <= set(names)


def test_a_failed_export_leaves_no_file(directory, quick_path):
    with pytest.raises(CaptureWriteError, match="could not be written"):
        to_safetensors(quick_path / "no/where.safetensors", directory)
    with pytest.raises(CaptureFileError, match="no entries"):
        to_safetensors(quick_path / "c.safetensors", {})
    assert not list(quick_path.glob("*.safetensors*"))
