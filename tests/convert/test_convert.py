"""Round-trip conversions: lossless ones are bit-exact, lossy ones report it, other readers agree."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DeepseekV4ForCausalLM

import birkhoff
from birkhoff.convert.check import check_output, tensor_values
from birkhoff.convert.convert import convert
from birkhoff.convert.synth import synth
from birkhoff.embedded import EMBEDDED
from birkhoff.errors import CheckpointError, ConvertError, OptionError
from birkhoff.validate.runs import build, random_tokens, run_model
from birkhoff.weights.checkpoint import open_checkpoint
from birkhoff.weights.inspect import inspect_checkpoint
from birkhoff.weights.layout import model_tensors
from tests.convert.files import same_bytes, same_numbers
from tests.sizes import scaled

NANO = EMBEDDED / "nano"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("convert") / "tiny"
    synth(path, "tiny", seed=5)
    return path


@pytest.mark.parametrize(
    ("which", "experts", "dense"),
    [
        ("tiny", "mxfp4", "bf16"),
        ("tiny", "bf16", "bf16"),
        ("tiny", "f32", "f32"),
        ("tiny", "mxfp4", "f32"),
        ("nano", "mxfp4", "bf16"),
        *scaled([("nano", "f32", "f32"), ("nano", "bf16", "bf16")], []),
    ],
)
def test_lossless_choices_come_back_byte_for_byte(which, experts, dense, tiny, tmp_path):
    source = tiny if which == "tiny" else NANO
    there = convert(source, tmp_path / "m.gguf", experts=experts, dense=dense, exact=True)
    assert not any(row["changed"] for row in there.rounding.values())
    assert same_numbers(source, tmp_path / "m.gguf") == []
    convert(tmp_path / "m.gguf", tmp_path / "back", exact=True)
    assert same_bytes(source, tmp_path / "back") == []
    config, back = open_checkpoint(source).config, open_checkpoint(tmp_path / "back").config
    assert back == config
    assert (tmp_path / "back/tokenizer.json").read_text() == (source / "tokenizer.json").read_text()


def test_q8_0_rounds_dense_matrices_and_nothing_else(tiny, tmp_path):
    done = convert(tiny, tmp_path / "m.gguf")
    assert done.rounding["dense"]["changed"] > 0 and done.rounding["dense"]["worst"] < 1 / 240
    assert not done.rounding["experts"]["changed"] and not done.rounding["vocabulary"]["changed"]
    different = same_numbers(tiny, tmp_path / "m.gguf")
    assert different and all(
        ".attn.w" in n or "shared" in n or "indexer.wq" in n or "_proj" in n for n in different
    )
    with pytest.raises(ConvertError, match="numbers would change"):
        convert(tiny, tmp_path / "x.gguf", exact=True)
    assert not (tmp_path / "x.gguf").exists()


def test_every_q8_0_tensor_has_the_bytes_of_the_gguf_package_and_the_error_of_eight_bits(tmp_path):
    """The error of a block is uniform within half a step of a 127th of its largest value."""
    import gguf

    convert(NANO, tmp_path / "m.gguf")
    source, output = open_checkpoint(NANO), open_checkpoint(tmp_path / "m.gguf")
    raw = {path: path.read_bytes() for path in output.files}
    checked = 0
    for tensor in model_tensors(source.config):
        ref = output[tensor.name]
        if ref.encoding != "Q8_0":
            continue
        checked += 1
        values = tensor_values(source, tensor, 0, tensor.shape[0])
        read = tensor_values(output, tensor, 0, tensor.shape[0])
        theirs = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType.Q8_0)
        if ref.location is not None:
            path, offset = ref.location
            assert raw[path][offset : offset + ref.nbytes] == theirs.tobytes(), tensor.name
        assert np.array_equal(gguf.quants.dequantize(theirs, gguf.GGMLQuantizationType.Q8_0), read.numpy())
        steps = values.view(-1, 32).abs().amax(1) / 127
        expected = float(steps.double().pow(2).mean().div(12).sqrt() / values.double().pow(2).mean().sqrt())
        assert 0.8 < float((read - values).norm() / values.norm()) / expected < 1.2, tensor.name
    assert checked == 77


def test_logits_of_gguf_files_are_within_their_gates(tmp_path):
    """Lossless weights give equal logits; Q8_0 is close on the trained model (8.5)."""
    tokens = list(range(100, 228))
    with birkhoff.load("nano", kernels="reference", max_requests=1, cache_bytes=2**24) as engine:
        expected = engine.logits(tokens)
    more = scaled([("f32", "f32", 0.0), ("bf16", "bf16", 0.0)], [])
    for experts, dense, most in (("mxfp4", "bf16", 0.0), ("mxfp4", "q8_0", 3e-2), *more):
        path = tmp_path / f"{experts}-{dense}.gguf"
        convert("nano", path, experts=experts, dense=dense)
        with birkhoff.load(path, kernels="reference", max_requests=1, cache_bytes=2**24) as engine:
            logits = engine.logits(tokens)
            assert engine.tokenizer.encode("Once upon a time")
        error = float((logits - expected).norm() / expected.norm())
        agree = float((logits.argmax(-1) == expected.argmax(-1)).float().mean())
        print(f"{experts}/{dense}: relative error {error:.2e}, argmax {agree:.3f}")
        assert error <= most and agree >= (1.0 if most == 0 else 0.94)


def test_the_gguf_package_reads_the_same(tiny, tmp_path):
    """Names, shapes, types, values and metadata as read by the `gguf` package."""
    import gguf

    convert(tiny, tmp_path / "m.gguf")
    checkpoint = open_checkpoint(tiny)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    names = [tensor.name for tensor in reader.tensors]
    assert (
        len(names) == len(set(names)) == 178
        and reader.fields["general.architecture"].contents() == "deepseek4"
    )
    by_name = {tensor.name: tensor for tensor in reader.tensors}

    def values(name):
        tensor = by_name[name]
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type)

    embed = checkpoint["embed.weight"].read().float().numpy()
    assert np.array_equal(values("token_embd.weight"), embed)
    ours = open_checkpoint(tmp_path / "m.gguf")
    for name, theirs in (
        ("layers.2.attn.wq_b.weight", "blk.2.attn_q_b.weight"),
        ("layers.4.hc_ffn_fn", "blk.4.hc_ffn_fn.weight"),
        ("layers.3.attn.compressor.ape", "blk.3.attn_compressor_ape.weight"),
    ):
        assert np.array_equal(values(theirs), ours[name].read().float().numpy())
    stack = values("blk.5.ffn_down_exps.weight")
    tensors = {t.name: t for t in model_tensors(checkpoint.config)}
    for expert in range(8):
        one = tensors[f"layers.5.ffn.experts.{expert}.w2.weight"]
        assert np.array_equal(stack[expert], tensor_values(checkpoint, one, 0, 64).numpy())
    table = by_name["blk.0.ffn_gate_tid2eid.weight"]
    assert table.tensor_type.name == "I32" and np.array_equal(
        table.data, checkpoint["layers.0.ffn.gate.tid2eid"].read().numpy()
    )
    assert by_name["blk.0.attn_output_a.weight"].shape.tolist() == [64, 32]  # ggml dimension order
    for key in (
        "rope.dimension_count",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
    ):
        assert f"deepseek4.{key}" in reader.fields
    assert reader.fields["tokenizer.ggml.tokens"].contents()[0].startswith("<｜begin")


def test_transformers_reads_an_unquantized_directory(tiny, tmp_path):
    convert(tiny, tmp_path / "out", experts="bf16", dense="bf16", exact=True)
    theirs = DeepseekV4ForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    ids = random_tokens(512, 80)
    with torch.no_grad():
        logits = theirs(torch.tensor([ids])).logits[0]
    ours = run_model(build(open_checkpoint(tiny)), ids, "tiny").logits
    assert (logits - ours).norm() <= 1e-5 * ours.norm()


def test_the_mtp_file_has_its_own_head_and_both_projections_side_by_side(tiny, tmp_path):
    import gguf

    done = convert(tiny, tmp_path / "m.gguf", experts="f32", dense="f32")
    assert [file["name"] for file in done.files] == ["m.gguf", "m-mtp.gguf"]
    source, reader = open_checkpoint(tiny), gguf.GGUFReader(tmp_path / "m-mtp.gguf")
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    assert np.array_equal(tensors["output_hc_base.weight"], source["mtp.0.hc_head_base"].read().numpy())
    both = tensors["blk.6.nextn.eh_proj.weight"]
    opened = open_checkpoint(tmp_path / "m.gguf")
    assert both.shape == (64, 128) and opened.has_mtp
    assert np.array_equal(both[:, :64], opened["mtp.0.e_proj.weight"].read().numpy())
    assert np.array_equal(both[:, 64:], opened["mtp.0.h_proj.weight"].read().numpy())
    assert reader.fields["deepseek4.block_count"].contents() == 7
    assert reader.fields["deepseek4.nextn_predict_layers"].contents() == 1
    (tmp_path / "m-mtp.gguf").rename(tmp_path / "elsewhere.gguf")
    assert not open_checkpoint(tmp_path / "m.gguf").has_mtp
    with pytest.raises(CheckpointError, match="holds an MTP block alone"):
        open_checkpoint(tmp_path / "elsewhere.gguf")


def test_dialect_b_is_written_and_read(tiny, tmp_path):
    import gguf

    convert(tiny, tmp_path / "m.gguf", preset="ds4")
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    for name, kind in {
        "token_embd.weight": "F16",
        "blk.0.hc_attn_fn.weight": "F16",
        "blk.2.attn_compressor_ape.weight": "F16",
        "blk.2.indexer.proj.weight": "F16",
        "blk.0.attn_q_a.weight": "Q8_0",
        "output.weight": "Q8_0",
        "blk.0.attn_norm.weight": "F32",
        "blk.0.attn_sinks.weight": "F32",
        "blk.0.hc_attn_base.weight": "F32",
        "blk.3.exp_probs_b.bias": "F32",
        "blk.0.ffn_gate_exps.weight": "MXFP4",
        "blk.0.ffn_gate_tid2eid.weight": "I32",
    }.items():
        assert kinds[name] == kind, name
    names = {t.name for t in gguf.GGUFReader(tmp_path / "m-mtp.gguf").tensors}
    assert {"mtp.0.e_proj.weight", "mtp.0.hc_head_fn.weight", "mtp.0.attn_q_a.weight"} <= names
    opened = open_checkpoint(tmp_path / "m.gguf")
    assert (
        opened.dialect == "gguf-ds4"
        and opened.has_mtp
        and inspect_checkpoint(tmp_path / "m.gguf").problems == []
    )
    different = same_numbers(tiny, tmp_path / "m.gguf")
    assert not any(
        ".ffn.experts." in name or name.endswith(("norm.weight", "sink", "bias")) for name in different
    )
    with pytest.raises(OptionError, match="fixes dense to q8_0"):
        convert(tiny, tmp_path / "y.gguf", preset="ds4", dense="bf16")


def test_split_files_are_one_model(tiny, tmp_path):
    done = convert(tiny, tmp_path / "m.gguf", experts="f32", dense="f32", shard_bytes=700_000)
    parts = [file["name"] for file in done.files if "-of-" in file["name"]]
    assert len(parts) > 3 and parts[0] == f"m-00001-of-{len(parts):05}.gguf"
    assert same_numbers(tiny, tmp_path / parts[0]) == same_numbers(tiny, tmp_path / parts[2]) == []
    assert open_checkpoint(tmp_path / parts[1]).has_mtp
    os.rename(tmp_path / parts[2], tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"1 of .* parts are missing"):
        open_checkpoint(tmp_path / parts[0])
    (tmp_path / parts[2]).write_bytes((tmp_path / parts[1]).read_bytes())
    with pytest.raises(CheckpointError, match="come from different downloads"):
        open_checkpoint(tmp_path / parts[0])
    os.rename(tmp_path / parts[0], tmp_path / "alone.gguf")
    with pytest.raises(CheckpointError, match="its name does not say which"):
        open_checkpoint(tmp_path / "alone.gguf")


def test_plain_numbers_become_codes_and_say_what_changed(tmp_path):
    synth(tmp_path / "plain", "tiny", dense="bf16", experts="bf16", mtp=False)
    done = convert(tmp_path / "plain", tmp_path / "codes")
    assert done.rounding["experts"]["changed"] > 0 and done.rounding["dense"]["changed"] > 0
    assert inspect_checkpoint(tmp_path / "codes").problems == []
    expanded = convert(tmp_path / "codes", tmp_path / "expanded", experts="bf16", dense="bf16", exact=True)
    assert not any(row["changed"] for row in expanded.rounding.values())
    assert same_numbers(tmp_path / "codes", tmp_path / "expanded") == []
    convert(
        tmp_path / "expanded", tmp_path / "again", exact=True
    )  # values that fit FP8 and FP4 are unchanged
    assert same_numbers(tmp_path / "codes", tmp_path / "again") == []
    mxfp4 = convert(tmp_path / "plain", tmp_path / "q.gguf")
    assert mxfp4.rounding["experts"]["changed"] > 0 and mxfp4.rounding["experts"]["worst"] < 0.3


def test_experts_as_fp8_are_exact_while_scales_are_near(tiny, tmp_path):
    convert(tiny, tmp_path / "fp8", experts="fp8", exact=True)
    assert same_numbers(tiny, tmp_path / "fp8") == []


def test_a_dry_run_says_it_all_and_writes_nothing(tiny, tmp_path):
    planned = convert(tiny, tmp_path / "m.gguf", dry_run=True)
    assert not planned.written and list(tmp_path.iterdir()) == []
    done = convert(tiny, tmp_path / "m.gguf")
    assert planned.files == done.files and planned.bytes_by_class == done.bytes_by_class
    assert sum(file.stat().st_size for file in tmp_path.glob("*.gguf")) == planned.bytes


def test_what_is_kept_beside_the_output(tiny, tmp_path):
    import hashlib

    done = convert(tiny, tmp_path / "m.gguf")
    manifest = json.loads((tmp_path / "m.gguf.json").read_text())
    raw = (tmp_path / "m.gguf").read_bytes()
    from birkhoff.weights.gguf import read_header

    tensor = next(t for t in read_header(tmp_path / "m.gguf").tensors if t.name == "blk.1.attn_q_a.weight")
    digest = hashlib.sha256(raw[tensor.offset : tensor.offset + tensor.nbytes]).hexdigest()
    assert manifest["sha256"]["m.gguf"]["blk.1.attn_q_a.weight"] == digest
    assert sum(map(len, manifest["sha256"].values())) == done.units
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m-mtp.gguf", "m.gguf", "m.gguf.json"]


def test_an_output_is_never_overwritten(tiny, tmp_path):
    convert(tiny, tmp_path / "m.gguf")
    with pytest.raises(ConvertError, match="already exists"):
        convert(tiny, tmp_path / "m.gguf")
    convert(tiny, tmp_path / "d")
    with pytest.raises(ConvertError, match="already exists"):
        convert(tiny, tmp_path / "d")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"to": "onnx"}, "to is 'onnx'"),
        ({"experts": "q4_k"}, "experts is 'q4_k'"),
        ({"dense": "fp8"}, "dense is 'fp8'"),
        ({"preset": "other"}, "preset is 'other'"),
        ({"shard_bytes": 0}, "shard_bytes is 0"),
        ({"workers": 0}, "workers is 0"),
    ],
)
def test_options_are_checked(tiny, tmp_path, options, words):
    with pytest.raises(OptionError, match=words):
        convert(tiny, tmp_path / "m.gguf", **options)


@pytest.mark.parametrize("name", ["m.gguf", "m"])
def test_fp4_has_one_name_for_both_targets_and_an_alias(tiny, tmp_path, name):
    done = convert(tiny, tmp_path / "one" / name, experts="mxfp4", dry_run=True)
    same = convert(tiny, tmp_path / "one" / name, experts="fp4", dry_run=True)
    assert done == same and done.experts == "fp4" and done.bytes_by_class["experts"] == 313_344
    other = (
        "a directory takes fp4 (or mxfp4), fp8, bf16 or f32"
        if name == "m.gguf"
        else "a GGUF file takes fp4 (or mxfp4)"
    )
    with pytest.raises(OptionError) as raised:
        convert(tiny, tmp_path / name, experts="q4_k")
    assert "experts is 'q4_k', expected fp4 (or mxfp4), " in str(raised.value) and other in str(raised.value)
    with pytest.raises(OptionError, match=r"dense is 'int8', expected .* takes (q8_0|fp8), bf16 or f32"):
        convert(tiny, tmp_path / name, dense="int8")


def test_the_check_at_the_end_sees_a_changed_byte(tiny, tmp_path):
    convert(tiny, tmp_path / "m.gguf", dense="bf16")
    source, output = open_checkpoint(tiny), open_checkpoint(tmp_path / "m.gguf")
    assert check_output(source, output, {}) == 252
    with open(tmp_path / "m.gguf", "r+b") as file:
        file.seek(output._tensors.source("norm.weight").offset)
        file.write(b"\x12\x34\x56\x40")
    with pytest.raises(ConvertError, match=r"norm\.weight rows 0 to 63 read back differently"):
        check_output(source, output, {})


def test_a_damaged_source_fails_and_leaves_no_output(tiny, tmp_path):
    import shutil

    broken = Path(shutil.copytree(tiny, tmp_path / "broken"))
    checkpoint = open_checkpoint(broken)
    entry = checkpoint._tensors._entries["layers.1.ffn.experts.2.w1.scale"]
    with open(entry.path, "r+b") as file:
        file.seek(entry.offset)
        file.write(b"\xff")
    with pytest.raises(birkhoff.errors.TensorValue, match=r"experts\.2\.w1\.scale\[0, 0\] is NaN"):
        convert(broken, tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_configs_survive_with_and_without_yarn(tmp_path):
    from birkhoff.convert.presets import PRESETS
    from birkhoff.weights.gguf_keys import config_from_metadata, metadata_of

    for config in PRESETS.values():
        for changed in (config, replace(config, rope_scaling=None, num_hash_layers=0)):
            keys = {key.name: key.value for key in metadata_of(changed)}
            keys |= {
                "general.architecture": "deepseek4",
                "tokenizer.ggml.bos_token_id": 0,
                "tokenizer.ggml.eos_token_id": 1,
            }
            assert config_from_metadata(keys, {}, "x") == replace(changed, num_nextn_predict_layers=0)


def test_torch_is_left_in_peace(tiny, tmp_path):
    threads = torch.get_num_threads()
    convert(tiny, tmp_path / "m.gguf", workers=3)
    assert torch.get_num_threads() == threads
