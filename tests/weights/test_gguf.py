"""GGUF files as checkpoints: dialects, missing keys, other writers, rejected files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from birkhoff.byte_size import parse_bytes
from birkhoff.convert.convert import convert
from birkhoff.convert.gguf_bytes import TensorRow
from birkhoff.errors import (
    BirkhoffError,
    CheckpointError,
    ConfigError,
    TensorMissing,
    TensorShape,
    TensorUnexpected,
    UnsupportedModel,
)
from birkhoff.model.linear import Numerics
from birkhoff.model.transformer import Transformer
from birkhoff.weights import inspect_checkpoint, load_into
from birkhoff.weights.checkpoint import open_checkpoint
from birkhoff.weights.gguf import read_header
from birkhoff.weights.gguf_keys import MetadataEntry
from birkhoff.weights.gguf_names import to_released, trunk_name
from birkhoff.weights.gguf_text import tokenizer_json
from birkhoff.weights.layout import model_tensors
from tests.weights.gguf_files import by_the_package, raw_file

R = """context_length embedding_length block_count attention.head_count attention.head_count_kv attention.key_length
attention.value_length attention.layer_norm_rms_epsilon attention.q_lora_rank attention.output_group_count
attention.sliding_window attention.compress_ratios attention.compress_rope_freq_base attention.indexer.head_count
attention.indexer.key_length attention.indexer.top_k rope.dimension_count rope.scaling.type rope.scaling.factor
rope.scaling.original_context_length expert_count expert_used_count expert_shared_count expert_feed_forward_length
expert_weights_scale expert_weights_norm expert_gating_func swiglu_clamp_exp hyper_connection.sinkhorn_iterations
hyper_connection.epsilon""".split()
DERIVED = "vocab_size attention.output_lora_rank hash_layer_count hyper_connection.count".split()
HARMLESS = """feed_forward_length rope.freq_base rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow
swiglu_clamp_shexp embedding_length_out expert_group_count expert_group_used_count""".split()


@pytest.fixture(scope="module")
def gguf_dir(tmp_path_factory) -> Path:
    from birkhoff.convert.synth import synth

    folder = tmp_path_factory.mktemp("gguf")
    synth(folder / "tiny", "tiny", seed=4)
    convert(folder / "tiny", folder / "m.gguf", mtp=False)
    return folder


def rewritten(gguf_dir: Path, path: Path, keys=None, tensors=None) -> Path:
    """Rewrite m.gguf with changed keys (None removes one) and changed tensors."""
    header = read_header(gguf_dir / "m.gguf")
    raw = (gguf_dir / "m.gguf").read_bytes()
    changed = {**header.keys, **(keys or {})}
    rows = []
    for name, value in changed.items():
        if value is None:
            continue
        kind: object = header.types.get(name, 8 if isinstance(value, str) else 4)
        if kind == 9 or isinstance(value, list):
            kind = (
                9,
                8 if not value or isinstance(value[0], str) else 6 if isinstance(value[0], float) else 5,
            )
        rows.append(MetadataEntry(name, kind, value))
    tensor_rows = [
        (TensorRow(t.name, t.kind, t.shape), raw[t.offset : t.offset + t.nbytes]) for t in header.tensors
    ]
    return raw_file(path, rows, tensors(tensor_rows) if tensors else tensor_rows)


def test_every_name_of_ours_has_one_place_and_the_way_back(gguf_dir):
    config = open_checkpoint(gguf_dir / "tiny").config
    for tensor in model_tensors(config):
        if tensor.name.startswith("mtp."):
            continue
        name = trunk_name(tensor.name)
        back = to_released(name.name, config.num_hidden_layers)
        assert (back.ours.format(name.expert) if back.stacked else back.ours) == tensor.name
    for name in (
        "blk.01.attn_q_a.weight",
        "blk.x.attn_q_a.weight",
        "blk.0.wq",
        "layers.0.x",
        "blk",
        "mtp..x",
        "token_embd",
    ):
        assert to_released(name, 6) is None


@pytest.mark.parametrize("key", R)
def test_keys_that_cannot_be_derived_are_asked_for_by_name(gguf_dir, tmp_path, key):
    with pytest.raises(ConfigError, match=f"deepseek4.{key}"):
        open_checkpoint(rewritten(gguf_dir, tmp_path / "x.gguf", {f"deepseek4.{key}": None}))


def test_keys_that_can_be_derived_may_be_missing(gguf_dir, tmp_path):
    absent = {f"deepseek4.{key}": None for key in DERIVED + HARMLESS}
    opened = open_checkpoint(rewritten(gguf_dir, tmp_path / "x.gguf", absent))
    assert opened.config == open_checkpoint(gguf_dir / "m.gguf").config


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("expert_gating_func", 2, "expected 4"),
        ("attention.value_length", 16, "V4 has one size"),
        ("rope.scaling.type", "linear", "expected 'yarn' or 'none'"),
        ("block_count", 0, "has 0 blocks"),
        ("swiglu_clamp_exp", [1.0] * 5 + [2.0], "that differ"),
        ("embedding_length", "64", "expected a whole number"),
        ("swiglu_clamp_exp", [1.0], "one number for each of 6 blocks"),
        ("block_count", 2**32 - 1, "has 4294967295 blocks"),
        ("attention.compress_ratios", [0, 0, 3, 4, 4, 4], "3"),
        ("hyper_connection.epsilon", float("nan"), "expected a number"),
    ],
)
def test_values_that_make_no_model_are_refused(gguf_dir, tmp_path, key, value, words):
    path = gguf_dir / "m.gguf"
    keys = {**read_header(path).keys, f"deepseek4.{key}": value}
    from birkhoff.weights.gguf_keys import config_from_metadata

    shapes = {t.name: t.shape for t in read_header(path).tensors}
    with pytest.raises(ConfigError, match=words):
        config_from_metadata(keys, shapes, "x.gguf")


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("deepseek-v4", "old stub dialect"),
        ("dflash", "DSpark drafter"),
        ("deepseek41", "DeepSeek-V4.1"),
        ("llama", "not a DeepSeek-V4 file"),
    ],
)
def test_other_architectures_are_refused_by_name(gguf_dir, tmp_path, architecture, words):
    path = rewritten(gguf_dir, tmp_path / "x.gguf", {"general.architecture": architecture})
    with pytest.raises(UnsupportedModel, match=words):
        open_checkpoint(path)


def test_the_old_stub_is_known_by_its_tensors_too(gguf_dir, tmp_path):
    def stub(tensors):
        return [
            (row._replace(name=row.name.replace("hc_attn_fn.weight", "hc_attn.fn")), raw)
            for row, raw in tensors
        ]

    with pytest.raises(UnsupportedModel, match=r"blk\.0\.hc_attn\.fn.*old stub dialect"):
        open_checkpoint(rewritten(gguf_dir, tmp_path / "x.gguf", tensors=stub))


def test_missing_extra_and_misshapen_tensors_are_named(gguf_dir, tmp_path):
    with pytest.raises(TensorMissing, match=r"layers\.1\.attn\.wkv\.weight"):
        open_checkpoint(
            rewritten(
                gguf_dir,
                tmp_path / "a.gguf",
                tensors=lambda ts: [t for t in ts if "1.attn_kv." not in t[0].name],
            )
        )
    extra = (TensorRow("blk.0.strange.weight", "F32", (4,)), bytes(16))
    with pytest.raises(TensorUnexpected, match=r"blk\.0\.strange\.weight"):
        open_checkpoint(rewritten(gguf_dir, tmp_path / "b.gguf", tensors=lambda ts: [*ts, extra]))

    def flat(tensors):
        return [
            (row._replace(shape=(row.shape[0] * row.shape[1], row.shape[2])), raw)
            if "0.ffn_up_exps" in row.name
            else (row, raw)
            for row, raw in tensors
        ]

    with pytest.raises(TensorShape, match="expected one matrix for each"):
        open_checkpoint(rewritten(gguf_dir, tmp_path / "c.gguf", tensors=flat))
    report = inspect_checkpoint(rewritten(gguf_dir, tmp_path / "d.gguf", {"deepseek4.expert_count": None}))
    assert (
        report.problems[0]["code"] == "config" and report.tensors > 300 and report.bytes_by_type["MXFP4"] > 0
    )


def test_output_a_may_be_three_dimensional(gguf_dir, tmp_path):
    def grouped(tensors):
        return [
            (row._replace(shape=(2, row.shape[0] // 2, row.shape[1])), raw)
            if "attn_output_a" in row.name
            else (row, raw)
            for row, raw in tensors
        ]

    path = rewritten(gguf_dir, tmp_path / "x.gguf", {"deepseek4.attention.output_lora_rank": None}, grouped)
    name = "layers.0.attn.wo_a.weight"
    assert torch.equal(open_checkpoint(path)[name].read(), open_checkpoint(gguf_dir / "m.gguf")[name].read())


def test_a_file_by_the_gguf_package_with_small_quants_loads(gguf_dir, tmp_path):
    """Q4_0 experts and Q5_0 matrices, written and decoded by the `gguf` package, run by our model."""
    header, source = read_header(gguf_dir / "m.gguf"), open_checkpoint(gguf_dir / "tiny")
    ours = open_checkpoint(gguf_dir / "m.gguf")
    tensors = {}
    for tensor in header.tensors:
        name = to_released(tensor.name, 6)
        if name.stacked:
            experts = [ours[name.ours.format(e)] for e in range(tensor.shape[0])]
            from birkhoff.weights.tensor_ref import value_strips

            rows = [torch.cat([v for _, v in value_strips(ours, r.name)]).numpy() for r in experts]
            tensors[tensor.name] = (np.stack(rows), "Q4_0")
        elif tensor.kind == "Q8_0":
            tensors[tensor.name] = (ours[name.ours].read().numpy(), "Q5_0")
        elif tensor.kind == "I32":
            tensors[tensor.name] = (ours[name.ours].read().numpy(), None)
        else:
            tensors[tensor.name] = (ours[name.ours].read().float().numpy(), None)
    keys = {key: value for key, value in header.keys.items() if key.startswith("deepseek4.")}
    path = by_the_package(tmp_path / "small.gguf", {**keys, "tokenizer.ggml.model": "no_vocab"}, tensors)
    opened = open_checkpoint(path)
    assert opened.notices == ["small.gguf has no tokenizer; it works with token ids."]
    types = inspect_checkpoint(path).bytes_by_type
    assert types["Q4_0"] > 0 and types["Q5_0"] > 0 and "MXFP4" not in types
    model = Transformer(opened.config, Numerics(torch.float32))
    load_into(model.destinations(), opened)
    exact = Transformer(source.config, Numerics(torch.float32), mtp=False)
    load_into(exact.destinations(), source, skip=("mtp.",))
    tokens = torch.arange(40) * 7
    with torch.no_grad():
        error = float((model(tokens) - exact(tokens)).norm() / exact(tokens).norm())
    print(f"Q4_0 experts, Q5_0 matrices: relative error of logits {error:.3f}")
    assert 1e-3 < error < 0.5


def test_tokenizers_are_rebuilt_from_lists(gguf_dir):
    from birkhoff.embedded import EMBEDDED
    from birkhoff.text.tokenizer import Tokenizer
    from birkhoff.weights.gguf_text import TOKENIZER_JSON, tokenizer_metadata

    text = (EMBEDDED / "nano/tokenizer.json").read_text()
    keys = {key.name: key.value for key in tokenizer_metadata(text, 4096, 0, 1, [])}
    assert keys["tokenizer.ggml.pre"] == "joyai-llm" and tokenizer_json(keys, "x", []) == text
    del keys[TOKENIZER_JSON]
    notices: list[str] = []
    rebuilt = Tokenizer.from_json(tokenizer_json(keys, "x", notices), vocab_size=4096)
    original = Tokenizer.from_json(text, vocab_size=4096)
    for sample in (
        "Once upon a time, 1234 times!\n\n  Über 日本語 テスト",
        "<｜User｜> is text",
        "'quoted' a_b\tc",
    ):
        assert rebuilt.encode(sample) == original.encode(sample)
    assert (
        rebuilt.markers == original.markers and rebuilt.special_ids == original.special_ids and notices == []
    )
    assert (
        tokenizer_json({**keys, "tokenizer.ggml.pre": "llama3"}, "x", notices) is None
        and "llama3" in notices[0]
    )
    with pytest.raises(CheckpointError, match="do not belong together"):
        tokenizer_json({**keys, "tokenizer.ggml.token_type": [1]}, "x", [])


def test_kept_scales_that_make_no_sense_are_ignored(gguf_dir):
    from birkhoff.weights.gguf import SCALE_NAMES, SCALES, stored_scales

    assert stored_scales({SCALES: [1, 2], SCALE_NAMES: ["a|1x2"]})["a"].tolist() == [[1, 2]]
    odd = [
        ([1], ["a|1x2"]),
        ([1, 2, 3], ["a|1x2"]),
        ([1, 255], ["a|1x2"]),
        ([1, 2], ["a"]),
        ([1.5, 2.0], ["a|1x2"]),
        ("text", ["a|1x2"]),
        ([1, 2], [3]),
        ([1, 2], "a|1x2"),
        ([1, 2], ["a|99999999999x1"]),
    ]
    for flat, names in odd:
        assert stored_scales({SCALES: flat, SCALE_NAMES: names}) == {}


def test_an_inspection_plans_a_devices_memory(gguf_dir):
    report = inspect_checkpoint(gguf_dir / "m.gguf")
    assert report.dialect == "gguf" and report.problems == [] and report.files == 1
    assert (
        report.parameters
        == inspect_checkpoint(gguf_dir / "tiny").parameters
        - inspect_checkpoint(gguf_dir / "tiny").parameters_mtp
    )
    need = report.file_bytes + int(report.cache_bytes_per_sequence + 100 * report.cache_bytes_per_token)
    plans = report.memory(int(1.2 * need), 100)
    assert plans["stored"].fits and plans["stored"].experts_resident == plans["stored"].experts == 48
    tight = report.memory(int(0.9 * need), 100)["stored"]
    assert tight.fits and 0 < tight.experts_resident < 48 and tight.left_bytes >= 0
    none = report.memory(1000, 100)["stored"]
    assert not none.fits and none.experts_resident == 0
    assert json.loads(json.dumps(tight.to_dict()))["experts"] == 48


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 * 2**30), ("24 GB", 24 * 10**9), ("1.5tib", 3 * 2**39), ("17", 17)]
)
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "12 apples", "0", "1.2.3GB", "9" * 40])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(BirkhoffError, match="is no size"):
        parse_bytes(text)
