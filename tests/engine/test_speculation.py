"""Speculation does not change output tokens: forced drafts and MTP drafts, in any batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.decode.cpu import install_cpu_decode
from birkhoff.engine.engine import EngineCore
from birkhoff.engine.request import Request
from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.engine.speculation import Speculator, _max_drafts
from birkhoff.engine.speculation_controller import (
    PATIENCE,
    RECHECK,
    SETTLE,
    TRIAL,
    TURN,
    SpeculationController,
)
from birkhoff.hooks.plan import Plan
from birkhoff.hooks.tap import NoTap
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.state import State
from tests import models
from tests.models import fused_model, random_model, random_tokens, variant
from tests.sizes import scaled

SMALL = variant(compress_ratios=(0, 4, 128), num_hash_layers=1)
MICRO = replace(models.MICRO, num_nextn_predict_layers=1)
TEXT = random_tokens(SMALL, 700, 1).tolist()
COUNT = 24


@pytest.fixture(scope="module")
def model():
    return fused_model(SMALL, kernels="cpu")


@pytest.fixture(scope="module")
def micro():
    return fused_model(MICRO, kernels="cpu")


def ask(tokens, count=COUNT, plan=None, seed=3, **options) -> Request:
    made = SamplingParams(**{"temperature": 0, "max_tokens": count, "ignore_eos": True, **options})
    return Request(tuple(tokens), made, count, seed=seed, plan=plan)


def engine(model, depth=0, **options) -> EngineCore:
    given = {
        "max_requests": 4,
        "max_context": 1024,
        "num_pages": 24,
        "max_batch_tokens": 300,
        "draft_always": True,
    }
    return EngineCore(model, **{**given, "draft_depth": depth, **options})


def run(core: EngineCore, *requests: Request) -> list[Request]:
    for request in requests:
        core.submit(request)
    while core.step():
        pass
    assert core.scheduler.idle and core.scheduler.pages.num_free == core.scheduler.pages.size
    return list(requests)


class Forced(Speculator):
    """Drafts that are right or wrong according to a pattern; `truth` are the tokens that will be sampled."""

    truth: dict[Request, list[int]]
    pattern: list[bool]
    drafted_count = 0

    def draft(self, work, ran, pending=None):
        for item, made in zip(work, ran):
            request = item.request
            if made is None or request.slot is None or _max_drafts(request) <= 0:
                continue
            known, draft_tokens = len(request.output_ids), []
            for ahead in range(min(self.depth, _max_drafts(request))):
                right = self.pattern[self.drafted_count % len(self.pattern)]
                self.drafted_count += 1
                token = self.truth[request][known + ahead]
                draft_tokens.append(token if right else (token + 1) % SMALL.vocab_size)
            request.draft_tokens = tuple(draft_tokens)
        return 1


def force(core: EngineCore, truth, pattern) -> Forced:
    forced = Forced(core.model, core.runner.state, core.sampler, core.runner.speculator.depth)
    forced.truth, forced.pattern = truth, pattern
    core.speculator = core.runner.speculator = forced
    return forced


class Rows:
    """A capture job that keeps positions, token ids and rows of one site."""

    keys = (("mhc_streams_pre_attn", 1), ("mlp_out", 2))
    after = False

    def __init__(self):
        self.got: dict[tuple[str, int], list[tuple[int, int, torch.Tensor]]] = {}

    def offsets(self, start, token_ids, prompt_len):
        return range(len(token_ids))

    def open(self):
        pass

    def deliver(self, rows):
        kept = self.got.setdefault((rows.hook, rows.layer), [])
        kept += zip(rows.positions, rows.token_ids, rows.tensor)

    def close(self, finish_reason, num_tokens):
        self.closed = (finish_reason, num_tokens)


@settings(max_examples=scaled(120, 8))
@given(
    st.integers(1, 3),
    st.lists(st.booleans(), min_size=1, max_size=7),
    st.sampled_from([1, 7, 118, 126, 127, 250]),
    st.sampled_from([{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.7}]),
)
def test_every_pattern_of_accepted_and_rejected_drafts_gives_the_same_tokens_and_rows(
    model, depth, pattern, length, how
):
    """Across block and page boundaries: state computed after a rejected draft token has no effect."""
    plain, forced = (ask(TEXT[:length], plan=Plan(jobs=(Rows(),)), **how) for _ in range(2))
    run(engine(model), plain)
    core = engine(model, depth)
    force(core, {forced: plain.output_ids}, pattern)
    run(core, forced)
    assert forced.output_ids == plain.output_ids and forced.drafted
    if all(pattern):
        assert forced.accepted == forced.drafted
    elif not any(pattern):
        assert forced.accepted == 0
    expected, actual = plain.plan.jobs[0].got, forced.plan.jobs[0].got
    for site, rows in expected.items():
        assert [row[:2] for row in actual[site]] == [row[:2] for row in rows], "every row once, in order"
        close = torch.stack([row for *_, row in actual[site]]), torch.stack([row for *_, row in rows])
        torch.testing.assert_close(*close, atol=2e-4, rtol=1e-3)
    assert forced.plan.jobs[0].closed == plain.plan.jobs[0].closed
    assert forced.plan.delivered_until == plain.plan.delivered_until


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_mtp_drafts_change_no_token_in_mixed_batches(depth, kernels):
    """Greedy and sampled requests, and one that is still in prefill, share the steps."""
    model = random_model(SMALL, kernels=kernels)
    model = install_cpu_decode(model) if kernels == "cpu" else model
    hows = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5, "logit_bias": {3: 2.0}},
        {"stop_token_ids": [9]},
    ]
    pairs = [[ask(TEXT[: 5 + 150 * n], **how) for n, how in enumerate(hows)] for _ in range(2)]
    off, on = run(engine(model), *pairs[0]), run(engine(model, depth), *pairs[1])
    for plain, guessed in zip(off, on):
        assert guessed.output_ids == plain.output_ids and guessed.finish_reason == plain.finish_reason
    assert on[1].accepted > 0 and on[0].drafted > 0


def test_a_request_that_stops_inside_accepted_drafts_drops_later_tokens(model):
    (plain,) = run(engine(model), ask(TEXT[:40], plan=Plan(jobs=(Rows(),))))
    end = plain.output_ids[5]
    at = plain.output_ids.index(end)
    requests = [ask(TEXT[:40], plan=Plan(jobs=(Rows(),)), stop_token_ids=[end]) for _ in range(2)]
    run(engine(model), requests[0])
    core = engine(model, 3)
    force(core, {requests[1]: plain.output_ids}, [True])
    run(core, requests[1])
    for request in requests:
        assert request.output_ids == plain.output_ids[: at + 1] and request.finish_reason == "stop"
        positions = [position for position, *_ in request.plan.jobs[0].got["mlp_out", 2]]
        assert positions == list(range(40 + at))


class Interrupting:
    """A model whose step `step` is interrupted, before or after the layers."""

    def __init__(self, model, step: int, where: str):
        self.model, self.left, self.where = model, step, where

    def __getattr__(self, name):
        return getattr(self.model, name)

    def run(self, *arguments):
        self.left -= 1
        if self.left == 0 and self.where == "layers":
            raise KeyboardInterrupt
        return self.model.run(*arguments)

    def logits(self, hidden):
        if self.left == 0 and self.where == "head":
            self.left = -1
            raise KeyboardInterrupt
        return self.model.logits(hidden)


@pytest.mark.parametrize("where", ["layers", "head"])
@pytest.mark.parametrize(("depth", "number"), [(0, 1), (0, 5), (1, 2), (2, 4)])
def test_an_interrupted_step_loses_no_captured_row(model, depth, number, where):
    """Every row is delivered once, also rows that were computed twice."""
    whole, kept = Rows(), Rows()
    run(engine(model), ask(TEXT[:50], plan=Plan(jobs=(whole,))))
    core = engine(model, depth)
    core.runner.model = Interrupting(model, number, where)
    request = ask(TEXT[:50], plan=Plan(jobs=(kept,)))
    core.submit(request)
    with pytest.raises(KeyboardInterrupt):
        while core.step():
            pass
    assert not request.done
    run(core)
    for key, rows in whole.got.items():
        assert [row[:2] for row in kept.got[key]] == [row[:2] for row in rows]
        actual, true = (torch.stack([tensor for _, _, tensor in some]) for some in (kept.got[key], rows))
        assert (actual - true).abs().max() <= 1e-4


def test_drafts_do_not_take_pages_from_other_requests(model):
    """Three requests on four pages: no draft crosses a page boundary while no page is free, and all requests finish."""
    core = engine(model, 3, num_pages=4, max_requests=3)
    requests = [ask(TEXT[n : n + 120], 14, temperature=1.0, seed=n) for n in range(3)]
    run(core, *requests)
    for n, request in enumerate(requests):
        (alone,) = run(engine(model), ask(TEXT[n : n + 120], 14, temperature=1.0, seed=n))
        assert request.output_ids == alone.output_ids


def test_pages_completed_by_drafts_are_reused(model):
    """A page that was completed by drafts, some of them rejected, equals the page computed without drafts."""
    first, forced = ask(TEXT[:100], 60), ask(TEXT[:100], 60)
    run(engine(model), first)
    core = engine(model, 3, prefix_bytes=2**22)
    force(core, {forced: first.output_ids}, [True, True, False])
    run(core, forced)
    turn = [*TEXT[:100], *first.output_ids, 7]
    (warm,), (cold,) = run(core, ask(turn, 1, logprobs=3)), run(engine(model), ask(turn, 1, logprobs=3))
    assert (
        warm.cached_tokens == 159 and len(core.scheduler.prefix) >= 2 and warm.output_ids == cold.output_ids
    )
    assert abs(warm.logprobs[0].logprob - cold.logprobs[0].logprob) < 1e-4


def test_mtp_prefill_leaves_the_same_keys_as_drafting(model):
    tokens = TEXT[:50]
    with torch.inference_mode():
        states = [State.contiguous(SMALL, 1, 128, lookback=1, mtp=True) for _ in range(2)]
        streams = model.run(Batch.of([SequenceChunk(0, 0, tokens[:-1])]), states[0], NoTap())[1]
        batch = Batch.of([SequenceChunk(0, 0, tokens[1:])])
        model.draft(streams, batch, states[0])
        model.mtp_prefill(streams, batch, states[1])
    actual, expected = (state.mtp.keys.rows for state in states)
    torch.testing.assert_close(actual, expected)
    assert actual.abs().max() > 0.1


def test_sampled_tokens_follow_the_models_distribution(micro):
    """The second and third token of many answers against the model's own probabilities, by chi-square."""
    start, many = (5, 6, 7), scaled(6000, 500)
    core = engine(micro, 2, max_requests=8, max_batch_tokens=64)
    requests = run(core, *(ask(start, 3, temperature=1.0, seed=seed) for seed in range(many)))
    assert sum(r.accepted for r in requests) > many // 20 and sum(r.accepted for r in requests) < sum(
        r.drafted for r in requests
    )
    after = [torch.tensor([*start, token]) for token in range(40)]
    with torch.no_grad():
        first = micro(torch.tensor(start))[-1].double().softmax(-1)
        second = torch.stack([micro(ids)[-1] for ids in after]).double().softmax(-1)
    expected = (first.unsqueeze(-1) * second).sum(0) * many
    seen = torch.bincount(torch.tensor([r.output_ids[1] for r in requests]), minlength=40).double()
    small = expected < 8
    if small.any():  # rare tokens are counted together
        expected, seen = (
            torch.cat((counts[~small], counts[small].sum().view(1))) for counts in (expected, seen)
        )
    statistic, freedom = float(((seen - expected) ** 2 / expected).sum()), len(expected) - 1
    assert statistic < freedom + 4.5 * (2 * freedom) ** 0.5, (
        statistic,
        freedom,
    )  # fails by chance about once in 100,000 runs
    (alone,) = run(engine(micro), ask(start, 3, temperature=1.0, seed=17))
    assert alone.output_ids == requests[17].output_ids, "a seed gives the same tokens alone"


# When drafting is enabled


def step(
    controller: SpeculationController, seconds: dict[bool, float], tokens: dict[bool, int], requests: int = 1
) -> bool:
    drafting = controller.should_draft(requests)
    controller.record(requests, drafting, drafting, tokens[drafting] * requests, seconds[drafting])
    return drafting


TRIED = 2 * TRIAL * (TURN + SETTLE) // TURN  # steps of a whole trial


@pytest.mark.parametrize(
    ("slower", "more", "pays"), [(1.3, 2, True), (1.9, 1, False), (2.1, 2, False), (1.0, 1, False)]
)
def test_drafting_continues_only_when_it_is_faster(slower, more, pays):
    controller = SpeculationController()
    drafted = [step(controller, {True: slower, False: 1.0}, {True: more, False: 1}) for _ in range(TRIED)]
    turns = [TURN + SETTLE] * (len(drafted) // (TURN + SETTLE))
    assert drafted == [
        draft_tokens for turn, length in enumerate(turns) for draft_tokens in [turn % 2 == 0] * length
    ]
    drafted = [
        step(controller, {True: slower, False: 1.0}, {True: more, False: 1}) for _ in range(3 * RECHECK)
    ]
    assert set(drafted) == {pays} and controller.report()["1"]["mode"] == ("guessing" if pays else "plain")
    assert controller.runs_prefill(1, True) is pays


def test_disabled_drafting_is_tried_again_later_with_a_new_prompt():
    controller, slow = SpeculationController(), {True: 3.0, False: 1.0}
    for _ in range(TRIED):
        step(controller, slow, {True: 2, False: 1})
    assert not controller.runs_prefill(1, True)
    for _ in range(PATIENCE):
        assert not step(controller, slow, {True: 2, False: 1})
    assert (
        not controller.runs_prefill(1, False) and controller.runs_prefill(1, True) and controller.in_trial(1)
    )
    for _ in range(TRIED):
        step(controller, {True: 1.0, False: 1.0}, {True: 2, False: 1})
    assert controller.should_draft(1) and not controller.in_trial(1), "drafting is faster now"


@pytest.mark.parametrize(("requests", "turns"), [(1, 8), (2, 4), (4, 2), (8, 2), (16, 2)])
@pytest.mark.parametrize(("slower", "pays"), [(2.6, False), (1.1, True)])
def test_a_large_difference_with_many_requests_ends_the_trial_early(requests, turns, slower, pays):
    """A large difference ends the trial after as many rows as a trial of one request; a small one does not."""
    controller, few = SpeculationController(), {True: 2, False: 1}
    steps = 0
    while controller.in_trial(requests):
        step(controller, {True: slower, False: 1.0}, few, requests)
        steps += 1
    assert controller.should_draft(requests) is pays and steps == turns * (TURN + SETTLE)
    close = SpeculationController()
    for _ in range(TRIED - 1):
        step(close, {True: 2.1, False: 1.0}, few, requests)
    assert close.in_trial(requests)


def test_a_slower_machine_does_not_disable_drafting():
    """Old measurements are not used: a new trial measures whether drafting is still faster."""
    controller = SpeculationController()
    for _ in range(TRIED + RECHECK):
        step(controller, {True: 1.3, False: 1.0}, {True: 2, False: 1})
    assert controller.should_draft(1) and not controller.in_trial(1)
    modes = []
    for _ in range(10 * RECHECK):
        step(controller, {True: 2.6, False: 2.0}, {True: 2, False: 1})
        modes.append(controller.report()["1"]["mode"])
    assert "plain" not in modes and modes[-1] == "guessing" and modes.count("trying") == TRIED
    for _ in range(2 * RECHECK + TRIED):
        step(controller, {True: 4.4, False: 2.0}, {True: 2, False: 1})
    assert controller.report()["1"]["mode"] == "plain"


def test_each_batch_size_decides_separately():
    controller = SpeculationController()
    for _ in range(TRIED):
        step(controller, {True: 1.2, False: 1.0}, {True: 2, False: 1}, 1)
        step(controller, {True: 2.4, False: 1.0}, {True: 2, False: 1}, 7)
    assert (
        controller.should_draft(1)
        and not controller.should_draft(8)
        and not controller.should_draft(5)
        and controller.should_draft(2)
    )


def test_mtp_prefill_is_skipped_when_drafting_is_off_for_the_batch_size():
    controller, slow, few = SpeculationController(), {True: 2.4, False: 1.0}, {True: 2, False: 1}
    step(controller, slow, few, 1)  # the trial for batches of one remains open
    for _ in range(TRIED):
        step(controller, slow, few, 8)
    assert (
        controller.in_trial(1) and not controller.runs_prefill(8, True) and controller.runs_prefill(1, True)
    )


def test_repeated_failed_trials_are_spaced_further_apart():
    controller, slow, few = SpeculationController(), {True: 2.4, False: 1.0}, {True: 2, False: 1}
    waited = []
    for _ in range(8):
        while controller.in_trial(8):
            step(controller, slow, few, 8)
        waited.append(0)
        while not controller.runs_prefill(8, True):
            waited[-1] += 1
            step(controller, slow, few, 8)
    assert waited == [PATIENCE * times for times in (1, 2, 4, 8, 16, 16, 16, 16)]


def test_a_request_without_mtp_state_does_not_draft(model):
    """MTP did not process the request while drafting was off, so there are no drafts for it later."""
    core = engine(model, depth=1, draft_always=False)
    for _ in range(TRIED):
        step(core.controller, {True: 3.0, False: 1.0}, {True: 2, False: 1})
    first = ask(TEXT[:40], 60)
    core.submit(first)
    while len(first.output_ids) < 5:
        core.step()
    core.controller._buckets.clear()  # starts a new trial
    (later,) = run(core, ask(TEXT[:40], 60))
    while not first.done:
        core.step()
    assert first.drafted == 0 and later.drafted > 0
    assert first.output_ids == later.output_ids


def test_a_delayed_step_does_not_decide_a_trial():
    controller = SpeculationController()
    for index in range(3 * TRIED):
        delay = 50.0 if index % 10 == 0 else 0.0
        step(controller, {True: 1.2 + delay, False: 1.0}, {True: 2, False: 1})
    assert controller.should_draft(1)


def test_plain_steps_of_a_trial_leave_the_mtp_state_complete(model):
    """Drafts of a trial equal those of a request that always drafts, and all outputs are equal."""
    requests = {}
    for name, options in (
        ("plain", {}),
        ("trial", {"depth": 1, "draft_always": False}),
        ("always", {"depth": 1}),
    ):
        core = engine(model, **options)
        requests[name] = core, *run(core, ask(TEXT[:40], TRIED // 2))
    (trial, tried), (always, drafted) = requests["trial"], requests["always"]
    assert trial.controller.in_trial(1) and 0 < tried.drafted < drafted.drafted
    assert len({tuple(request.output_ids) for _, request in requests.values()}) == 1
    last = 40 + TRIED // 2 - 3  # positions that both have certainly processed
    actual, true = (core.runner.state.mtp.keys.span(0, last - 6, last) for core in (trial, always))
    assert true.abs().max() > 0.1 and (actual - true).abs().max() <= 2e-5 * true.abs().max()
