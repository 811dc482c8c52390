"""Writing the released layout: quantised values load bit-exactly, and failures leave no file."""

import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from birkhoff.config import V4Config
from birkhoff.convert.presets import preset
from birkhoff.errors import OptionError, TensorMissing, TensorShape, TensorUnexpected, TensorValue
from birkhoff.kernels import quant
from birkhoff.model.transformer import Transformer
from birkhoff.weights import expected_tensors, load_into, open_checkpoint, write_released
from birkhoff.weights.layout import model_tensors
from birkhoff.weights.tensor_ref import strips
from tests.weights.files import random_weights

TINY = preset("tiny")
STORAGE = {name: storage for name, _, storage in model_tensors(TINY)}


def rounded(weights: dict[str, torch.Tensor], dense: str, experts: str) -> dict[str, torch.Tensor]:
    """Round weights to the values that these formats can store."""
    to = {
        "fp8": lambda w: quant.dequant_fp8(*quant.quant_fp8(w)),
        "fp4": lambda w: quant.dequant_fp4(*quant.quant_fp4(w)),
        "bf16": lambda w: w.to(torch.bfloat16).float(),
        "f32": lambda w: w,
        "ids": lambda w: w,
    }
    formats = {"dense": dense, "expert": experts, "bf16": "f32" if dense == "f32" else "bf16"}
    return {name: to[formats.get(STORAGE[name], STORAGE[name])](w) for name, w in weights.items()}


@pytest.mark.parametrize("dense", ["fp8", "bf16", "f32"])
@pytest.mark.parametrize("experts", ["fp4", "fp8", "bf16", "f32"])
def test_written_weights_load_as_their_exact_rounding(dense, experts, tmp_path):
    weights = random_weights(TINY, seed=1)
    files = write_released(tmp_path / "c", TINY, weights.items(), dense, experts, shard_bytes=400_000)
    checkpoint = open_checkpoint(tmp_path / "c")
    assert checkpoint.notices == [] and len(checkpoint.files) == len(files) - 2 > 1
    table = expected_tensors(TINY, dense, experts)
    assert {n: (r.shape, r.dtype) for n, r in checkpoint.items()} == {
        n: (s.shape, s.dtype) for n, s in table.items()
    }
    model = Transformer(TINY)
    load_into(model.destinations(), checkpoint)
    expected = rounded(weights, dense, experts)
    for d in model.destinations():
        assert torch.equal(d.tensor.detach(), expected[d.name].to(d.tensor.dtype)), d.name
    # Writing rounded values again stores them unchanged.
    again = ((d.name, d.tensor.detach()) for d in model.destinations())
    write_released(tmp_path / "again", TINY, again, dense, experts)
    second = Transformer(TINY)
    load_into(second.destinations(), open_checkpoint(tmp_path / "again"))
    for first, other in zip(model.destinations(), second.destinations(), strict=True):
        assert torch.equal(first.tensor, other.tensor), first.name


def test_matrices_of_several_strips_are_quantised_as_one(tmp_path):
    """Strips end at tile boundaries, so the result equals quantising the whole matrix."""
    config = replace(
        preset("tiny", layers=1, mtp=False),
        hidden_size=1024,
        moe_intermediate_size=1300 // 32 * 32,
        n_routed_experts=2,
        num_attention_heads=65,
        o_groups=1,
        q_lora_rank=1024,
    )
    weights = random_weights(config, seed=4)
    names = (
        "layers.0.attn.wq_b.weight",
        "layers.0.ffn.experts.1.w1.weight",
        "layers.0.ffn.shared_experts.w1.weight",
    )
    assert all(len(list(strips(tuple(weights[name].shape)))) > 1 for name in names)
    assert any(weights[name].shape[0] % 128 for name in names), "one of them ends in a short tile"
    write_released(tmp_path, config, weights.items())
    model = Transformer(config)
    load_into(model.destinations(), open_checkpoint(tmp_path))
    loaded = {d.name: d.tensor.detach() for d in model.destinations()}
    for name in names:
        whole = quant.quant_fp4(weights[name]) if ".experts." in name else quant.quant_fp8(weights[name])
        unpack = quant.dequant_fp4 if ".experts." in name else quant.dequant_fp8
        assert torch.equal(loaded[name], unpack(*whole)), name


def test_any_order_of_pairs_and_rows_on_demand_write_the_same_bytes(tmp_path):
    weights = random_weights(TINY, seed=2)
    write_released(tmp_path / "pairs", TINY, reversed(list(weights.items())), shard_bytes=300_000)
    write_released(
        tmp_path / "rows", TINY, lambda name, start, stop: weights[name][start:stop], shard_bytes=300_000
    )
    names = sorted(os.listdir(tmp_path / "pairs"))
    assert names == sorted(os.listdir(tmp_path / "rows")) and len(names) > 4
    for name in names:
        assert (tmp_path / "pairs" / name).read_bytes() == (tmp_path / "rows" / name).read_bytes()


def test_config_and_index_say_what_was_written(tmp_path):
    write_released(tmp_path, TINY, random_weights(TINY).items())
    raw = json.loads((tmp_path / "config.json").read_text())
    assert (
        raw["model_type"] == "deepseek_v4"
        and raw["expert_dtype"] == "fp4"
        and raw["torch_dtype"] == "bfloat16"
    )
    assert raw["compress_ratios"] == [0, 0, 4, 128, 4, 128, 0]
    assert raw["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    assert V4Config.from_dict(raw) == replace(TINY, expert_dtype="fp4")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    tensors = load_file(tmp_path / "model-00001-of-00001.safetensors")
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())


def test_transformers_reads_what_we_write(tmp_path):
    from transformers import DeepseekV4ForCausalLM

    config = preset("tiny", mtp=False)
    weights = random_weights(config, seed=3)
    write_released(tmp_path, config, weights.items(), dense="f32", experts="f32")
    theirs = DeepseekV4ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    same = {
        "layers.2.attn.wo_a.weight": theirs["model.layers.2.self_attn.o_a_proj.weight"],
        "layers.3.ffn.gate.bias": theirs["model.layers.3.mlp.gate.e_score_correction_bias"],
        "layers.0.ffn.gate.tid2eid": theirs["model.layers.0.mlp.gate.tid2eid"],
        "layers.4.ffn.experts.5.w3.weight": theirs["model.layers.4.mlp.experts.gate_up_proj"][5, 64:],
        "layers.4.attn.compressor.ape": theirs["model.layers.4.self_attn.compressor.position_bias"],
        "layers.5.hc_ffn_fn": theirs["model.layers.5.ffn_hc.fn"],
        "hc_head_scale": theirs["model.hc_head.hc_scale"],
        "embed.weight": theirs["model.embed_tokens.weight"],
    }
    for name, tensor in same.items():
        assert torch.equal(tensor, weights[name]), name


def test_what_does_not_belong_is_refused_and_nothing_is_left(tmp_path):
    weights = random_weights(TINY)
    path = tmp_path / "c"

    def refused(kind, match, pairs, **kwargs):
        with pytest.raises(kind, match=match):
            write_released(path, TINY, pairs, shard_bytes=200_000, **kwargs)
        assert not path.exists() or os.listdir(path) == []

    few = {name: w for name, w in weights.items() if "layers.2.hc" not in name}
    refused(TensorMissing, r"6 tensors of the config were not given: layers\.2\.hc_attn_fn", few.items())
    refused(
        TensorUnexpected,
        r"stray is not a tensor of this model",
        [*weights.items(), ("stray", torch.zeros(1))],
    )
    refused(
        TensorUnexpected,
        r"norm\.weight was given twice",
        [*weights.items(), ("norm.weight", torch.zeros(64))],
    )
    short = {**weights, "norm.weight": torch.ones(63)}
    refused(TensorShape, r"norm\.weight is \(63,\), expected \(64,\)", short.items())
    bad = weights["layers.5.attn.wo_b.weight"].clone()
    bad[3, 4] = float("nan")
    holed = {**weights, "layers.5.attn.wo_b.weight": bad}
    refused(TensorValue, r"layers\.5\.attn\.wo_b\.weight\[3, 4\]", holed.items())
    table = weights["layers.0.ffn.gate.tid2eid"] + 7
    refused(
        TensorValue, "expected an expert from 0 to 7", {**weights, "layers.0.ffn.gate.tid2eid": table}.items()
    )
    refused(OptionError, "dense is 'q8'", weights.items(), dense="q8")
    with pytest.raises(OptionError, match="shard_bytes is 0"):
        write_released(path, TINY, weights.items(), shard_bytes=0)


def test_an_existing_checkpoint_is_never_overwritten(tmp_path):
    weights = random_weights(TINY)
    write_released(tmp_path, TINY, weights.items())
    before = {file: (tmp_path / file).read_bytes() for file in os.listdir(tmp_path)}
    with pytest.raises(OptionError, match="already holds a checkpoint"):
        write_released(tmp_path, TINY, random_weights(TINY, 9).items())
    assert before == {file: (tmp_path / file).read_bytes() for file in os.listdir(tmp_path)}


def test_progress_ends_at_the_total(tmp_path):
    seen: list[tuple[int, int]] = []
    write_released(tmp_path, TINY, random_weights(TINY).items(), progress=lambda *step: seen.append(step))
    total = sum(file.nbytes for file in open_checkpoint(tmp_path).values())
    assert seen[-1] == (total, total) and [done for done, _ in seen] == sorted(done for done, _ in seen)
