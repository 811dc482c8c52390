"""Opening checkpoints: every dialect, tensors left out deliberately, and every kind of damaged file."""

import json
import os
import shutil
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from birkhoff.api.load import load
from birkhoff.config import V4Config
from birkhoff.convert.presets import preset
from birkhoff.convert.synth import synth
from birkhoff.errors import (
    BirkhoffError,
    CheckpointError,
    ConfigError,
    OptionError,
    TensorDtype,
    TensorMissing,
    TensorShape,
    TensorUnexpected,
    UnsupportedModel,
)
from birkhoff.weights import open_checkpoint
from birkhoff.weights.layout import expected_tensors
from tests.weights.files import all_tensors, edit, edit_config

INDEX = "model.safetensors.index.json"


def test_a_released_directory(tiny_path):
    checkpoint = open_checkpoint(tiny_path)
    assert len(checkpoint.files) > 3, "the fixture is meant to have several shards"
    assert (checkpoint.dialect, checkpoint.has_mtp, checkpoint.notices) == ("released", True, [])
    assert checkpoint.config == replace(preset("tiny"), expert_dtype="fp4")
    assert checkpoint.keys() == expected_tensors(preset("tiny")).keys()
    theirs = all_tensors(tiny_path)
    for name, ref in checkpoint.items():
        assert (ref.name, ref.shape, ref.nbytes) == (name, tuple(theirs[name].shape), theirs[name].nbytes)
    scale = checkpoint["layers.0.attn.wq_a.scale"].read()
    assert scale.dtype == torch.uint8
    assert torch.equal(scale, theirs["layers.0.attn.wq_a.scale"].view(torch.uint8))
    weight = checkpoint["layers.0.attn.wq_a.weight"]
    assert torch.equal(weight.rows(3, 9).view(torch.uint8), theirs[weight.name].view(torch.uint8)[3:9])


def test_reading_order_is_file_order(tiny_path):
    checkpoint = open_checkpoint(tiny_path)
    entries = [checkpoint[name].reader.args[0] for name in checkpoint]
    assert [(e.path, e.offset) for e in entries] == sorted((e.path, e.offset) for e in entries)


@pytest.mark.parametrize(
    ("dense", "experts", "dialect"),
    [
        ("fp8", "fp4", "released"),
        ("fp8", "fp8", "base-fp8"),
        ("bf16", "bf16", "bf16"),
        ("f32", "f32", "bf16"),
        ("bf16", "fp4", "released"),
    ],
)
def test_dialects_by_number_format(dense, experts, dialect, tmp_path):
    synth(tmp_path / "c", "tiny", dense=dense, experts=experts)
    assert open_checkpoint(tmp_path / "c").dialect == dialect


def test_one_file_and_numbered_files_need_no_index(broken, tmp_path):
    tensors = all_tensors(broken)
    (broken / INDEX).unlink()
    assert len(open_checkpoint(broken)) == len(tensors)  # numbered shards need no index
    edit(broken, lambda tensors: None, index=False)
    (broken / "model-00001-of-00001.safetensors").rename(broken / "model.safetensors")
    assert len(open_checkpoint(broken)) == len(tensors)
    assert len(open_checkpoint(broken / "model.safetensors")) == len(tensors)


def save_transformers(path, config: V4Config, **kwargs):
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**config.to_dict())).to(kwargs.pop("dtype", torch.float32))
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("tid2eid"):
                tensor.copy_(
                    torch.rand(len(tensor), config.n_routed_experts).argsort(1)[:, : tensor.shape[1]]
                )
            elif tensor.is_floating_point() and "inv_freq" not in name:
                tensor.normal_()
    model.save_pretrained(path, **kwargs)
    return model


@pytest.mark.parametrize("shard_size", ["200KB", "50GB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_transformers_saves(tmp_path, shard_size, dtype):
    config = preset("tiny")
    model = save_transformers(tmp_path, config, max_shard_size=shard_size, dtype=dtype)
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.dialect, checkpoint.has_mtp) == ("transformers", False)
    assert checkpoint.notices == ["MTP blocks announced by config.json: 1; found in the files: 0."]
    assert checkpoint.config == preset("tiny", mtp=False)
    assert checkpoint.keys() == expected_tensors(preset("tiny", mtp=False), "bf16", "bf16").keys()
    theirs = model.state_dict()
    same = {
        "layers.1.attn.kv_norm.weight": theirs["model.layers.1.self_attn.kv_norm.weight"],
        "layers.2.attn.compressor.norm.weight": theirs["model.layers.2.self_attn.compressor.kv_norm.weight"],
        "layers.2.attn.indexer.compressor.norm.weight": theirs[
            "model.layers.2.self_attn.compressor.indexer.kv_norm.weight"
        ],
        "layers.4.ffn.experts.5.w1.weight": theirs["model.layers.4.mlp.experts.gate_up_proj"][5, :64],
        "layers.4.ffn.experts.5.w3.weight": theirs["model.layers.4.mlp.experts.gate_up_proj"][5, 64:],
        "layers.4.ffn.experts.5.w2.weight": theirs["model.layers.4.mlp.experts.down_proj"][5],
        "layers.3.ffn.gate.bias": theirs["model.layers.3.mlp.gate.e_score_correction_bias"],
        "hc_head_base": theirs["model.hc_head.hc_base"],
        "head.weight": theirs["lm_head.weight"],
        "norm.weight": theirs["model.norm.weight"],
        "embed.weight": theirs["model.embed_tokens.weight"],
    }
    for name, tensor in same.items():
        assert torch.equal(checkpoint[name].read(), tensor), name


def test_copies_of_the_tables_inside_mtp_are_skipped(broken):
    edit(
        broken,
        lambda t: t.update({"mtp.0.emb.tok_emb.weight": torch.zeros(2), "mtp.0.head.weight": torch.zeros(2)}),
    )
    checkpoint = open_checkpoint(broken)
    assert checkpoint.notices == [
        "2 copies of the trunk's tables inside MTP were skipped: mtp.0.emb.tok_emb.weight, mtp.0.head.weight."
    ]
    assert checkpoint.has_mtp and "mtp.0.head.weight" not in checkpoint


def test_a_dspark_drafter_is_skipped_and_its_parts_are_named(broken, tmp_path):
    untouched = shutil.copytree(broken, tmp_path / "untouched")

    def drafter(tensors):
        for name in [name for name in tensors if name.startswith("mtp.0.")]:
            for stage in (1, 2):
                tensors[name.replace("mtp.0.", f"mtp.{stage}.")] = tensors[name].clone()
        for name in [name for name in tensors if name.startswith("mtp.") and "_proj." in name]:
            del tensors[name]
        tensors["mtp.0.main_proj.weight"] = torch.zeros(64, 192)
        tensors["mtp.2.markov_head.markov_w1.weight"] = torch.zeros(512, 8)
        tensors["mtp.2.confidence_head.proj.weight"] = torch.zeros(1, 72)

    edit(
        edit_config(
            broken,
            num_nextn_predict_layers=3,
            compress_ratios=[0, 0, 4, 128, 4, 128, 0, 0, 0],
            dspark_target_layer_ids=[3, 4, 5],
            dspark_block_size=5,
            dspark_noise_token_id=9,
            dspark_markov_rank=8,
        ),
        drafter,
    )
    checkpoint = open_checkpoint(broken)
    assert not checkpoint.has_mtp and checkpoint.config.num_nextn_predict_layers == 0
    assert not any(name.startswith("mtp.") for name in checkpoint)
    (notice,) = [text for text in checkpoint.notices if "unknown key" not in text]
    assert "DSpark drafter" in notice and "greedy tokens are the same" in notice
    assert checkpoint.drafter is not None and checkpoint.drafter.startswith("a DSpark drafter of 3 stages")
    for part in (
        "main_proj: the stream means after layers 3, 4, 5",
        "block of 5 positions",
        "markov_head",
        "confidence",
    ):
        assert part in checkpoint.drafter
    sampling = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    options = {"kernels": "reference", "cache_bytes": 2**22, "max_context": 256}
    with load(broken, **options) as engine:  # runs without it
        tokens = engine.generate([5, 80, 3], **sampling).token_ids
    with pytest.raises(OptionError, match=r"but a DSpark drafter of 3 stages\. Not supported: main_proj"):
        load(broken, **options, speculative=True)
    with load(untouched, **options, speculative=True) as engine:  # the same trunk with its MTP block
        assert engine.generate([5, 80, 3], **sampling).token_ids == tokens


def test_mtp_that_is_absent_or_not_wanted(broken, tmp_path):
    other = shutil.copytree(broken, tmp_path / "other")
    edit(broken, lambda t: [t.pop(name) for name in list(t) if name.startswith("mtp.")])
    checkpoint = open_checkpoint(broken)
    assert not checkpoint.has_mtp and "found in the files: 0" in checkpoint.notices[0]
    edit_config(other, num_nextn_predict_layers=0)
    checkpoint = open_checkpoint(other)
    assert not checkpoint.has_mtp and not any(name.startswith("mtp.") for name in checkpoint)
    assert "tensors beyond that were skipped: mtp.0." in checkpoint.notices[0]


def test_unknown_config_keys_become_notices(broken):
    edit_config(broken, favourite_colour="blue")
    assert open_checkpoint(broken).notices == [
        "config.json has the unknown key 'favourite_colour'; it was not used."
    ]


def refuse(path, kind=CheckpointError, match=""):
    with pytest.raises(kind, match=match) as caught:
        open_checkpoint(path)
    assert len(str(caught.value)) > 40, "say what was seen, what was expected and the next move"
    return str(caught.value)


def shard(path, number=2):
    return sorted(path.glob("*.safetensors"))[number]


def test_a_missing_shard_is_named(broken):
    name = shard(broken).name
    shard(broken).unlink()
    assert name in refuse(broken, match="1 of .* shards named by .* are missing")
    (broken / INDEX).unlink()
    assert name in refuse(broken, match="1 of .* shards are missing")


def test_a_truncated_shard_is_named(broken):
    file = shard(broken)
    os.truncate(file, file.stat().st_size - 1)
    assert file.name in refuse(broken, match="cut short")
    os.truncate(file, 100)
    assert file.name in refuse(broken, match="cut short")
    os.truncate(file, 0)
    assert file.name in refuse(broken, match="0 bytes")


def test_an_extra_shard_is_named(broken):
    save_file({"a": torch.zeros(1)}, broken / "model-00009-of-00009.safetensors")
    assert "model-00009-of-00009" in refuse(broken, match="extra shard")
    (broken / INDEX).unlink()
    refuse(broken, match="extra shard")
    (broken / "model-00009-of-00009.safetensors").rename(broken / "stray.safetensors")
    assert "stray" in refuse(broken, match="extra shard")


def test_index_and_shards_must_agree(broken):
    index = json.loads((broken / INDEX).read_text())
    name = next(iter(index["weight_map"]))
    index["weight_map"]["layers.0.invented"] = index["weight_map"][name]
    (broken / INDEX).write_text(json.dumps(index))
    refuse(broken, match=r"not in the shards the index places them in: layers\.0\.invented")
    del index["weight_map"]["layers.0.invented"], index["weight_map"][name]
    (broken / INDEX).write_text(json.dumps(index))
    assert name in refuse(broken, match="holds 1 tensors which the index does not place there")


def test_a_name_in_two_shards_is_an_error(broken):
    first, second = shard(broken, 0), shard(broken, 1)
    tensors = load_file(second)
    name, tensor = next(iter(load_file(first).items()))
    save_file({**tensors, name: tensor}, second)
    assert name in refuse(broken, match="and again in")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "not valid JSON"),
        ("[]", "no weight_map"),
        ("{}", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": 1}}', "expected the name of a safetensors file"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "expected the name of a safetensors file"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "expected the name of a safetensors file"),
    ],
)
def test_a_bad_index_is_refused(broken, content, reason):
    (broken / INDEX).write_text(content)
    refuse(broken, match=reason)


def test_an_index_with_another_byte_count_is_a_notice(broken):
    index = json.loads((broken / INDEX).read_text())
    index["metadata"]["total_size"] += 1
    (broken / INDEX).write_text(json.dumps(index))
    assert "the shards hold" in open_checkpoint(broken).notices[0]


def test_extra_and_missing_tensors_are_named(broken, tmp_path):
    other = shutil.copytree(broken, tmp_path / "other")
    edit(broken, lambda t: t.update({"layers.0.attn.wq_c.weight": torch.zeros(2)}))
    refuse(broken, TensorUnexpected, r"1 tensors the model has no place for: layers\.0\.attn\.wq_c\.weight")
    edit(other, lambda t: [t.pop("layers.1.ffn.experts.3.w2.weight"), t.pop("layers.2.attn.compressor.ape")])
    message = refuse(other, TensorMissing, "2 tensors that the config implies are not in the files")
    assert "layers.1.ffn.experts.3.w2.weight" in message and "layers.2.attn.compressor.ape" in message


def test_a_scale_must_be_there_and_nowhere_else(broken, tmp_path):
    other = shutil.copytree(broken, tmp_path / "other")
    edit(broken, lambda t: t.pop("layers.0.attn.wo_b.scale"))
    refuse(broken, TensorMissing, r"layers\.0\.attn\.wo_b\.scale")
    edit(other, lambda t: t.update({"layers.0.attn.wo_b.weight": torch.zeros(64, 32)}))
    refuse(other, TensorUnexpected, r"layers\.0\.attn\.wo_b\.scale")


WRONG = {
    "shape": (
        "layers.0.attn.wq_a.weight",
        torch.zeros(32, 65),
        TensorShape,
        r"is \(32, 65\), expected \(32, 64\)",
    ),
    "transposed": (
        "layers.2.attn.compressor.ape",
        torch.zeros(64, 4),
        TensorShape,
        r"\(64, 4\), expected \(4, 64\)",
    ),
    "fp4 not halved": (
        "layers.0.ffn.experts.0.w1.weight",
        torch.zeros(64, 64, dtype=torch.int8),
        TensorShape,
        r"expected \(64, 32\)",
    ),
    "scale shape": (
        "layers.3.attn.wo_b.scale",
        torch.zeros(2, 1, dtype=torch.uint8),
        TensorShape,
        r"is \(2, 1\), expected \(1, 1\) for 128x128 fp8 blocks",
    ),
    "scale dtype": (
        "layers.3.attn.wo_b.scale",
        torch.zeros(1, 1),
        TensorDtype,
        "stored as F32, expected F8_E8M0",
    ),
    "integer weight": ("embed.weight", torch.zeros(512, 64, dtype=torch.int64), TensorDtype, "stored as I64"),
    "fp8 vector": ("norm.weight", torch.zeros(64).to(torch.float8_e4m3fn), TensorDtype, "stored as F8_E4M3"),
    "float table": ("layers.0.ffn.gate.tid2eid", torch.zeros(512, 2), TensorDtype, "expected I64 or I32"),
    "narrow table": (
        "layers.0.ffn.gate.tid2eid",
        torch.zeros(512, 1, dtype=torch.int64),
        TensorShape,
        r"\(512, 2\)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_shapes_and_dtypes_are_named(broken, case):
    name, tensor, kind, reason = WRONG[case]
    edit(broken, lambda t: t.update({name: tensor}))
    assert refuse(broken, kind, reason).startswith(name)


def test_other_models_are_refused_by_name(broken):
    edit(broken, lambda t: t.update({"layers.1.engram.table.weight": torch.zeros(2)}))
    refuse(broken, UnsupportedModel, r"DeepSeek-V4\.1")
    edit_config(broken, model_type="deepseek_v41")
    refuse(broken, UnsupportedModel, r"DeepSeek-V4\.1")


V41 = {
    "architectures": ["DeepseekV41ForConditionalGeneration"],
    "model_type": "deepseek_v41",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]},
    "text_config": {
        "model_type": "deepseek_v41_text",
        "num_hidden_layers": 40,
        "hidden_size": 5120,
        "n_routed_experts": 384,
        "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0, 0, 0],
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "candidate_source_layer_id": 20,
        "engram_layer_ids": [1, 14],
        "dspark_target_layer_ids": [37, 38, 39],
    },
    "vision_config": {"num_hidden_layers": 32},
}


def test_a_config_of_v41_is_recognised_and_each_missing_part_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(V41))
    with pytest.raises(UnsupportedModel) as refused:
        load(tmp_path)
    text = str(refused.value)
    assert "this is DeepSeek-V4.1 (40 layers, 5120 wide, 384 experts)" in text
    for part in (
        "(1) delayed mHC",
        "queries without the RMS norm",
        "(compress_ratios 0, 1, 2)",
        "compressed keys of layers 2, 8, 14, 20",
        "index keys from the compressed latent, of layers 2, 8, 14, 20, 24, 28, 32, 36",
        "scored in layer 20",
        "Engram: hashed n-gram tables added to the streams before layers 1, 14",
        "blocks of 32, 32",
        "a DSpark drafter on layers 37, 38, 39",
        "(10) the vision tower",
    ):
        assert part in text, part
    bare = {"model_type": "deepseek_v41"}
    (tmp_path / "config.json").write_text(json.dumps(bare))
    with pytest.raises(UnsupportedModel, match="delayed mHC") as refused:
        load(tmp_path)
    assert "Engram" not in str(refused.value)  # not announced by this config


def test_other_model_types_are_refused_by_name(broken):
    edit_config(broken, model_type="deepseek_v3")
    refuse(broken, UnsupportedModel, "'deepseek_v3', expected 'deepseek_v4'")
    edit_config(broken, model_type=...)
    refuse(broken, UnsupportedModel, "None")


def test_module_names_of_a_live_model_are_explained(broken):
    edit(broken, lambda t: t.update({"model.layers.0.self_attn.q_a_proj.weight": torch.zeros(2)}))
    refuse(broken, match="save_pretrained")


IMPOSSIBLE = [
    ("hidden_size", 2**31),
    ("hidden_size", 63),
    ("vocab_size", 2**31),
    ("n_routed_experts", 2**31),
    ("hidden_size", 0),
    ("hidden_size", -64),
    ("hidden_size", "64"),
    ("hidden_size", None),
    ("num_hidden_layers", 2**30),
    ("num_hidden_layers", 5),
    ("moe_intermediate_size", 10**9),
    ("num_experts_per_tok", 9),
    ("index_n_heads", 2**31),
    ("head_dim", 2**31),
    ("compress_ratios", [0, 0, 4, 128, 4, 64]),
    ("compress_ratios", "4"),
    ("hc_mult", 2**31),
    ("rms_norm_eps", "small"),
    ("qk_rope_head_dim", 7),
    ("o_groups", 3),
    ("q_lora_rank", 10**6),
    ("num_nextn_predict_layers", -1),
    ("rope_scaling", 5),
    ("rope_scaling", {"factor": 0}),
    ("swiglu_limit", -1.0),
]


@pytest.mark.parametrize(("key", "value"), IMPOSSIBLE)
def test_impossible_configs_are_refused_before_anything_is_allocated(broken, key, value):
    edit_config(broken, **{key: value})
    with pytest.raises((ConfigError, CheckpointError)):
        open_checkpoint(broken)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
released = preset("tiny").to_dict()
rope_main, rope_yarn = (
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "yarn", "rope_theta": 160000.0, "factor": 16.0, "original_max_position_embeddings": 256},
)
other_words = ("compress_ratios", "num_hash_layers", "rope_scaling")
in_transformers_words = {key: value for key, value in released.items() if key not in other_words} | {
    "layer_types": ["sliding_attention"] * 2
    + ["compressed_sparse_attention", "heavily_compressed_attention"] * 2,
    "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 3,
    "rope_parameters": {"main": rope_main, "compress": rope_yarn},
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "hidden_act": "silu",
    "mlp_bias": False,
}


def test_both_spellings_mean_the_same_model():
    assert V4Config.from_dict(in_transformers_words) == V4Config.from_dict(released) == preset("tiny")


@given(data=st.data(), base=st.sampled_from([released, in_transformers_words]))
def test_no_config_escapes_as_another_error(data, base):
    changes = data.draw(st.dictionaries(st.sampled_from(sorted(base)), json_values, min_size=1, max_size=3))
    rope = data.draw(
        st.dictionaries(st.sampled_from(sorted({*rope_yarn, "beta_fast"})), json_values, max_size=2)
    )
    main = data.draw(st.sampled_from([rope_main, [], "main", None]))
    raw = {**base, **changes}
    if raw.get("rope_parameters") == in_transformers_words["rope_parameters"]:
        raw["rope_parameters"] = {"main": main, "compress": {**rope_yarn, **rope}}
    with suppress(BirkhoffError):
        V4Config.from_dict(raw)


@pytest.mark.parametrize("key", ["compress_rates", "rope_parameters", "layer_types", "mlp_layer_types"])
def test_lists_and_objects_of_a_config_are_lists_and_objects(key):
    with pytest.raises(ConfigError, match=f"{key} is 5, expected a JSON"):
        V4Config.from_dict({**in_transformers_words, key: 5})


def test_paths_that_are_no_checkpoint(tmp_path, broken):
    refuse(tmp_path / "none", match="does not exist")
    (tmp_path / "notes.txt").write_text("x")
    refuse(tmp_path / "notes.txt", match="neither a safetensors nor a GGUF file")
    refuse(tmp_path, ConfigError, r"config\.json is missing")
    for file in broken.glob("*.safetensors*"):
        file.unlink()
    refuse(broken, match="no safetensors files")
    (broken / "config.json").write_text("{")
    refuse(broken, ConfigError, "cannot be read as JSON")
