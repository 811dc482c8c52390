"""Speculation with recorded steps: tokens, drafts and captured rows equal those of the eager path.

`PlainDecoder` computes recorded steps with the plain model on the same buffers, so that many patterns of accepted and
rejected drafts can be tried; `tests/decode/test_mtp.py` compares the kernels with the plain model. One test runs the
kernels in Triton's interpreter. Nowhere here is a graph recorded, which needs a GPU.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.decode.gpu import Decoder
from birkhoff.engine.cuda_graphs import CudaGraphs, row_sizes
from birkhoff.engine.draft_chain import DraftChain
from birkhoff.engine.engine import EngineCore
from birkhoff.engine.gpu_warmup import warm_up
from birkhoff.engine.request import Request
from birkhoff.engine.speculation import Speculator
from birkhoff.hooks.edit import SiteEdit
from birkhoff.hooks.plan import Plan
from birkhoff.model.batch import Batch, SequenceChunk
from tests.engine.test_speculation import Rows, ask, run
from tests.hooks.test_vector_table import Everywhere, vector
from tests.interpreter import DEVICE, packed_model
from tests.models import random_tokens, variant
from tests.sizes import scaled

SMALL = variant(compress_ratios=(0, 4, 128), num_hash_layers=1)
MICRO = variant(
    compress_ratios=(4,),
    vocab_size=64,
    hidden_size=32,
    num_attention_heads=2,
    head_dim=16,
    q_lora_rank=16,
    o_groups=1,
    n_routed_experts=4,
    num_experts_per_tok=1,
    moe_intermediate_size=32,
    num_hash_layers=1,
    hc_sinkhorn_iters=2,
)
TEXT = random_tokens(MICRO, 400, 1).tolist()
SCRATCH = 3


@pytest.fixture(scope="module")
def model():
    return packed_model(SMALL, mtp=True)


class PlainDecoder(Decoder):
    """Decode and MTP steps by the plain model."""

    def step(self, buffers, taps=None):
        from birkhoff.hooks.tap import NoTap

        hidden, streams = self.model.run(self._batch(buffers), self.state, taps or NoTap())
        buffers.logits.copy_(self.model.logits(hidden))
        buffers.streams.copy_(streams)
        if taps is not None:
            taps.end()
        return buffers.logits

    def draft(self, buffers):
        hidden, streams = self.model.draft(buffers.streams.clone(), self._batch(buffers), self.state)
        buffers.logits.copy_(self.model.logits(hidden))
        buffers.streams.copy_(streams)
        return buffers.logits

    def _batch(self, buffers) -> Batch:
        rows = zip(buffers.slots.tolist(), buffers.positions.tolist(), buffers.token_ids.tolist())
        pieces = [SequenceChunk(slot, position, [token]) for slot, position, token in rows]
        batch = Batch.of(pieces, DEVICE)
        assert list(batch.chunks) == pieces
        return batch


class Observed(Speculator):
    """Records what is drafted; the drafts to be verified are right or wrong according to a pattern."""

    truth: dict[Request, list[int]]
    pattern: list[bool]

    def draft(self, chunks, outputs, pending=None):
        count = super().draft(chunks, outputs, pending)
        self.proposals = getattr(self, "proposals", [])
        for index, request in enumerate(self.truth):
            if request.draft_tokens:
                self.proposals.append((index, len(request.output_ids), request.draft_tokens))
                known = len(request.output_ids)
                request.draft_tokens = tuple(
                    self.truth[request][known + ahead]
                    if self.pattern[(known + ahead + index) % len(self.pattern)]
                    else (self.truth[request][known + ahead] + 1) % 64
                    for ahead in range(len(request.draft_tokens))
                )
        return count


def engine(model, depth: int, recorded: type[Decoder] | None = None, **options) -> EngineCore:
    """An engine for up to three requests. With `recorded`, decode and MTP steps run as on a GPU; prompts are computed
    by the plain model."""
    given = {"max_requests": 4, "max_context": 512, "num_pages": 24, "max_batch_tokens": 300}
    given |= {"draft_depth": depth, "draft_always": True, "device": DEVICE}
    core = EngineCore(model, **{**given, **options})
    if recorded is not None:
        core.runner.graphs = CudaGraphs(recorded(model, core.runner.state, fast=False), SCRATCH, 512)
        if depth:
            core.speculator.chain = DraftChain(core.runner.graphs, core.sampler, depth)
    return core


def observe(core: EngineCore, truth: dict[Request, list[int]], pattern: list[bool]) -> Observed:
    old = core.speculator
    observed = Observed(core.model, core.runner.state, core.sampler, old.depth, old.controller, old.chain)
    observed.truth, observed.pattern = truth, pattern
    core.speculator = core.runner.speculator = observed
    return observed


HOWS = [
    {},
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.2, "min_tokens": 3, "logit_bias": {3: 2.0}},
]


def plans(seed: int) -> Plan:
    """Two captured sites, and three edited ones of which one is captured."""
    width = SMALL.hidden_size
    edits = (
        Everywhere({("mlp_out", 2): SiteEdit("add", vector(width, seed, 0.2))}),
        Everywhere({("post_attn", 0): SiteEdit("patch", vector(width, seed + 1, 0.5), 0.5)}),
    )
    return Plan(jobs=(Rows(),), edits=edits)


def test_row_sizes_hold_a_power_of_two_of_sequences_with_drafts():
    assert row_sizes(0) == row_sizes(1) == row_sizes(3) == (1, 2, 4, 8, 16, 32, 64)
    assert row_sizes(2) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@settings(max_examples=scaled(60, 6))
@given(
    st.integers(1, 3),
    st.lists(st.booleans(), min_size=1, max_size=5),
    st.sampled_from([1, 7, 118, 126, 127, 250]),
)
def test_every_pattern_gives_the_tokens_drafts_and_rows_of_the_eager_path(model, depth, pattern, length):
    """Greedy, sampled and penalised requests in one batch, across block, page and window boundaries. Drafts are
    compared as well: a wrong one would change no token."""
    count = 10

    def ask_all() -> list[Request]:
        return [ask(TEXT[n : n + length + 3 * n], count, plans(n), **how) for n, how in enumerate(HOWS)]

    plain = run(engine(model, 0), *ask_all())
    results = []
    for decoder in (None, PlainDecoder):
        requests, core = ask_all(), engine(model, depth, decoder)
        observed = observe(core, dict(zip(requests, (each.output_ids for each in plain))), pattern)
        run(core, *requests)
        results.append((requests, observed.proposals))
        if decoder is not None:
            assert len(core.runner.graphs._tapped) > 0, "captured steps used the recorded path"
        core.close()
    (eager, eager_drafts), (recorded, drafts) = results
    assert drafts == eager_drafts and len(drafts) > 3
    for true, other, request in zip(plain, eager, recorded):
        assert request.output_ids == true.output_ids and request.finish_reason == true.finish_reason
        assert (request.drafted, request.accepted) == (other.drafted, other.accepted)
        assert [each.token_id for each in request.logprobs] == [each.token_id for each in true.logprobs]
        for one, two in zip(request.logprobs, true.logprobs):
            assert abs(one.logprob - two.logprob) < 1e-4
        assert request.plan.steered == true.plan.steered
        assert request.plan.delivered_until == true.plan.delivered_until
        for site, rows in true.plan.jobs[0].got.items():
            actual = request.plan.jobs[0].got[site]
            assert [row[:2] for row in actual] == [row[:2] for row in rows], "every row once, in order"
            close = torch.stack([row for *_, row in actual]), torch.stack([row for *_, row in rows])
            torch.testing.assert_close(*close, atol=5e-4, rtol=1e-3)


def test_rows_with_and_without_drafts_share_a_step(model):
    """A request that MTP has not followed is decoded beside one that is drafted for, and never drafted for."""
    core = engine(model, 2, PlainDecoder)
    first, second = ask(TEXT[:9], 20), ask(TEXT[5:30], 20)
    core.submit(first)
    core.step()
    speculator = core.speculator
    core.speculator = core.runner.speculator = None
    core.submit(second)
    core.step()  # prefill of the second and a token of the first, without MTP
    core.speculator = core.runner.speculator = speculator
    first.num_mtp_tokens = (
        first.num_computed_tokens
    )  # as if it had been followed: only acceptance depends on it
    run(core)
    alone = [run(engine(model, 0), ask(TEXT[:9], 20))[0], run(engine(model, 0), ask(TEXT[5:30], 20))[0]]
    assert [first.output_ids, second.output_ids] == [each.output_ids for each in alone]
    assert first.drafted > 10 and second.drafted == 0


def test_a_masked_request_is_verified_within_its_mask(model):
    """Only multiples of three, then only others: a draft outside of the mask is rejected."""

    class Alternate:
        def allowed(self, output_ids, vocab_size):
            assert all((token % 3 == 0) == (n % 2 == 0) for n, token in enumerate(output_ids)), output_ids
            return (torch.arange(vocab_size) % 3 == 0) == (len(output_ids) % 2 == 0)

    requests = [ask(TEXT[:20], 12, temperature=1.0) for _ in range(2)]
    for request, depth in zip(requests, (0, 3)):
        request.mask = Alternate()
        run(engine(model, depth, PlainDecoder), request)
    assert requests[0].output_ids == requests[1].output_ids and requests[1].drafted > 0


def test_unusable_logits_end_only_their_request(model):
    plan = Plan(edits=(Everywhere({("final_hidden", 2): SiteEdit("add", vector(64, 1) * float("nan"))}),))
    good, bad = ask(TEXT[:20], 8), ask(TEXT[:8], 8, plan)
    run(engine(model, 2, PlainDecoder), good, bad)
    assert bad.finish_reason == "error" and "NaN" in str(bad.error)
    assert good.output_ids == run(engine(model, 0), ask(TEXT[:20], 8))[0].output_ids


def test_drafting_that_is_being_measured_keeps_the_mtp_state_in_plain_steps(model):
    """A trial alternates between drafting and plain steps; drafts after plain steps are those of an engine that always
    drafts, at the same positions."""
    always, measured = {}, {}
    for kept, options in ((always, {}), (measured, {"draft_always": False})):
        request = ask(TEXT[:40], 60)
        core = engine(model, 1, PlainDecoder, **options)
        core.submit(request)
        while core.step():
            if request.draft_tokens:
                kept[len(request.output_ids)] = request.draft_tokens
    plain_steps = 60 - len(measured)
    assert plain_steps >= 6 and len(measured) >= 6
    same = [always.get(at) == tokens for at, tokens in measured.items() if at in always]
    assert len(same) >= 6 and all(same)


def test_drafts_fit_the_rows_of_the_next_step(model):
    core = engine(model, 3, PlainDecoder)
    core.runner.graphs.row_sizes = (1, 2, 4, 6)
    requests = [ask(TEXT[n : n + 10], 8, seed=n) for n in range(3)]
    for request in requests:
        core.submit(request)
    seen = set()
    while core.step():
        seen.add(tuple(len(request.draft_tokens) for request in requests))
        assert 3 + sum(len(request.draft_tokens) for request in requests) <= 6
    assert (3, 0, 0) in seen
    for n, request in enumerate(requests):
        (alone,) = run(engine(model, 0), ask(TEXT[n : n + 10], 8, seed=n))
        assert request.output_ids == alone.output_ids


def test_kernels_draft_and_verify_in_an_engine():
    """Two requests, drafts two ahead, in Triton's interpreter: the tokens and drafts of the eager path."""
    micro = packed_model(MICRO, mtp=True)
    count = scaled(8, 4)
    hows = HOWS[:2]
    plain = run(engine(micro, 0), *(ask(TEXT[: 5 + n], count, **how) for n, how in enumerate(hows)))
    results = []
    for decoder in (None, Decoder):
        requests = [ask(TEXT[: 5 + n], count, **how) for n, how in enumerate(hows)]
        core = engine(micro, 2, decoder)
        observed = observe(
            core, dict(zip(requests, (each.output_ids for each in plain))), [True, True, False]
        )
        run(core, *requests)
        results.append(([each.output_ids for each in requests], observed.proposals))
        core.close()
    assert results[0] == results[1] and results[0][0] == [each.output_ids for each in plain]


def test_warm_up_prepares_the_steps_of_drafts(model):
    core = engine(model, 2, PlainDecoder)
    graphs, chain = core.runner.graphs, core.speculator.chain
    calls = []
    warm_up(model, core.runner.state, graphs, 24, lambda done, total: calls.append((done, total)), chain)
    assert calls[0][0] == 0 and calls[-1][0] == calls[-1][1] == len(calls) - 1
    assert sorted(chain._steps) == sorted({rows for rows, _ in graphs._plain}) == [1, 2, 3, 4, 6, 8, 12]
    (request,) = run(core, ask(TEXT[:20], 8))
    assert request.output_ids == run(engine(model, 0), ask(TEXT[:20], 8))[0].output_ids
