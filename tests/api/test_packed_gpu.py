"""`birkhoff.load` of packed files with GPU kernels, in Triton's interpreter where there is no GPU: outputs, memory
plans and the placement of experts of any type."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
import typer
from typer.testing import CliRunner

import birkhoff
from birkhoff.api.options import PlacementOptions
from birkhoff.api.place_experts import place_experts
from birkhoff.api.run_plan import device_network, experts_as_stored, plan_device
from birkhoff.cli.inspect import inspect
from birkhoff.convert.convert import convert
from birkhoff.convert.synth import RandomRows
from birkhoff.engine.memory_plan import MemoryBudget
from birkhoff.errors import CapacityError, OptionError
from birkhoff.kernels.packed import TYPES
from birkhoff.weights.checkpoint import open_checkpoint
from birkhoff.weights.released import write_released
from birkhoff.weights.tensor_ref import read_values
from tests.interpreter import DEVICE
from tests.models import TINY
from tests.packed_matrices import retyped_gguf
from tests.sizes import scaled

CONFIG = replace(
    TINY,
    vocab_size=128,
    hidden_size=256,
    num_hidden_layers=2,
    compress_ratios=(0, 0),
    num_hash_layers=1,
    q_lora_rank=256,
    n_routed_experts=3,
    num_experts_per_tok=2,
    moe_intermediate_size=256,
    num_nextn_predict_layers=0,
    max_position_embeddings=512,
)
PROJECTIONS = ("attn_q_a", "attn_q_b", "attn_kv", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")
OPTIONS = {
    "device": DEVICE.type,
    "kernels": "triton",
    "dtype": "float32",
    "max_requests": 1,
    "max_context": 128,
    "prefix_cache": False,
    "speculative": False,
}
PROMPT = [5, 80, 20]
ASKED = {"temperature": 0, "max_tokens": 2, "ignore_eos": True, "logprobs": 3}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    write_released(folder / "random", CONFIG, RandomRows(CONFIG, 3))
    convert(folder / "random", folder / "plain.gguf", dense="f32", experts="f32", mtp=False)
    return folder / "plain.gguf"


def gguf_of(plain, path, gate, down=None, dense="Q8_0", head=None):
    """A file with experts, projections and head of the given types."""

    def kind_of(tensor):
        if "_exps." in tensor:
            return down or gate if "ffn_down" in tensor else gate
        if tensor.startswith("output.") and head is not None:
            return head
        return dense if any(f".{part}.weight" in tensor for part in PROJECTIONS) else None

    return retyped_gguf(plain, path, CONFIG, kind_of)


def answer(engine, prompt=PROMPT):
    output = engine.generate(prompt, **ASKED)
    return output.token_ids, [value for token in output.logprobs for _, value in token.top]


MIXES = [
    ("MXFP4", "MXFP4", "Q8_0", None),
    ("Q2_K", "Q3_K", "Q8_0", "Q6_K"),
    ("IQ2_XXS", "Q2_K", "F16", "F16"),
    ("Q8_0", "Q8_0", "MXFP4", "Q8_0"),
]


@pytest.mark.parametrize("gate, down, dense, head", scaled(MIXES, MIXES[1:2]))
def test_a_gguf_runs_packed_and_equals_its_dequantised_weights(plain, tmp_path, gate, down, dense, head):
    path = gguf_of(plain, tmp_path / "m.gguf", gate, down, dense, head)
    with (
        birkhoff.load(path, **OPTIONS) as packed,
        birkhoff.load(
            path, device="cpu", weights="dense", cache_bytes=32 << 20, speculative=False
        ) as expanded,
    ):
        assert packed._core.runner.graphs is not None, "steps are those of the decoder"
        stack = packed.model.layers[1].ffn.experts
        renamed = {"MXFP4": "FP4"}  # and Q8_0 of projections
        assert [kind.name for kind in stack.types] == [renamed.get(name, name) for name in (gate, down)]
        own = packed.model.layers[1].attn.wq_b.matrices()[0].type.name
        assert own == (renamed | {"Q8_0": "Q8_ROWS"}).get(dense, dense)
        tokens, logprobs = answer(packed)
        expected_tokens, expected = answer(expanded)
        assert tokens == expected_tokens and logprobs == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("dense, own", [("MXFP4", "FP4"), ("Q8_0", "Q8_ROWS")])
def test_codes_and_scales_are_loaded_in_another_order(plain, tmp_path, dense, own):
    """Nothing but the order differs, in experts of MXFP4 and in projections."""
    path = gguf_of(plain, tmp_path / "m.gguf", "MXFP4", dense=dense)
    checkpoint = open_checkpoint(path)
    with birkhoff.load(path, **OPTIONS) as engine:
        for matrix, name, kind in (
            (engine.model.layers[1].ffn.experts.matrices(2)[2], "layers.1.ffn.experts.2.w2.weight", "FP4"),
            (engine.model.layers[0].attn.wq_b.matrices()[0], "layers.0.attn.wq_b.weight", own),
        ):
            assert matrix.type.name == kind
            assert torch.equal(matrix.dense().cpu(), read_values(checkpoint, name, 0, matrix.rows))


def test_released_numerics_run_packed(tmp_path):
    """The rounding of the plain path, with weights as stored. A value next to a tie may be rounded the other way."""
    write_released(tmp_path / "m", CONFIG, RandomRows(CONFIG, 5))
    with birkhoff.load(tmp_path / "m", numerics="released", **OPTIONS) as packed:
        assert packed.model.packed and packed.model.numerics.released
        tokens, logprobs = answer(packed)
    asked = {"device": "cpu", "cache_bytes": 32 << 20, "speculative": False, "kernels": "reference"}
    found = {}
    for numerics in ("released", "plain"):
        with birkhoff.load(tmp_path / "m", numerics=numerics, **asked) as expanded:
            found[numerics] = answer(expanded)
    assert tokens == found["released"][0] and logprobs == pytest.approx(found["released"][1], abs=2e-3)
    assert found["plain"][1] != pytest.approx(found["released"][1], abs=2e-3)


@pytest.mark.parametrize("dense, experts", scaled([("fp8", "fp8"), ("bf16", "bf16")], [("fp8", "fp8")]))
def test_directories_run_packed(tmp_path, dense, experts):
    rows = RandomRows(CONFIG, 5, dense, experts)
    write_released(tmp_path / "m", CONFIG, rows, dense=dense, experts=experts)
    with birkhoff.load(tmp_path / "m", **OPTIONS) as packed:
        assert packed._core.runner.graphs is not None
        tokens, logprobs = answer(packed)
    with birkhoff.load(tmp_path / "m", device="cpu", cache_bytes=32 << 20, speculative=False) as expanded:
        expected_tokens, expected = answer(expanded)
    assert tokens == expected_tokens and logprobs == pytest.approx(expected, abs=2e-4)


def test_experts_of_any_type_are_divided_between_device_and_host(plain, tmp_path, capsys):
    """Layers of different types share one store; the outputs do not depend on the share."""
    path = retyped_gguf(
        plain,
        tmp_path / "m.gguf",
        CONFIG,
        lambda name: None if "_exps." not in name else "Q4_K" if name.startswith("blk.0.") else "IQ3_XXS",
    )
    with birkhoff.load(path, **OPTIONS) as whole:
        assert whole.placement is None
        expected = answer(whole, [5])
    capsys.readouterr()
    with birkhoff.load(
        path, experts=0.5, experts_on="gpu", expert_counts=tmp_path / "c.json", **OPTIONS
    ) as divided:
        assert "3 of 6 experts on the device" in capsys.readouterr().err
        assert answer(divided, [5]) == expected, "bit-identical"
    assert json.loads((tmp_path / "c.json").read_text())["experts"] == 3
    with birkhoff.load(path, experts=0.5, experts_on="cpu", **OPTIONS) as beside:
        assert "cold experts of decode steps are computed on the CPU" in capsys.readouterr().err
        tokens, logprobs = answer(beside, [5])
        assert tokens == expected[0] and logprobs == pytest.approx(expected[1], abs=2e-4)
    with birkhoff.load(path, experts=0.5, experts_on="auto", **OPTIONS) as fastest:
        said = capsys.readouterr().err
        assert re.search(
            r"leave \d+ % of the cold experts to the CPU \(a step with 0 % \S+ ms, .*100 % \S+ ms\)", said
        )
        tokens, logprobs = answer(fastest, [5])
        assert tokens == expected[0] and logprobs == pytest.approx(expected[1], abs=2e-4)


def test_where_cold_experts_are_computed_is_an_option_of_a_gpu():
    with pytest.raises(OptionError, match="experts_on is 'moon', expected"):
        birkhoff.EngineOptions(experts_on="moon")
    with pytest.raises(OptionError, match="experts_on and background_experts place packed experts"):
        birkhoff.load("nano", device="cpu", experts_on="cpu")


def test_what_a_gpu_cannot_keep_packed_is_refused_by_name(plain, tmp_path):
    path = retyped_gguf(
        plain,
        tmp_path / "m.gguf",
        CONFIG,
        lambda name: "Q4_K" if "ffn_gate_exps" in name else "Q6_K" if "_exps." in name else None,
    )
    assert not experts_as_stored(open_checkpoint(path), torch.bfloat16)
    with pytest.raises(OptionError, match="experts whose gate and up have one type"):
        birkhoff.load(path, **{**OPTIONS, "weights": "packed"})
    with pytest.raises(OptionError, match="gate and up of one type"):
        birkhoff.load(path, **{**OPTIONS, "experts": "host"})


def test_the_printed_plan_is_the_one_that_is_carried_out(plain, tmp_path):
    app = typer.Typer()
    app.command()(inspect)
    path = gguf_of(plain, tmp_path / "m.gguf", "Q2_K", "Q3_K")
    options = birkhoff.EngineOptions(max_requests=1, max_context=128, dtype="bfloat16")
    network = device_network(open_checkpoint(path), options, 8 << 20)
    assert network is not None and network.packed
    placed = place_experts(
        network, PlacementOptions(), torch.device("cpu"), 2200 << 10, 1 << 30, None, 1, 128
    )
    budget = placed if isinstance(placed, MemoryBudget) else placed.budget
    assert not isinstance(placed, MemoryBudget) and budget.hot < budget.experts == 6
    layout = placed.store.layouts[0]
    assert budget.expert_bytes == layout.nbytes == placed.store.slot_bytes
    gate, down = TYPES["Q2_K"], TYPES["Q3_K"]
    assert layout.nbytes == 2 * gate.nbytes(256, 256) + down.nbytes(256, 256)
    arguments = [str(path), "--context", "128", "--json", "--gpu"]
    result = CliRunner().invoke(app, [*arguments, "2200KiB", "--ram", "1GiB"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["gpu"]["plan"] == json.loads(json.dumps(budget.to_dict()))
    refused = CliRunner().invoke(app, [*arguments, "2200KiB", "--ram", "64KiB"])
    assert refused.exit_code == 1 and "64.00 KiB are free" in refused.stdout
    text = CliRunner().invoke(app, [str(path), "--gpu", "64MiB"], env={"COLUMNS": "200"}).stdout
    assert "weights as stored" in text and "6 of 6 on the GPU (100.0 %)" in text


def test_a_plan_bounds_the_cache_by_gpu_memory(plain, tmp_path):
    path = gguf_of(plain, tmp_path / "m.gguf", "Q4_K")
    options = birkhoff.EngineOptions(max_requests=1, dtype="bfloat16")
    network = device_network(open_checkpoint(path), options, 1 << 30)

    def plan(memory):
        return plan_device(network, PlacementOptions(gpu_memory=memory), 1 << 30, 1 << 30, None, 1, None)

    assert plan(4 << 20).hot == 6 and plan(4 << 20).left_bytes >= 0
    assert plan(None).cache_bytes > 100 * 2**20
    with pytest.raises(CapacityError, match="may use 64"):
        plan(64 << 10)
