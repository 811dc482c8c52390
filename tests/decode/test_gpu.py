"""The GPU decoder against the plain forward pass: logits of single tokens, in Triton's interpreter.

Start positions are boundaries: before the window is full, at its end, at the last token of a CSA and of an HCA block,
at the first entry beyond the indexer's top k, at the end of a page. All buffers are NaN before a step.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from birkhoff.bench.synthetic import filled_state
from birkhoff.bench.taps import TapPlans
from birkhoff.convert.presets import preset
from birkhoff.decode.gpu import Decoder, unsupported_model
from birkhoff.engine.cuda_graphs import CudaGraphs
from birkhoff.engine.engine import EngineCore
from birkhoff.engine.request import Request
from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.errors import OptionError
from birkhoff.hooks.attention_change import AttentionChange, Blocks, ranges_of
from birkhoff.hooks.batch_tap import StepStaging, arm
from birkhoff.hooks.graph_tap import AttentionShape, GraphTap, plan_graph
from birkhoff.hooks.key_rules import MAX_RULES
from birkhoff.hooks.plan import Plan, Span
from birkhoff.hooks.tap import NoTap
from birkhoff.kernels import gpu
from birkhoff.kernels.cuda.backend import scale_offset, unsupported_reason, unsupported_size
from birkhoff.kernels.select import select
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.state import State
from tests.hooks.test_vector_table import Everywhere
from tests.interpreter import DEVICE, packed_model
from tests.models import TINY, random_model, random_tokens, variant
from tests.sizes import FULL, scaled

SMALL = variant(
    compress_ratios=(0, 4, 128),
    num_hash_layers=1,
    num_nextn_predict_layers=0,
    hc_sinkhorn_iters=scaled(20, 3),
)
STARTS = (1, 3, 8, 51, 126, 127, 128, 255) if FULL else (3, 51, 127)
STEPS = scaled(3, 2)


@pytest.fixture(scope="module")
def model():
    return packed_model(SMALL)


def plain_step(model, state, pieces) -> torch.Tensor:
    """Logits by slot, from the plain forward pass."""
    batch = Batch.of(pieces, DEVICE)
    hidden, _ = model.run(batch, state, NoTap())
    order = sorted(range(len(pieces)), key=lambda i: batch.chunks[i].slot)
    return model.logits(hidden[batch.last_rows()])[order]


@torch.inference_mode()
def test_steps_equal_those_of_the_plain_model(model):
    rows = len(STARTS)
    tokens = [random_tokens(SMALL, max(STARTS) + STEPS, seed) for seed in range(rows)]
    states = [State.contiguous(SMALL, rows, 384, device=DEVICE) for _ in range(2)]
    for state in states:
        for slot, start in enumerate(STARTS):
            plain_step(model, state, [SequenceChunk(slot, 0, tokens[slot][:start])])
    decoder = Decoder(model, states[1], fast=False)
    buffers = decoder.buffers(rows, 384)
    assert buffers.max_entries > 0, "the indexer scores entries"
    for step in range(STEPS):
        at = [start + step for start in STARTS]
        pieces = [SequenceChunk(slot, at[slot], tokens[slot][at[slot]].view(1)) for slot in range(rows)]
        true = plain_step(model, states[0], pieces)
        buffers.poison()
        buffers.token_ids.copy_(torch.stack([tokens[slot][at[slot]] for slot in range(rows)]))
        buffers.positions.copy_(torch.tensor(at))
        buffers.slots.copy_(torch.arange(rows))
        assert (decoder.step(buffers) - true).abs().max() < 1e-4
    for actual, true in zip(states[1].layers, states[0].layers):
        for name, page in true.pages.items():
            assert (actual.pages[name] - page).abs().max() < 1e-5
        assert (actual.keys.rows - true.keys.rows).abs().max() < 1e-5


CHANGES = (
    AttentionChange(mask=((0, 2), (40, 50))),
    AttentionChange(heads=(1,), mask=((45, 128),), mask_entries="none", sink=0.0),
    AttentionChange(force=Blocks((0, 3)), forbid=Blocks((1,), ((20, 30),)), sink=3.0),
    AttentionChange(ablate=Blocks((2, 5)), ablation="zero"),
    AttentionChange(ablate=Blocks(tokens=((0, 130),)), mask=((0, 400),), sink=0.0),
)


@torch.inference_mode()
def test_steps_with_changed_attention_equal_those_of_the_plain_model(model):
    """Two changes per row in every layer, rows of different lengths; the last row is not changed."""
    rows = len(STARTS) + 1
    starts = [*STARTS, 60]
    tokens = [random_tokens(SMALL, max(starts) + STEPS, seed) for seed in range(rows)]
    states = [State.contiguous(SMALL, rows, 384, device=DEVICE) for _ in range(2)]
    for state in states:
        for slot, start in enumerate(starts):
            plain_step(model, state, [SequenceChunk(slot, 0, tokens[slot][:start])])
    decoder = Decoder(model, states[1], fast=False)
    buffers = decoder.buffers(rows, 384)
    layers = range(len(SMALL.compress_ratios))
    heads = SMALL.num_attention_heads
    plans = [
        Plan(
            edits=tuple(
                Everywhere({("attn_weights", layer): CHANGES[(row + layer + at) % 5] for layer in layers})
                for at in (0, 2)
            )
        )
        for row in range(rows - 1)
    ]
    graph, staging = None, StepStaging(DEVICE)
    for step in range(STEPS):
        at = [start + step for start in starts]
        pieces = [SequenceChunk(slot, at[slot], tokens[slot][at[slot]].view(1)) for slot in range(rows)]
        spans = [Span(plan, row, at[row], [5], 4) for row, plan in enumerate(plans)]
        tap = arm(staging, spans, rows)
        batch = Batch.of(pieces, DEVICE)
        assert [chunk.slot for chunk in batch.chunks] == list(range(rows))
        true = model.logits(model.run(batch, states[0], tap)[0])
        plan = plan_graph(tap, {}, AttentionShape(heads, [w.ratio for w in decoder.layers]))
        graph = graph or GraphTap(plan, tap.edits, rows, DEVICE)
        graph.fill(tap, plan)
        buffers.poison()
        buffers.token_ids.copy_(torch.stack([tokens[slot][at[slot]] for slot in range(rows)]))
        buffers.positions.copy_(torch.tensor(at))
        buffers.slots.copy_(torch.arange(rows))
        assert (decoder.step(buffers, graph) - true).abs().max() < 1e-4
    many = Plan(
        edits=(
            Everywhere(
                {("attn_weights", 0): AttentionChange(mask=ranges_of(range(0, 2 * MAX_RULES + 2, 2)))}
            ),
        )
    )
    tap = arm(StepStaging(DEVICE), [Span(many, 0, 90, [5], 4)], 1)
    assert plan_graph(tap, {}, AttentionShape(heads, [0])) is None, "more rules than the table has room for"


@torch.inference_mode()
def test_every_kind_of_edit_equals_the_eager_path_and_is_replayed(model):
    """Launched without a GPU; with one, the third step of a pattern is a replay of its graph."""
    rows, start, on_gpu = 2, 300, DEVICE.type == "cuda"
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        states.append(filled_state(SMALL, rows + 1, start, DEVICE, torch.float32))
    graphs = CudaGraphs(Decoder(model, states[1], fast=False), rows, start + 128)
    tap_plans = TapPlans(model, rows, 24)
    for name in ("mixer", "experts", "gated", "head", "blocks", "all masks"):
        plans, staging = tap_plans.plans(name, 100), StepStaging(DEVICE)
        for step in range(3 if on_gpu else 1):
            position = start + step
            tap = arm(
                staging, [Span(plan, row, position, [7 + row], 4) for row, plan in enumerate(plans)], rows
            )
            pieces = [SequenceChunk(row, position, torch.tensor([7 + row])) for row in range(rows)]
            true = model.logits(model.run(Batch.of(pieces, DEVICE), states[0], tap)[0])
            plain = graphs.step([7, 8], [position] * rows, range(rows))[0]
            logits, _ = graphs.step([7, 8], [position] * rows, range(rows), tap, graphs.plan(tap))
            assert (logits - true).abs().max() < (1e-3 if on_gpu else 1e-4), name
            assert (plain - true).abs().max() > 1e-3, name
        assert (graphs.last_tapped.graph is not None) == on_gpu


@torch.inference_mode()
def test_released_numerics_of_steps_equal_those_of_the_plain_model():
    """Rounding is the same, but a value next to a tie may be rounded the other way: most rows are equal, all are closer
    than what rounding changes."""
    starts = STARTS[-2:]
    rows = len(starts)
    model = packed_model(SMALL)
    numerics = {released: replace(model.numerics, released=released) for released in (True, False)}

    def use(released: bool) -> None:
        for module in model.modules():
            if hasattr(module, "numerics"):
                module.numerics = numerics[released]

    tokens = [random_tokens(SMALL, max(starts) + 2, seed) for seed in range(rows)]
    states = [State.contiguous(SMALL, rows, 384, device=DEVICE) for _ in range(3)]
    use(True)
    for state in states:
        for slot, start in enumerate(starts):
            plain_step(model, state, [SequenceChunk(slot, 0, tokens[slot][:start])])
    decoder = Decoder(model, states[1], fast=False)
    buffers = decoder.buffers(rows, 384)
    assert buffers.max_entries > 0, "the indexer scores entries"
    errors, effects = [], []
    for step in range(2):
        at = [start + step for start in starts]
        pieces = [SequenceChunk(slot, at[slot], tokens[slot][at[slot]].view(1)) for slot in range(rows)]
        true = plain_step(model, states[0], pieces)
        use(False)
        effects.append((plain_step(model, states[2], pieces) - true).norm(dim=-1))
        use(True)
        buffers.poison()
        buffers.token_ids.copy_(torch.stack([tokens[slot][at[slot]] for slot in range(rows)]))
        buffers.positions.copy_(torch.tensor(at))
        buffers.slots.copy_(torch.arange(rows))
        errors.append((decoder.step(buffers) - true).norm(dim=-1))
    error, effect = torch.cat(errors), torch.cat(effects)
    print(f"off by {(error / effect).tolist()} of what rounding does")
    assert (error < 0.01 * effect).float().mean() >= 0.5 and (error < 0.5 * effect).all()
    for actual, true in zip(states[1].layers, states[0].layers):
        for name, page in true.pages.items():
            assert ((actual.pages[name] - page).abs() > 1e-4).float().mean() < 0.02, name
        assert ((actual.keys.rows - true.keys.rows).abs() > 1e-4).float().mean() < 0.02


def requests(core: EngineCore, prompts: list[list[int]], count: int) -> list[list[int]]:
    options = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    made = [Request(tuple(ids), options, count, seed=0) for ids in prompts]
    for request in made:
        core.submit(request)
    while core.step():
        pass
    return [request.output_ids for request in made]


def test_an_engine_decodes_with_it(model):
    """Three requests in a step of four rows; the padding row has no effect."""
    prompts = [random_tokens(SMALL, length, length).tolist() for length in (2, 5, 9)]
    answers = []
    for name in ("reference", "triton"):
        same = packed_model(SMALL)
        numerics = type(same.numerics)(torch.float32, False, select(name))
        for module in same.modules():
            if hasattr(module, "numerics"):
                module.numerics = numerics
        same.numerics = numerics
        core = EngineCore(same, max_requests=3, max_context=256, num_pages=8, device=DEVICE)
        assert (core.runner.graphs is not None) == (name == "triton")
        answers.append(requests(core, prompts, 2))
        if core.runner.graphs is not None:
            assert list(core.runner.graphs._plain) == [(4, 256)], "one step size was enough"
        core.close()
    assert answers[0] == answers[1]


def test_unsupported_models_are_refused_with_the_reason(model):
    plain = random_model(SMALL)
    assert "held as numbers" in (unsupported_model(plain) or "")
    with pytest.raises(OptionError, match=r"experts are held as numbers\. Use kernels='reference'"):
        Decoder(plain, State.contiguous(SMALL, 1, 128))
    odd = packed_model(
        variant(compress_ratios=(0,), num_hash_layers=1, q_lora_rank=48, num_nextn_predict_layers=0)
    )
    assert unsupported_model(odd) == "q_lora_rank is 48, the kernels need a power of two from 16"
    assert unsupported_model(model) is None
    with pytest.raises(OptionError, match=r"the CUDA kernels cannot serve this model: .*Use fast=False"):
        Decoder(model, State.contiguous(SMALL, 1, 128, device=DEVICE), fast=True)


def test_what_runs_in_place_of_missing_kernels_is_named(model, monkeypatch):
    decoder = Decoder(model, State.contiguous(SMALL, 1, 128, device=DEVICE), fast=False)
    assert decoder.fallbacks() == ["decode steps run on Triton kernels instead of CUDA ones: not wanted"]
    ada = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "need compute capability 9.0" in gpu.prompt_fallback(ada)
    older = "the GPU is older than compute capability 9.0"
    assert unsupported_reason(TINY, torch.bfloat16, ada) == older
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert gpu.prompt_fallback(ada) is None and unsupported_reason(TINY, torch.bfloat16, ada) != older


def test_cuda_kernels_state_their_requirements():
    assert unsupported_reason(TINY, torch.bfloat16, torch.device("cpu")) == "no NVIDIA GPU"
    assert scale_offset(torch.tensor([100, 129], dtype=torch.uint8)) == 30 - 129
    assert scale_offset(torch.tensor([99, 129], dtype=torch.uint8)) is None
    flash = preset("flash", 4, False)
    assert unsupported_size(flash) is None and unsupported_size(preset("pro", 4, False)) is None
    for name, value, reason in (
        ("n_routed_experts", 528, "528 experts, more than 512"),
        ("num_experts_per_tok", 17, "17 experts"),
        ("hidden_size", 8704, "longer than 8192"),
        ("q_lora_rank", 1000, "no multiple of 128"),
    ):
        assert reason in (unsupported_size(replace(flash, **{name: value})) or "")
