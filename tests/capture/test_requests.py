"""Captures of a running engine: every request gets all of its rows, in order, in any batch."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.capture.sinks.job import CaptureJob, MemorySink
from birkhoff.capture.spec.request import Capture
from birkhoff.engine.engine import EngineCore
from birkhoff.engine.request import Request
from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.hooks.plan import Plan
from birkhoff.hooks.schema import build_hook_schema
from birkhoff.hooks.sites import Site
from birkhoff.hooks.tap import EagerTap
from tests.models import TINY, fused_model, random_model, random_tokens
from tests.sizes import scaled

SCHEMA = build_hook_schema(
    TINY.hidden_size,
    "float32",
    TINY.hc_mult,
    TINY.n_routed_experts,
    TINY.num_experts_per_tok,
    heads=TINY.num_attention_heads,
    head_dim=TINY.head_dim,
)
LAYERS = TINY.num_hidden_layers


@pytest.fixture(scope="module")
def model():
    return random_model()


@pytest.fixture(scope="module")
def fast_model():
    return fused_model(kernels="cpu")


def core_of(model, invariant=False, max_requests=6, num_pages=24, max_batch_tokens=128):
    return EngineCore(
        model,
        max_requests=max_requests,
        max_context=512,
        num_pages=num_pages,
        max_batch_tokens=max_batch_tokens,
        batch_invariant=invariant,
    )


def request_of(prompt, capture, max_tokens, seed=0):
    options = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed, ignore_eos=True)
    plan = None
    if capture is not None:
        resolved = capture.resolve(SCHEMA, LAYERS, prompt, max_tokens)
        plan = Plan((CaptureJob(resolved, MemorySink(resolved)),))
    return Request(tuple(prompt), options, max_tokens, seed, plan=plan)


def acts_of(request):
    job = request.plan.jobs[0]
    assert job.error is None
    return job.rows()


def finish(core, *requests):
    for request in requests:
        core.submit(request)
    while any(not r.done for r in requests):
        core.step()


def trace_of(model, ids):
    values = {}

    def keep(site: Site, layer: int, tensor: torch.Tensor) -> None:
        values[site.name, layer] = tensor.detach().clone()

    with torch.no_grad():
        model(torch.tensor(ids), EagerTap(seen=keep))
    return values


@pytest.mark.parametrize("which", ["plain", "compiled"])
def test_t_cap_6_captured_rows_equal_the_reference_forward(which, model, fast_model):
    """Every hook on every layer, prompt and generated tokens, against a whole forward pass of the same tokens."""
    core = core_of(model if which == "plain" else fast_model)
    everything = Capture(dict.fromkeys(SCHEMA, "all"), positions="all")
    request = request_of(random_tokens(TINY, 70).tolist(), everything, 70)
    finish(core, request)
    run = [*request.prompt_ids, *request.output_ids[:-1]]  # the last token sampled is never run
    expected, acts = trace_of(model, run), acts_of(request)
    assert set(acts) == set(expected)
    for key, rows in acts.items():
        assert rows.positions == tuple(range(len(run))) and rows.token_ids == tuple(run)
        assert rows.tensor.shape == expected[key].shape
        size = expected[key].abs().max().clamp_min(10.0)  # streams grow to some twenty
        assert (rows.tensor - expected[key]).abs().max() < 1e-5 * size, key


@pytest.mark.parametrize("which", ["plain", "compiled"])
def test_t_cap_9_streams_are_rebuilt_from_captured_rows(which, model, fast_model):
    """X' from X, y, p, R and u from a, X at every sublayer; a transposed R does not fit."""
    core = core_of(model if which == "plain" else fast_model)
    request = request_of(
        random_tokens(TINY, 40).tolist(), Capture(dict.fromkeys(SCHEMA, "all"), positions="all"), 20
    )
    finish(core, request)
    acts = {key: rows.tensor for key, rows in acts_of(request).items()}
    for layer in range(LAYERS):
        after = (
            acts["mhc_streams_pre_attn", layer + 1]
            if layer + 1 < LAYERS
            else acts["mhc_streams_final", layer]
        )
        for name, before, out, u, written in (
            ("attn", "mhc_streams_pre_attn", "post_attn", "pre_attn", acts["mhc_streams_pre_mlp", layer]),
            ("ffn", "mhc_streams_pre_mlp", "mlp_out", "mlp_in", after),
        ):
            x, y = acts[before, layer], acts[out, layer]
            a, p, r = (acts[f"mhc_{name}_{kind}_mix", layer] for kind in ("pre", "post", "res"))
            wrote = p.unsqueeze(-1) * y.unsqueeze(1)
            scale = written.abs().max()
            assert (torch.einsum("njk,njd->nkd", r, x) + wrote - written).abs().max() < 1e-5 * scale
            if (layer, name) != (0, "attn"):  # there the streams are still copies of each other
                assert (torch.einsum("nkj,njd->nkd", r, x) + wrote - written).abs().max() > 1e-3 * scale
            assert (torch.einsum("nm,nmd->nd", a, x) - acts[u, layer]).abs().max() < 1e-5 * scale


def test_capturing_changes_no_bit(model, fast_model):
    for network in (model, fast_model):
        prompt = random_tokens(TINY, 150).tolist()
        plain, watched = (
            Request(
                tuple(prompt),
                SamplingParams(max_tokens=40, temperature=0, logprobs=5, ignore_eos=True),
                40,
                0,
            )
            for _ in range(2)
        )
        resolved = Capture(dict.fromkeys(SCHEMA, "all"), positions="all").resolve(SCHEMA, LAYERS, prompt, 40)
        watched.plan = Plan((CaptureJob(resolved, MemorySink(resolved)),))
        finish(core_of(network), plain)
        finish(core_of(network), watched)
        assert (
            plain.output_ids == watched.output_ids and plain.logprobs == watched.logprobs
        )  # floats, bit for bit


def test_a_step_without_captured_rows_runs_no_tap(model):
    """A prompt-only capture costs nothing while decoding: the step is run without a tap at all."""
    core = core_of(model)
    request = request_of(
        random_tokens(TINY, 20).tolist(), Capture({"mlp_out": [0]}, positions="last_prompt"), 10
    )
    core.submit(request)
    taps = []
    run = core.runner.model.run

    class Watching(torch.nn.Module):
        numerics, config = model.numerics, model.config

        def run(self, batch, state, tap):
            taps.append(type(tap).__name__)
            return run(batch, state, tap)

        def logits(self, hidden):
            return model.logits(hidden)

    core.runner.model = Watching()
    while not request.done:
        core.step()
    assert taps[0] == "BatchTap" and set(taps[1:]) == {"NoTap"} and len(taps) == 10
    assert acts_of(request)["mlp_out", 0].positions == (19,)


def random_capture(rng):
    hooks = rng.sample(sorted(SCHEMA), rng.randint(1, 3))
    positions = rng.choice(
        [
            "all",
            "all_prompt",
            "all_generated",
            "last_prompt",
            [0, -1],
            {"prompt": {"window": [1, 5]}, "generated": [0, 2]},
            {"generated": "all", "exclude": {"window": [3, 9]}},
        ]
    )
    layers = rng.choice(["all", [0, -1], {"every": 2, "from": 1}])
    return Capture(dict.fromkeys(hooks, layers), positions=positions)


@pytest.mark.timeout(scaled(4 * 3600, 600))  # at full size 200 examples of 8 to 20 seconds
@settings(max_examples=scaled(200, 4), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_t_cap_7_rows_do_not_depend_on_neighbours_chunks_or_preemption(model, seed):
    """64 requests with random captures arrive and are cancelled at random over too few pages; each one that ends gives,
    bit for bit, the rows, positions and token ids of its solo run."""
    rng = random.Random(seed)
    core = core_of(model, invariant=True, max_requests=5, num_pages=7, max_batch_tokens=96)
    count = scaled(64, 16)
    waiting = []
    for index in range(count):
        prompt = random_tokens(
            TINY, rng.randint(9, 140), index + seed % 1000
        ).tolist()  # each capture finds something
        waiting.append(
            request_of(prompt, random_capture(rng) if rng.random() < 0.8 else None, rng.randint(3, 10), index)
        )
    everyone = list(waiting)
    while waiting or any(not r.done for r in everyone):
        if waiting and rng.random() < 0.7:
            core.submit(waiting.pop(0))
        if rng.random() < 0.05:
            victim = rng.choice(everyone)
            if victim not in waiting:
                core.cancel(victim)
        core.step()
    assert core.scheduler.pages.num_free == 7 and core.scheduler.slots.num_free == 5
    alone = core_of(model, invariant=True, max_requests=1, num_pages=4, max_batch_tokens=96)
    checked = 0
    for request in everyone:
        if request.finish_reason != "length" or request.plan is None or checked >= scaled(64, 4):
            continue
        checked += 1
        solo = request_of(
            list(request.prompt_ids), request.plan.jobs[0].resolved.capture, request.max_tokens, request.seed
        )
        finish(alone, solo)
        assert solo.output_ids == request.output_ids
        actual, expected = acts_of(request), acts_of(solo)
        assert set(actual) == set(expected) and actual.missing == expected.missing
        for key in actual:
            assert (
                actual[key].positions == expected[key].positions
                and actual[key].token_ids == expected[key].token_ids
            )
            assert torch.equal(actual[key].tensor, expected[key].tensor), key


def test_rows_computed_again_after_a_preemption_come_once(model):
    core = core_of(model, max_requests=3, num_pages=4)
    requests = [
        request_of(random_tokens(TINY, 120, n).tolist(), Capture({"mlp_out": [2]}, positions="all"), 30)
        for n in range(3)
    ]
    finish(core, *requests)
    assert sum(r.timings.preemptions for r in requests) > 0
    for request in requests:
        rows = acts_of(request)["mlp_out", 2]
        assert rows.positions == tuple(range(149))
        expected = trace_of(model, [*request.prompt_ids, *request.output_ids[:-1]])["mlp_out", 2]
        assert (rows.tensor - expected).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["mean", "sum", "last", "max_norm"])
def test_reductions_over_steps_equal_those_over_all_rows(model, kind):
    prompt = random_tokens(TINY, 90).tolist()
    whole = request_of(prompt, Capture({"post_attn": [1]}, positions="all"), 12)
    reduced = request_of(prompt, Capture({"post_attn": [1]}, positions="all", reduce=kind), 12)
    finish(core_of(model, invariant=True), whole, reduced)
    rows, got = acts_of(whole)["post_attn", 1].tensor, acts_of(reduced)["post_attn", 1].tensor
    expected = {
        "mean": rows.double().mean(0),
        "sum": rows.double().sum(0),
        "last": rows[-1].double(),
        "max_norm": rows[rows.double().norm(dim=1).argmax()].double(),
    }[kind]
    assert got.shape == (1, TINY.hidden_size) and torch.allclose(got[0].double(), expected, atol=1e-5)


def test_streams_subset_and_storage_dtypes(model):
    prompt = random_tokens(TINY, 30).tolist()
    full = request_of(prompt, Capture({"mhc_streams_pre_mlp": [3]}), 2)
    part = request_of(prompt, Capture({"mhc_streams_pre_mlp": [3]}, streams=[0, 2], dtype="bf16"), 2)
    tight = request_of(prompt, Capture({"mhc_streams_pre_mlp": [3]}, dtype="fp8_e4m3"), 2)
    finish(core_of(model, invariant=True), full, part, tight)
    rows = acts_of(full)["mhc_streams_pre_mlp", 3].tensor
    assert torch.equal(acts_of(part)["mhc_streams_pre_mlp", 3].tensor, rows[:, [0, 2]].bfloat16())
    fp8 = acts_of(tight)["mhc_streams_pre_mlp", 3]
    assert fp8.tensor.dtype == torch.float8_e4m3fn and fp8.scale is not None
    assert (
        (fp8.tensor.float() * fp8.scale.view(-1, 1, 1) - rows).abs() <= rows.abs() / 16 + fp8.scale.max()
    ).all()


def test_a_failing_capture_does_not_fail_the_generation(model):
    class Broken(MemorySink):
        def append(self, rows):
            raise OSError("no space left on device")

    prompt = random_tokens(TINY, 20).tolist()
    resolved = Capture({"mlp_out": [0]}, positions="all").resolve(SCHEMA, LAYERS, prompt, 5)
    job = CaptureJob(resolved, Broken(resolved))
    request = request_of(prompt, None, 5)
    request.plan = Plan((job,))
    finish(core_of(model), request)
    assert request.finish_reason == "length" and len(request.output_ids) == 5
    assert "no space left" in job.error
