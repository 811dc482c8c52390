"""What other programs write is read here, and what is written here they read: logits, tensors and metadata agree."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

import birkhoff
from birkhoff.convert.check import tensor_values
from birkhoff.convert.convert import convert
from birkhoff.convert.presets import preset
from birkhoff.convert.synth import synth
from birkhoff.validate.runs import random_tokens
from birkhoff.validate.validate import validate
from birkhoff.weights.checkpoint import open_checkpoint
from birkhoff.weights.gguf import read_header
from birkhoff.weights.gguf_names import EH_PROJ, NEXTN, ROOT, GGUFName, block_name, trunk_name
from birkhoff.weights.layout import model_tensors
from tests.sizes import scaled

TOKENS = random_tokens(512, 80)


def our_logits(path: Path, **options) -> torch.Tensor:
    with birkhoff.load(path, kernels="reference", max_requests=1, cache_bytes=2**24, **options) as engine:
        return engine.logits(TOKENS)


def their_logits(model: DeepseekV4ForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        return model.float().eval()(torch.tensor([TOKENS])).logits[0]


def opened_by_transformers(path: Path) -> DeepseekV4ForCausalLM:
    return DeepseekV4ForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm() and (ours.argmax(-1) == theirs.argmax(-1)).all()


def saved_by_transformers(path: Path, dtype: torch.dtype, tied: bool) -> DeepseekV4ForCausalLM:
    """A model with weights of a sensible size, saved in shards of 200 kB."""
    raw = preset("tiny", mtp=False).to_dict() | {"tie_word_embeddings": tied}
    config = DeepseekV4Config(**raw, attn_implementation="eager")
    torch.manual_seed(3)
    model = DeepseekV4ForCausalLM(config).to(dtype)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("tid2eid"):
                tensor.copy_(torch.rand(len(tensor), 8).argsort(1)[:, : tensor.shape[1]])
            elif tensor.is_floating_point() and "inv_freq" not in name and "norm" not in name:
                tensor.normal_(0.0, 0.5 if tensor.ndim == 1 else tensor.shape[-1] ** -0.5)
    model.save_pretrained(path, max_shard_size="200KB")
    return model


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_what_save_pretrained_writes_loads_and_goes_on_to_other_formats(dtype, tied, tmp_path):
    saved_by_transformers(tmp_path / "saved", dtype, tied)
    theirs = opened_by_transformers(tmp_path / "saved")  # the frequencies of a model in memory have its dtype
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 10
    expected = their_logits(theirs)
    assert_close(our_logits(tmp_path / "saved"), expected)
    checkpoint = open_checkpoint(tmp_path / "saved")
    assert any("ties the head to the embedding" in notice for notice in checkpoint.notices) == tied
    for target in ("m.gguf", "m"):
        convert(tmp_path / "saved", tmp_path / target, experts="f32", dense="f32", exact=True)
        assert validate(tmp_path / target, tmp_path / "saved", length=40).ok
        assert not open_checkpoint(tmp_path / target).config.tie_word_embeddings
    assert_close(their_logits(opened_by_transformers(tmp_path / "m")), expected)


def test_a_stored_head_of_a_tied_model_is_skipped_as_transformers_does(tmp_path):
    theirs = saved_by_transformers(tmp_path, torch.float32, True)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shard = tmp_path / index["weight_map"]["model.embed_tokens.weight"]
    tensors = load_file(shard)
    tensors["head.weight"] = torch.randn(512, 64)
    save_file(tensors, shard, {"format": "pt"})
    index["weight_map"]["head.weight"] = shard.name
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert any(
        "the head.weight of the files was skipped" in notice for notice in open_checkpoint(tmp_path).notices
    )
    assert_close(our_logits(tmp_path), their_logits(theirs))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("interchange") / "tiny"
    synth(path, "tiny", seed=5)
    return path


@pytest.mark.parametrize("formats", [("bf16", "bf16"), ("f32", "f32"), ("f32", "bf16")])
def test_transformers_opens_a_directory_in_shards_with_equal_logits(tiny, formats, tmp_path):
    experts, dense = formats
    convert(tiny, tmp_path / "out", experts=experts, dense=dense, shard_bytes=500_000, exact=True)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    theirs = opened_by_transformers(tmp_path / "out")
    assert_close(our_logits(tmp_path / "out"), their_logits(theirs))
    assert_close(our_logits(tiny), their_logits(theirs))


@pytest.mark.parametrize("formats", [("fp4", "q8_0"), *scaled([("bf16", "bf16")], []), ("f32", "f32")])
def test_the_gguf_package_reads_every_tensor_and_key(tiny, formats, tmp_path):
    """Trunk in parts and the MTP file: the values of every tensor of the model, and every key, as we read them."""
    import gguf

    experts, dense = formats
    done = convert(tiny, tmp_path / "m.gguf", experts=experts, dense=dense, shard_bytes=800_000)
    files = [tmp_path / file["name"] for file in done.files]
    assert len(files) > 2 and files[-1].name == "m-mtp.gguf"
    ours, seen = open_checkpoint(files[0]), {}
    for file in files:
        reader, header = gguf.GGUFReader(file), read_header(file)
        theirs = {
            name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")
        }
        assert theirs.keys() == header.keys.keys()
        for key, value in header.keys.items():
            value = value.tolist() if isinstance(value, np.ndarray) else value
            same = theirs[key] == pytest.approx(value) if isinstance(value, float) else theirs[key] == value
            assert same, key
        assert [tensor.name for tensor in reader.tensors] == [tensor.name for tensor in header.tensors]
        for tensor in reader.tensors:
            is_table = tensor.tensor_type.name == "I32"
            values = tensor.data if is_table else gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            seen[tensor.name if "mtp" not in file.name else f"mtp {tensor.name}"] = values
    compared = 0
    for tensor in model_tensors(ours.config):
        prefix = f"blk.{ours.config.num_hidden_layers}"
        inside = tensor.name.removeprefix("mtp.0.")
        if tensor.name == inside:
            name = trunk_name(tensor.name)
        elif inside.startswith("hc_head_"):  # the block's own, under the names of the trunk's
            name = GGUFName(f"mtp {ROOT[inside]}")
        elif inside.endswith(("e_proj.weight", "h_proj.weight")):  # halves of one matrix
            half = seen[f"mtp {prefix}.{EH_PROJ}"][:, (0 if inside[0] == "e" else 64) :][:, :64]
            assert np.array_equal(half, tensor_values(ours, tensor, 0, 64).numpy())
            continue
        else:
            found = block_name(inside, prefix) or GGUFName(f"{prefix}.{NEXTN[inside]}")
            name = GGUFName(f"mtp {found.name}", found.expert)
        values = seen[name.name] if name.expert is None else seen[name.name][name.expert]
        read = tensor_values(ours, tensor, 0, tensor.shape[0]).numpy()
        assert np.array_equal(values.reshape(read.shape), read), tensor.name
        compared += 1
    assert compared > 300
