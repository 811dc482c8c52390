"""Prefill with GPU kernels against the plain model, at every site, in chunks; in Triton's interpreter.

Weights are packed in both models; one dequantises them, the other reads them as stored. The tensors of all sites, the
state and the logits are compared.
"""

from __future__ import annotations

import pytest
import torch

from birkhoff.hooks.batch_tap import StepStaging, arm
from birkhoff.hooks.plan import Plan, Span
from birkhoff.hooks.tap import EagerTap, NoTap
from birkhoff.kernels.mhc import reference as plain
from birkhoff.kernels.select import select
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.block import Block
from birkhoff.model.linear import Linear, Numerics
from birkhoff.model.state import Snapshot, State
from birkhoff.model.transformer import Transformer
from tests.interpreter import DEVICE, packed_model
from tests.model.offloaded import offloaded_model
from tests.models import random_tokens, variant
from tests.sizes import FULL, scaled

SMALL = variant(
    compress_ratios=(0, 4, 128),
    num_hash_layers=1,
    num_nextn_predict_layers=0,
    index_topk=4,
    hc_sinkhorn_iters=scaled(20, 3),
)
# Tokens prefilled by the plain path, and the ends of the compared chunks; one ends a block of 128.
CASES = {"two fresh prompts": (0, [7], 2), "a chunk that goes on": (122, [129], 1)}
if FULL:
    CASES |= {"a long prompt": (0, [300], 2), "several chunks": (0, [51, 127, 290], 1)}


def with_kernels(model: Transformer, name: str, released: bool = False) -> Transformer:
    """The same weights with other kernels."""
    numerics = Numerics(model.numerics.dtype, released, select(name))
    for module in model.modules():
        for attribute, value in (("numerics", numerics), ("kernels", numerics.kernels)):
            if hasattr(module, attribute):
                setattr(module, attribute, value)
    return model


def read(model: Transformer, state: State, tokens: list[torch.Tensor], start: int, cuts: list[int]) -> dict:
    """Every site of every chunk, and the final streams and logits."""
    seen: dict = {}

    def see(site, layer, tensor) -> None:
        seen.setdefault((site.name, layer), []).append(tensor.detach().float().clone())

    for cut in cuts:
        pieces = [SequenceChunk(slot, start, ids[start:cut]) for slot, ids in enumerate(tokens)]
        hidden, streams = model.run(Batch.of(pieces, DEVICE), state, EagerTap(see))
        start = cut
    result = {key: torch.cat(parts) for key, parts in seen.items()}
    return result | {("streams", -1): streams, ("logits", -1): model.logits(hidden)}


@torch.no_grad()
def test_a_mixer_renews_its_cached_halves_when_its_matrix_changes(monkeypatch):
    """The cached form is renewed when the matrix is changed in place, moved, or read by other kernels."""

    from birkhoff.kernels.mhc import prefill

    monkeypatch.setattr(
        prefill, "MIN_ROWS", 16
    )  # lower the row limit of the split form: the interpreter is slow
    model = with_kernels(packed_model(SMALL), "triton")
    mixer = model.layers[0].hc_attn
    streams = (
        torch.randn(20, 4, SMALL.hidden_size, generator=torch.Generator().manual_seed(1)).to(DEVICE).half()
    )

    def check_read() -> torch.Tensor:
        result = mixer.read(streams)
        true = plain.read(streams, mixer.fn, mixer.base, mixer.scale, mixer.iters, mixer.eps, mixer.rms_eps)
        for actual, expected in zip(result, true):
            assert (actual.float() - expected.float()).norm() < 1e-3 * expected.float().norm()
        return result[3]

    first = check_read()
    mixer.fn.mul_(-3.0)
    second = check_read()
    assert (first - second).abs().max() > 0.01
    mixer.fn.data = mixer.fn.data.flip(0).contiguous()
    assert (second - check_read()).abs().max() > 0.01
    with_kernels(model, "reference")
    check_read()


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_every_site_of_a_prompt_equals_the_plain_model(case):
    past, cuts, sequences = CASES[case]
    model = with_kernels(packed_model(SMALL), "reference")
    tokens = [random_tokens(SMALL, cuts[-1], seed) for seed in range(sequences)]
    states = [State.contiguous(SMALL, len(tokens), cuts[-1], device=DEVICE) for _ in range(2)]
    if past:
        for state in states:
            read(model, state, tokens, 0, [past])
    true = read(model, states[0], tokens, past, cuts)
    actual = read(with_kernels(model, "triton"), states[1], tokens, past, cuts)
    assert actual.keys() == true.keys() and len(true) > 30
    for key, tensor in true.items():
        assert (actual[key] - tensor).abs().max() <= 2e-4 * tensor.abs().max().clamp_min(1.0), key
    for layer, other in zip(states[1].layers, states[0].layers):
        for name, page in other.pages.items():
            assert (layer.pages[name] - page).abs().max() < 1e-4
        assert (layer.keys.rows - other.keys.rows).abs().max() < 1e-4


@torch.inference_mode()
def test_released_numerics_of_a_prompt_equal_the_plain_model():
    """Rounding is the same in both, its inputs differ in the last bits of float32: a tie may be rounded differently,
    which changes a value by one FP8 or FP4 step. Rows without such a value agree closely; where one is, later layers
    differ too, by far less than what rounding itself changes."""
    past, stop = 125, 129
    model = with_kernels(packed_model(SMALL), "reference", released=True)
    tokens = [random_tokens(SMALL, stop)]
    states = [State.contiguous(SMALL, len(tokens), stop, device=DEVICE) for _ in range(3)]
    for state in states:
        read(model, state, tokens, 0, [past])
    true = read(model, states[0], tokens, past, [stop])
    unrounded = read(with_kernels(model, "reference"), states[2], tokens, past, [stop])
    actual = read(with_kernels(model, "triton", released=True), states[1], tokens, past, [stop])
    assert actual.keys() == true.keys() and len(true) > 30
    close = []
    for key, tensor in true.items():
        near = 2e-4 * tensor.abs().amax().clamp_min(1.0)
        close.append(((actual[key] - tensor).abs().flatten(1).amax(1) <= near).float().mean())
    error, effect = ((other["logits", -1] - true["logits", -1]).norm() for other in (actual, unrounded))
    print(f"released: {torch.stack(close).mean():.0%} of rows close, off by {error / effect:.1e} of rounding")
    assert torch.stack(close).mean() > 0.7 and error < 0.3 * effect
    for layer, other in zip(states[1].layers, states[0].layers):
        for name, page in other.pages.items():
            differs = (layer.pages[name] - page).abs() > 1e-4
            assert differs.float().mean() < 0.02, name
        assert ((layer.keys.rows - other.keys.rows).abs() > 1e-4).float().mean() < 0.02


@torch.inference_mode()
def test_chunks_of_several_sequences_in_one_step_equal_the_plain_model():
    """Different starts and lengths, one decoding sequence, and snapshots at page boundaries; then one more step."""
    model = with_kernels(packed_model(SMALL), "reference")
    pasts, stops = (0, 125, 40, 0), (9, 131, 41, 3)
    tokens = [random_tokens(SMALL, stop + 4, seed) for seed, stop in enumerate(stops)]
    states = [State.contiguous(SMALL, len(tokens), 160, device=DEVICE) for _ in range(2)]
    for state in states:
        chunks = [
            SequenceChunk(slot, 0, ids[: pasts[slot]]) for slot, ids in enumerate(tokens) if pasts[slot]
        ]
        model.run(Batch.of(chunks, DEVICE), state, EagerTap(lambda *_: None))
    outputs, snapshots = [], []
    for state, kernels in zip(states, ("reference", "triton")):
        with_kernels(model, kernels)
        snapshot = Snapshot(128)
        state.watched[1] = [snapshot]
        chunks = [SequenceChunk(i, pasts[i], ids[pasts[i] : stops[i]]) for i, ids in enumerate(tokens)]
        first, _ = model.run(Batch.of(chunks, DEVICE), state, EagerTap(lambda *_: None))
        state.watched.clear()
        chunks = [SequenceChunk(i, stops[i], ids[stops[i] : stops[i] + 4]) for i, ids in enumerate(tokens)]
        second, _ = model.run(Batch.of(chunks, DEVICE), state, EagerTap(lambda *_: None))
        outputs.append(torch.cat((first, second)))
        snapshots.append(snapshot)
        assert state.fits(snapshot)
    assert (outputs[0] - outputs[1]).abs().max() < 2e-4 * outputs[0].abs().max()
    assert snapshots[0].rows.keys() == snapshots[1].rows.keys()
    for name, rows in snapshots[0].rows.items():
        assert rows.numel() == 0 or (snapshots[1].rows[name] - rows).abs().max() < 1e-4, name


@torch.no_grad()
@pytest.mark.parametrize("lengths", [(131,), (9, 20, 20)])
def test_whole_texts_without_a_cache_equal_the_plain_model(lengths):
    model = packed_model(SMALL)
    texts = [random_tokens(SMALL, length, seed).tolist() for seed, length in enumerate(lengths)]
    expected, hidden = (
        torch.cat(with_kernels(model, kernels).run_texts(texts, lambda rows: NoTap()))
        for kernels in ("reference", "triton")
    )
    assert (hidden - expected).abs().max() < 2e-4 * expected.abs().max()


@torch.inference_mode()
def test_a_weight_is_repacked_for_kernels_only_after_it_moved():
    layer = Linear(32, {"a": 24, "b": 8}, "fp8", Numerics(kernels=select("triton")), packed=True).to(DEVICE)
    layer.codes.copy_(torch.randn(32, 32).to(torch.float8_e4m3fn))
    layer.scale.copy_(torch.tensor([[125], [126]]))
    packed = layer.packed_weight()
    assert layer.packed_weight() is packed and layer.reads_codes
    assert packed.weight.data_ptr() == layer.codes.data_ptr(), "codes are in memory once"
    assert torch.equal(packed.dense(), layer.dense())
    layer.codes = layer.codes.clone()
    assert layer.packed_weight() is not packed
    with torch.enable_grad():
        assert not layer.reads_codes


@torch.inference_mode()
@pytest.mark.parametrize("rows", [5, 64], ids=["selected experts", "all experts"])
def test_experts_in_host_memory_are_read_in_waves_with_identical_bits(rows):
    config = variant(compress_ratios=(0,), num_hash_layers=0, num_nextn_predict_layers=0)
    source = with_kernels(packed_model(config), "triton")
    g = torch.Generator().manual_seed(1)
    x = torch.randn(rows, config.hidden_size, generator=g).to(DEVICE)
    ids = (
        torch.rand(rows, config.n_routed_experts, generator=g)
        .argsort(-1)[:, : config.num_experts_per_tok]
        .to(DEVICE)
    )
    weights = torch.rand(ids.shape, generator=g).to(DEVICE)
    (stack,) = source.expert_stacks()
    true = stack(x, ids, weights)
    for share in (1.0, 0.5, 0.0):
        model, store = offloaded_model(source, share)
        (actual,) = model.expert_stacks()
        assert store.any_cold(0) == (share < 1)
        assert torch.equal(actual(x, ids, weights), true)
        assert not any(cached.refcount for cached in store._cached.values()), "every copy was released"


class StreamRows:
    """A job that takes the streams of a model of one layer, at some tokens."""

    keys = (("mhc_streams_pre_attn", 0), ("mhc_streams_pre_mlp", 0))
    after, on_device = False, True

    def __init__(self, offsets: list[int]):
        self.selected = offsets
        self.rows: dict = {}

    def offsets(self, start, token_ids, prompt_len):
        return self.selected

    def deliver(self, rows) -> None:
        self.rows[rows.hook, rows.layer] = rows


@torch.inference_mode()
def test_capturing_the_streams_of_a_prompt_changes_no_bit_of_it(monkeypatch):
    """Layers whose streams alone are captured run the kernels of layers that are not looked at."""
    config = variant(
        compress_ratios=(0,), num_hash_layers=0, num_nextn_predict_layers=0, hc_sinkhorn_iters=scaled(20, 1)
    )
    model = with_kernels(packed_model(config), "triton")
    tokens = random_tokens(config, 3)

    def streams(tap):
        state = State.contiguous(config, 1, 32, device=DEVICE, dtype=model.numerics.dtype)
        return model.run(Batch.of([SequenceChunk(0, 0, tokens)], DEVICE), state, tap)[1]

    sites: dict = {}
    streams(EagerTap(lambda site, layer, x: sites.update({(site.name, layer): x.clone()})))
    expected = streams(NoTap())
    monkeypatch.setattr(Block, "forward", None)  # what is left of a layer is its fused form
    monkeypatch.setattr(Block, "__call__", Block._forward_fused)
    for offsets in ([0, 1, 2], [0, 2]):  # a run of rows, and scattered ones
        job = StreamRows(offsets)
        tap = arm(StepStaging(DEVICE), [Span(Plan(jobs=(job,)), 0, 0, tokens.tolist(), 3)], 3)
        assert tap.at(0).streams_only
        assert torch.equal(streams(tap), expected)
        tap.deliver()
        assert job.rows.keys() == set(job.keys)
        for key, rows in job.rows.items():
            assert rows.positions == tuple(offsets)
            torch.testing.assert_close(rows.tensor, sites[key][offsets], rtol=2e-2, atol=2e-2)
