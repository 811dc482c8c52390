"""`birkhoff.load` of packed checkpoints on a CPU: every type runs as stored and equals the dequantised model."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch

import birkhoff
from birkhoff.api.run_plan import host_budget
from birkhoff.convert.convert import convert
from birkhoff.convert.synth import RandomRows
from birkhoff.errors import CapacityError, OptionError, TensorValue
from birkhoff.kernels.packed import TYPES, native
from birkhoff.weights.checkpoint import open_checkpoint
from birkhoff.weights.gguf import read_header
from birkhoff.weights.released import write_released
from tests.models import TINY
from tests.packed_matrices import retyped_gguf

pytestmark = pytest.mark.skipif(not native.available(), reason="no C++ compiler")

CONFIG = replace(
    TINY,
    vocab_size=256,
    hidden_size=256,
    num_hidden_layers=2,
    compress_ratios=(0, 4),
    num_hash_layers=1,
    q_lora_rank=256,
    n_routed_experts=4,
    moe_intermediate_size=256,
    num_nextn_predict_layers=0,
    max_position_embeddings=512,
)
MATRICES = ("attn_q_a", "attn_q_b", "attn_kv", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")
OPTIONS = {"device": "cpu", "cache_bytes": 32 << 20, "speculative": False, "max_requests": 2}
BLOCKS = [name for name, kind in TYPES.items() if kind.dtype is None and kind.tile is None]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    write_released(folder / "random", CONFIG, RandomRows(CONFIG, 3))
    convert(folder / "random", folder / "plain.gguf", dense="f32", experts="f32", mtp=False)
    return folder / "plain.gguf"


def is_expert(name):
    return "_exps." in name


@pytest.mark.parametrize("name", [*BLOCKS, "F16", "BF16"])
def test_a_gguf_of_every_type_runs_packed_and_equals_its_dequantised_weights(plain, tmp_path, name):
    dense = name if name in ("Q8_0", "F16", "BF16", "Q4_K", "Q6_K") else "Q8_0"

    def kind_of(tensor):
        if is_expert(tensor):
            return name
        return dense if any(f".{part}.weight" in tensor for part in MATRICES) else None

    path = retyped_gguf(plain, tmp_path / "model.gguf", CONFIG, kind_of)
    prompt = torch.randint(256, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    with (
        birkhoff.load(path, **OPTIONS) as packed,
        birkhoff.load(path, weights="dense", **OPTIONS) as expanded,
    ):
        experts = packed.model.layers[1].ffn.experts
        assert [kind.name for kind in experts.types] == [name, name]
        assert packed.model.layers[1].attn.wq_b.matrices()[0].type.name == dense
        expected = expanded.logits(prompt)
        assert (packed.logits(prompt) - expected).abs().max() <= 2e-5 * expected.abs().max().clamp(1)
        asked = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
        assert packed.generate(prompt, **asked).token_ids == expanded.generate(prompt, **asked).token_ids
        held = sum(tensor.nbytes for tensor in (*packed.model.parameters(), *packed.model.buffers()))
        assert held <= 1.05 * path.stat().st_size


@pytest.mark.parametrize("dense, experts", [("fp8", "fp4"), ("fp8", "fp8"), ("bf16", "bf16")])
def test_safetensors_directories_run_packed(tmp_path, dense, experts):
    config = replace(CONFIG, num_nextn_predict_layers=1)
    rows = RandomRows(config, 5, dense, experts)
    write_released(tmp_path / "model", config, rows, dense=dense, experts=experts)
    prompt = list(range(70))
    options = OPTIONS | {"speculative": True}
    with (
        birkhoff.load(tmp_path / "model", **options) as packed,
        birkhoff.load(tmp_path / "model", weights="dense", **options) as expanded,
    ):
        assert packed.model.layers[0].ffn.experts.packed
        expected = expanded.logits(prompt)
        assert (packed.logits(prompt) - expected).abs().max() <= 2e-5 * expected.abs().max().clamp(1)
        asked = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
        assert packed.generate(prompt, **asked).token_ids == expanded.generate(prompt, **asked).token_ids
        files = sum(file.stat().st_size for file in open_checkpoint(tmp_path / "model").files)
        held = sum(tensor.nbytes for tensor in (*packed.model.parameters(), *packed.model.buffers()))
        assert held <= 1.05 * files


def test_nano_packed_speaks_as_nano_dense():
    prompt = "The harbour was quiet, and"
    asked = {"temperature": 0, "max_tokens": 48, "ignore_eos": True}
    with (
        birkhoff.load("nano", **OPTIONS) as packed,
        birkhoff.load("nano", weights="dense", **OPTIONS) as expanded,
    ):
        assert packed.generate(prompt, **asked).token_ids == expanded.generate(prompt, **asked).token_ids


def test_gradients_flow_through_packed_weights(plain, tmp_path):
    path = retyped_gguf(plain, tmp_path / "m.gguf", CONFIG, lambda name: "Q4_K" if is_expert(name) else None)
    with birkhoff.load(path, **OPTIONS) as engine:
        with torch.enable_grad():
            logits = engine.model(torch.arange(20))
        assert logits.requires_grad and torch.isfinite(logits).all()
        with torch.no_grad():
            assert (engine.model(torch.arange(20)) - logits.detach()).abs().max() < 1e-4


@pytest.mark.parametrize("name, byte", [("Q8_0", 0x7E), ("Q4_K", 0x7C), ("MXFP4", 0xFF), ("IQ2_XXS", 0xFE)])
def test_damaged_blocks_are_refused_with_their_place(plain, tmp_path, name, byte):
    path = retyped_gguf(plain, tmp_path / "m.gguf", CONFIG, lambda t: name if is_expert(t) else None)
    tensor = next(t for t in read_header(path).tensors if t.name == "blk.1.ffn_up_exps.weight")
    data = bytearray(path.read_bytes())
    at = tensor.offset + 3 * (256 // TYPES[name].block) * TYPES[name].block_bytes
    data[at : at + 2] = bytes((byte, byte)) if name != "MXFP4" else bytes((byte, 0))
    path.write_bytes(data)
    with pytest.raises(TensorValue, match=r"layers\.1\.ffn\.experts\.0\.w3"):
        birkhoff.load(path, **OPTIONS)


def test_packed_weights_must_be_readable_where_they_are_asked_for():
    with pytest.raises(OptionError, match="weights is 'packed'"):
        birkhoff.load("nano", weights="packed", dtype="bfloat16", **OPTIONS)
    with pytest.raises(OptionError, match="weights"):
        birkhoff.load("nano", weights="small", **OPTIONS)


def test_mapped_experts_stay_in_their_files_and_give_the_same_bits(plain, tmp_path, capfd):
    path = retyped_gguf(plain, tmp_path / "m.gguf", CONFIG, lambda t: "Q2_K" if is_expert(t) else None)
    asked = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    with birkhoff.load(path, **OPTIONS) as held:
        logits, tokens = held.logits(list(range(40))), held.generate(list(range(9)), **asked).token_ids
    capfd.readouterr()
    with birkhoff.load(path, experts="mapped", **OPTIONS) as mapped:
        assert "experts stay in their files" in capfd.readouterr().err
        stack = mapped.model.layers[1].ffn.experts
        assert not list(stack.buffers()) and not list(stack.parameters())
        assert torch.equal(mapped.logits(list(range(40))), logits)
        assert mapped.generate(list(range(9)), **asked).token_ids == tokens


@pytest.mark.parametrize("experts", ["fp4", "fp8", "bf16"])
def test_experts_of_safetensors_can_be_mapped(tmp_path, experts):
    write_released(tmp_path / "m", CONFIG, RandomRows(CONFIG, 5, "fp8", experts), experts=experts)
    with birkhoff.load(tmp_path / "m", **OPTIONS) as held:
        logits = held.logits(list(range(20)))
    with birkhoff.load(
        tmp_path / "m", experts="mapped", context_root=tmp_path / "pages", **OPTIONS
    ) as mapped:
        assert torch.equal(mapped.logits(list(range(20))), logits)


def test_a_plan_maps_experts_that_do_not_fit_and_refuses_what_cannot_run(plain):
    checkpoint = open_checkpoint(plain)
    options = birkhoff.EngineOptions(device="cpu", max_requests=2, speculative=False)
    ample = host_budget(checkpoint, options, 1 << 30)
    assert not ample.mapped and ample.left_bytes > 0
    held = ample.dense_bytes + ample.expert_bytes
    tight = host_budget(checkpoint, options, held)
    assert tight.mapped and 0 <= tight.left_bytes < held and "page cache and disk" in str(tight)
    with pytest.raises(CapacityError, match=r"experts .* are free.*experts='mapped'"):
        host_budget(checkpoint, dataclasses.replace(options, experts="device"), held)
    with pytest.raises(CapacityError, match=r"needs .* of host memory \(weights .*, cache .*, working space"):
        host_budget(checkpoint, options, ample.dense_bytes // 2)
    with pytest.raises(CapacityError, match=r"cache_bytes=\d+ would fit") as refused:
        host_budget(checkpoint, dataclasses.replace(options, cache_bytes=1 << 29), held)
    fits = int(str(refused.value).rpartition("cache_bytes=")[2].split()[0])
    assert host_budget(checkpoint, dataclasses.replace(options, cache_bytes=fits), held).cache_bytes == fits
    with pytest.raises(CapacityError, match="weights as stored take less"):
        host_budget(checkpoint, dataclasses.replace(options, weights="dense"), held // 2)
    with pytest.raises(OptionError, match="'mapped', which needs"):
        host_budget(checkpoint, dataclasses.replace(options, weights="dense", experts="mapped"), 1 << 30)


def test_what_was_planned_is_what_is_held(plain):
    budget = host_budget(open_checkpoint(plain), birkhoff.EngineOptions(**OPTIONS), 1 << 30)
    with birkhoff.load(plain, **OPTIONS) as engine:
        tensors = [*engine.model.parameters(), *engine.model.buffers()]
        assert sum(tensor.nbytes for tensor in tensors) == budget.dense_bytes + budget.expert_bytes
