"""Loading with experts divided between device and host: options, refusals, and equal outputs at any share."""

from __future__ import annotations

import shutil
import threading

import pytest
import torch

import birkhoff
from birkhoff.api.options import PlacementOptions, parse_placement
from birkhoff.api.place_experts import place_experts
from birkhoff.convert.presets import preset
from birkhoff.convert.synth import synth
from birkhoff.engine.memory_plan import MemoryBudget, plan_budget
from birkhoff.errors import CapacityError, CountsFileError, OptionError, TensorValue
from birkhoff.model.linear import Numerics
from birkhoff.model.transformer import Transformer
from birkhoff.offload.expert_usage import ExpertCounts
from birkhoff.offload.read_gate import BackgroundReader, ReadGate
from birkhoff.weights import load_into, open_checkpoint
from tests.sizes import scaled
from tests.weights.files import edit

GIB = 2**30


@pytest.mark.parametrize(
    ("experts", "expected"),
    [
        ("auto", PlacementOptions()),
        ("device", PlacementOptions(all_on_device=True)),
        ("host", PlacementOptions(share=0.0)),
        ("mapped", PlacementOptions(mapped=True)),
        (0.25, PlacementOptions(share=0.25)),
        ("0.25", PlacementOptions(share=0.25)),
        (1.0, PlacementOptions(share=1.0)),
        (2**33, PlacementOptions(expert_bytes=2**33)),
        ("20GiB", PlacementOptions(expert_bytes=20 * GIB)),
        ("1.5GiB", PlacementOptions(expert_bytes=3 * GIB // 2)),
    ],
)
def test_accepted_values_of_experts(experts, expected):
    assert parse_placement(experts, None, None) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("moon", None, None),
            r"experts is 'moon', expected bytes such as '24GiB', 'auto', 'device', 'host', 'mapped' or a share",
        ),
        ((True, None, None), "experts is 'True', expected"),
        ((-5, None, None), "experts is -5, expected"),
        ((0, None, None), "experts is 0, expected"),
        ((1.5, None, None), r"experts is 1.5, a share lies between 0.0 and 1.0"),
        ((float("nan"), None, None), "experts is 'nan', expected"),
        ((None, None, None), "experts is 'None', expected"),
        (("auto", "much", None), "gpu_memory is 'much', expected bytes such as '24GiB'"),
        (("auto", 0.5, None), "gpu_memory is '0.5', expected bytes"),
        (("auto", True, None), "gpu_memory is 'True'"),
        (("auto", None, 5), "expert_counts is 5, expected the path of a file"),
        (("auto", None, "/no/such/folder/counts.json"), "whose folder does not exist"),
    ],
)
def test_invalid_values_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        parse_placement(*options)


@pytest.mark.parametrize("options", [{"experts": 0.5}, {"experts": "host"}, {"gpu_memory": "24GiB"}])
def test_placement_options_need_a_packed_model(options):
    with pytest.raises(OptionError, match="need Triton kernels, weights that are not 'dense'"):
        birkhoff.load("nano", device="cpu", **options)


def flash():
    with torch.device("meta"):
        return Transformer(preset("flash", mtp=False), Numerics(torch.bfloat16), packed=True, mtp=False)


def refused(options: PlacementOptions, free: int, host: int = 200 * GIB) -> str:
    with pytest.raises(CapacityError) as caught:
        place_experts(flash(), options, torch.device("cpu"), free, host, None, 1, 4096)
    return str(caught.value)


def test_refusals_state_needed_and_available_memory():
    small = refused(PlacementOptions(), 6 * GIB)
    assert (
        "without a single routed expert (weights" in small and "may use 6.00 GiB. Lower max_context" in small
    )
    capped = refused(PlacementOptions(gpu_memory=6 * GIB), 139 * GIB)
    assert "may use 6.00 GiB" in capped, "gpu_memory is the limit, not the free memory"
    assert "experts is 'device', but" in refused(PlacementOptions(all_on_device=True), 100 * GIB)
    assert "11008 experts and places to move through take 137.06 GiB" in refused(
        PlacementOptions(share=1.0), 100 * GIB
    )
    assert "of host memory, and 64.00 GiB are free" in refused(PlacementOptions(), 24 * GIB, host=64 * GIB)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("placing") / "tiny"
    synth(path, "tiny", layers=1, tokenizer=False)
    return path


def engine(path, **options):
    from tests.interpreter import DEVICE

    return birkhoff.load(
        path,
        device=DEVICE.type,
        kernels="triton",
        dtype="float32",
        max_requests=1,
        max_context=256,
        prefix_cache=False,
        **options,
    )


PROMPT = [5, 80, 200]


@pytest.fixture(scope="module")
def answer(path):
    with engine(path) as opened:
        assert opened.placement is None, "all experts fit"
        return opened.generate(PROMPT, temperature=0, max_tokens=2, ignore_eos=True, logprobs=5)


def test_gpu_memory_bounds_the_cache_when_all_experts_fit(path, capsys):
    with engine(path, gpu_memory="8MiB") as opened:
        assert opened.placement is None, "all experts fit"
        printed = capsys.readouterr().err
        planned = int(printed.split("cache_bytes ")[1].split(";")[0])
        held = sum(t.nbytes for t in (*opened.model.parameters(), *opened.model.buffers()))
        assert planned > 0 and held + planned <= 8 * 2**20


@pytest.mark.parametrize("experts", scaled([1.0, 0.5, "host", "40KB"], [0.5]))
def test_outputs_are_equal_at_any_share(path, answer, experts, tmp_path, capsys):
    with engine(path, experts=experts, expert_counts=tmp_path / "counts.json") as opened:
        share = {"host": 0.0, "40KB": None}.get(experts, experts)
        printed = capsys.readouterr().err
        assert "experts on the device (" in printed and "of host memory for the others" in printed
        assert share is None or opened.placement["experts_on_device"] == round(share * 8)
        output = opened.generate(PROMPT, temperature=0, max_tokens=2, ignore_eos=True, logprobs=5)
        assert (output.token_ids, output.logprobs) == (answer.token_ids, answer.logprobs), "bit-identical"
    result = ExpertCounts.load(tmp_path / "counts.json", 1, 8)
    assert result.steps == 2 and int(result.reads.sum()) >= 4, "a prompt and a token were counted"


def test_counts_decide_which_experts_start_on_the_device(path, tmp_path):
    reads = torch.zeros(3, 8, dtype=torch.int64)
    reads[1, 5] = reads[2, 0] = reads[0, 7] = 50
    ExpertCounts(reads, 50).save(tmp_path / "c.json")
    network = packed_tiny()
    placed = place_experts(
        network,
        PlacementOptions(share=3 / 24, counts_file=tmp_path / "c.json"),
        torch.device("cpu"),
        GIB,
        GIB,
        None,
        1,
        256,
    )
    assert placed.store.resident().nonzero().tolist() == [[0, 7], [1, 5], [2, 0]]
    ExpertCounts(reads[:2], 50).save(tmp_path / "c.json")
    with pytest.raises(CountsFileError, match="counts 2 layers of 8 experts, this model has 1 of 8"):
        engine(path, experts=0.5, expert_counts=tmp_path / "c.json")


def packed_tiny():
    config = preset("tiny", 3, False)
    with torch.device("meta"):
        return Transformer(config, Numerics(torch.float32), packed=True, mtp=False)


def test_the_number_of_experts_follows_the_memory():
    """For every byte budget between the minimum and enough for all experts, the most experts that fit are placed."""
    config, network = preset("tiny", 3, False), packed_tiny()
    whole = plan_budget(config, 2**30, 100_000, dtype=torch.float32)
    needed = whole.dense_bytes + 100_000
    last = -1
    for memory in range(int(needed * 1.10), int(needed * 1.8), int(needed * 0.1)):
        placed = place_experts(
            network, PlacementOptions(gpu_memory=memory), torch.device("cpu"), 2**30, 2**30, 100_000, 1, 256
        )
        if isinstance(placed, MemoryBudget):
            assert last > 0 and placed.hot == placed.experts and placed.left_bytes >= 0
            break
        budget = placed.budget
        assert last <= budget.hot < 24 and budget.left_bytes >= 0
        last = budget.hot
    else:
        raise AssertionError("the largest device holds everything")


def test_experts_read_in_the_background_give_the_same_answer(path, answer, capsys):
    with engine(path, experts=0.5, background_experts=True) as opened:
        assert "4 experts in host memory are read in the background" in capsys.readouterr().err
        output = opened.generate(PROMPT, temperature=0, max_tokens=2, ignore_eos=True, logprobs=5)
        assert nearly_equal(output, answer)


def nearly_equal(output, expected) -> bool:
    """The same tokens; probabilities are rounded differently by steps that run before all experts are there."""
    pairs = zip(output.logprobs, expected.logprobs, strict=True)
    return output.token_ids == expected.token_ids and all(
        abs(one.logprob - other.logprob) < 1e-4 for one, other in pairs
    )


def test_a_request_waits_for_the_experts_that_it_needs_and_for_no_other(path, answer):
    """The test reads the experts itself, only those that a step waits for."""
    with engine(path, experts="host") as opened:
        core, network = opened._core, opened.model
        names = network.cold_expert_names()
        name_of = {expert: name for name, expert in names.items()}
        stored = {
            expert: [part.clone() for part in network.expert_stacks()[0].stored_parts(expert[1])]
            for expert in name_of
        }
        for expert in name_of:
            for part in core.placement.store.home_parts(expert):
                part.view(torch.uint8).fill_(0xFF)  # not read yet
        checkpoint = open_checkpoint(path)
        destinations = [d for d in network.destinations() if d.name.rsplit(".", 2)[0] in names]
        report = load_into(destinations, checkpoint, skip=tuple(checkpoint), later=set(names))
        assert report.tensors == 0 and len(report.deferred) == 8
        gate = ReadGate(name_of)
        core.read_experts_in_background(BackgroundReader(gate, lambda expert: None, 0))
        outputs: list = []
        caller = threading.Thread(
            target=lambda: outputs.append(
                opened.generate(PROMPT, temperature=0, max_tokens=2, ignore_eos=True, logprobs=5)
            )
        )
        caller.start()
        read = []
        while caller.is_alive():
            if gate.wanted:  # nothing else is read
                expert = gate.take()
                report.deferred.fill(name_of[expert])
                read.append(expert)
                gate.done(expert)
            caller.join(0.001)
        (output,) = outputs
        assert nearly_equal(output, answer)
        assert 2 <= len(read) < 8 and gate.num_unread == 8 - len(read), "the others were not needed"
        for expert in read:
            for part, before in zip(network.expert_stacks()[0].stored_parts(expert[1]), stored[expert]):
                assert torch.equal(part.view(torch.uint8), before.view(torch.uint8))


def test_a_damaged_expert_fails_the_requests_that_need_it_and_no_load(path, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(path, broken)
    with engine(path, experts="host") as opened:
        names = sorted(opened.model.cold_expert_names())

    def damage(tensors):
        for name in names:
            tensors[f"{name}.w1.scale"].view(torch.uint8).fill_(255)

    edit(broken, damage)
    with engine(broken, experts="host", background_experts=True) as opened:
        output = opened.generate(PROMPT, temperature=0, max_tokens=1)
        assert output.finish_reason == "error" and isinstance(output.error, TensorValue)
        assert ".w1.scale[" in str(output.error) and "is NaN" in str(output.error)


@pytest.mark.parametrize("options", [{"experts_on": "auto"}, {"context_root": "/tmp"}])
def test_what_needs_all_experts_at_load_excludes_reading_them_later(options):
    with pytest.raises(OptionError, match="need all experts at load"):
        birkhoff.EngineOptions(background_experts=True, **options)
