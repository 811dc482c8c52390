"""Asynchronous decode steps give the tokens of synchronous ones, and discard what was computed too far."""

from __future__ import annotations

import pytest
import torch

from birkhoff.engine.engine import EngineCore
from birkhoff.engine.request import Request
from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.hooks.edit import SiteEdit
from birkhoff.hooks.plan import Plan
from tests.hooks.test_vector_table import vector
from tests.interpreter import DEVICE, packed_model
from tests.model.test_prefill import with_kernels
from tests.models import variant
from tests.sizes import scaled

SINKHORN = scaled(20, 2)  # most of the time in Triton's interpreter; steps are compared with steps
SMALL = variant(
    compress_ratios=(4,),
    num_hash_layers=0,
    num_nextn_predict_layers=0,
    index_topk=4,
    hc_sinkhorn_iters=SINKHORN,
)


@pytest.fixture(scope="module")
def model():
    return with_kernels(packed_model(SMALL), "triton")


def make_core(model, ahead: bool = True, **options) -> EngineCore:
    core = EngineCore(
        model,
        max_requests=3,
        max_context=256,
        num_pages=8,
        device=DEVICE,
        **{"prefix_bytes": 1 << 20} | options,
    )
    if not ahead:
        core._run_ahead = None
    return core


def request(first: int, tokens: int, eos: frozenset[int] = frozenset(), **options) -> Request:
    params = SamplingParams(max_tokens=tokens, **{"temperature": 0.0} | options)
    return Request((first, 7, first + 1), params, tokens, seed=first, eos_ids=eos)


def run(core: EngineCore, requests: list[Request]) -> list[list[int]]:
    core.submit(*requests)
    while core.step():
        pass
    assert core._launched is None
    assert core.scheduler.slots.num_free == 3 and not core.scheduler.running
    return [request.output_ids for request in requests]


def traffic(eos: frozenset[int] = frozenset()) -> list[Request]:
    """More requests than slots, of different lengths and sampling parameters; one needs its tokens on the host."""
    return [
        request(5, scaled(9, 5), eos),
        request(11, 3, eos, temperature=1.3, min_tokens=2, logprobs=2),
        request(20, scaled(6, 4), eos, temperature=0.8, top_p=0.9),
        request(31, scaled(5, 2), eos, repetition_penalty=1.2),
        request(40, scaled(4, 2), eos),
    ]


def test_tokens_equal_those_of_synchronous_steps(model):
    core = make_core(model)
    expected = run(make_core(model, ahead=False), plain := traffic())
    assert run(core, ahead := traffic()) == expected
    assert core._run_ahead is not None and core._run_ahead.steps >= 2
    assert [r.finish_reason for r in ahead] == ["length"] * 5
    assert [[t.logprob for t in r.logprobs] for r in ahead] == [
        [t.logprob for t in r.logprobs] for r in plain
    ]


def test_a_request_that_ends_early_discards_the_token_computed_too_far(model):
    free = run(make_core(model, ahead=False), traffic())
    eos = frozenset({free[0][2], free[2][1]})
    expected = run(make_core(model, ahead=False), traffic(eos))
    assert [len(ids) for ids in expected] != [len(ids) for ids in free]
    core = make_core(model)
    assert run(core, requests := traffic(eos)) == expected
    assert "stop" in [r.finish_reason for r in requests]
    assert all(r.num_computed_tokens == r.num_tokens - 1 for r in requests)


def test_the_prefix_kept_from_an_ended_request_is_not_affected_by_the_extra_token(model):
    core = make_core(model)
    prompt = tuple(range(40, 65))
    params = SamplingParams(max_tokens=8, temperature=0.0)
    free = run(make_core(model, ahead=False), [Request(prompt, params, 8, seed=1)])[0]
    first = Request(prompt, params, 8, seed=1, eos_ids=frozenset({free[4]}))
    assert run(core, [first])[0] == free[: free.index(free[4]) + 1]
    follow = (*prompt, *first.output_ids[:-1], 9)
    params = SamplingParams(max_tokens=5, temperature=0.0)
    outputs = [Request(follow, params, 5, seed=1) for _ in range(2)]
    fresh = make_core(model, ahead=False)
    assert run(core, outputs[:1]) == run(fresh, outputs[1:])
    assert outputs[0].cached_tokens and not outputs[1].cached_tokens


def test_cancelling_during_a_launched_step_leaves_nothing_behind(model):
    core = make_core(model)
    expected = run(make_core(model, ahead=False), [request(11, 6)])
    requests = [request(5, 30), request(11, 6)]
    core.submit(*requests)
    while len(requests[0].output_ids) < 2:
        core.step()
    assert core._launched is not None
    core.cancel(requests[0])
    while core.step():
        pass
    assert requests[0].finish_reason == "cancelled" and [requests[1].output_ids] == expected
    assert core.scheduler.slots.num_free == 3


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_ends_the_requests_of_a_launched_step_and_an_interrupt_repeats_them(
    model, kind, monkeypatch
):
    core = make_core(model)
    expected = run(make_core(model, ahead=False), [request(5, 6)])
    one = request(5, 6)
    core.submit(one)
    while core._launched is None:
        core.step()
    replay = core.runner.replay_ahead

    def fail(*arguments) -> torch.Tensor:
        monkeypatch.setattr(core.runner, "replay_ahead", replay)
        raise kind("stopped")

    monkeypatch.setattr(core.runner, "replay_ahead", fail)
    if kind is ValueError:
        assert core.step() and one.finish_reason == "error"
    else:
        with pytest.raises(KeyboardInterrupt):
            core.step()
        while core.step():
            pass
        assert [one.output_ids] == expected
    assert core.scheduler.slots.num_free == 3 and core._launched is None


def test_plain_steps_of_an_engine_that_could_draft_run_ahead():
    config = variant(compress_ratios=(4,), num_hash_layers=0, index_topk=4, hc_sinkhorn_iters=SINKHORN)
    drafting = with_kernels(packed_model(config, mtp=True), "triton")
    expected = run(make_core(drafting, ahead=False), [request(5, 6), request(11, 5)])
    core = make_core(drafting, draft_depth=1)
    controller = core.controller
    assert controller is not None and core._run_ahead is not None
    assert not core._run_ahead._plain(2), "a batch size that is being measured does not run ahead"
    for count in (1, 2):
        controller._bucket(count).mode = "plain"
    assert run(core, [request(5, 6), request(11, 5)]) == expected
    assert core._run_ahead.steps >= 3 and core.drafted == 0
    assert controller._bucket(2)._steps_in_mode >= 3, "plain steps count towards the next trial"


class Rows:
    """A job that keeps what it is given: (position, token id) and the row of each site."""

    after = False

    def __init__(self, tokens: frozenset[int] | None = None):
        self.keys = [("mlp_out", 0), ("mhc_streams_final", 0)]
        self.tokens = tokens  # the ids that are captured; None for all
        self.labels: list[tuple[int, int]] = []
        self.tensors: list[torch.Tensor] = []

    def offsets(self, start, token_ids, prompt_len):
        if self.tokens is None:
            return range(len(token_ids))
        return [offset for offset, token in enumerate(token_ids) if int(token) in self.tokens]

    def open(self):
        pass

    def deliver(self, rows):
        if rows.hook == "mlp_out":
            self.labels += zip(rows.positions, rows.token_ids)
        self.tensors.append(rows.tensor)

    def close(self, finish_reason, num_tokens):
        self.closed = (finish_reason, num_tokens)


class Added:
    """An addition to every token, or to the generated ones that are `even`."""

    def __init__(self, seed: int, even: bool = False):
        self.sites = {("mlp_out", 0): SiteEdit("add", vector(SMALL.hidden_size, seed, 0.3))}
        self.generated = None if even else True

    def offsets(self, start, token_ids, prompt_len):
        if self.generated:
            return range(len(token_ids))
        return [offset for offset in range(len(token_ids)) if (start + offset) % 2 == 0]

    def digest_parts(self, phase):
        return ()


def watched(first: int, tokens: int, plan: Plan | None, eos: frozenset[int] = frozenset()) -> Request:
    made = request(first, tokens, eos)
    made.plan = plan
    return made


def watched_traffic(eos: frozenset[int] = frozenset()) -> list[Request]:
    """Captured, steered, both, and plain requests side by side, more than there are slots."""
    return [
        watched(5, scaled(8, 5), Plan(jobs=(Rows(),)), eos),
        watched(14, scaled(7, 5), Plan(edits=(Added(3),)), eos),
        watched(23, scaled(8, 5), Plan(jobs=(Rows(),), edits=(Added(4),)), eos),
        watched(32, 3, None, eos),
    ]


def results(requests: list[Request]):
    """What a caller sees of captures and edits."""
    seen = []
    for each in requests:
        jobs = [] if each.plan is None else each.plan.jobs
        seen.append(
            (
                each.finish_reason,
                sorted(each.plan.steered) if each.plan is not None else None,
                [(job.labels, job.closed) for job in jobs],
            )
        )
    return seen


def test_captured_and_steered_requests_run_ahead_with_the_same_rows(model):
    free = run(make_core(model, ahead=False), watched_traffic())
    eos = frozenset({free[0][2], free[1][3]})
    plain, ahead = watched_traffic(eos), watched_traffic(eos)
    expected = run(make_core(model, ahead=False), plain)
    core = make_core(model)
    assert run(core, ahead) == expected
    assert core._run_ahead is not None and core._run_ahead.steps >= 2
    assert results(ahead) == results(plain)
    for ours, theirs in zip(ahead, plain):
        for job, other in zip(ours.plan.jobs if ours.plan else (), theirs.plan.jobs if theirs.plan else ()):
            assert [position for position, _ in job.labels] == list(range(ours.num_tokens - 1))
            assert torch.equal(
                torch.cat([rows.flatten() for rows in job.tensors]),
                torch.cat([rows.flatten() for rows in other.tensors]),
            )
    assert "stop" in [each.finish_reason for each in ahead]


@pytest.mark.parametrize("what", ["captured by id", "edited at even positions"])
def test_what_depends_on_the_token_or_its_position_waits_for_it(model, what):
    def make() -> list[Request]:
        by_id = what == "captured by id"
        plan = Plan(jobs=(Rows(frozenset(range(400))),)) if by_id else Plan(edits=(Added(5, even=True),))
        return [watched(5, 4, plan)]

    plain, ahead = make(), make()
    expected = run(make_core(model, ahead=False), plain)
    core = make_core(model)
    assert run(core, ahead) == expected and results(ahead) == results(plain)
    assert core._run_ahead is not None and core._run_ahead.steps == 0


def test_an_interrupt_delivers_no_row_of_a_token_that_was_never_read(model, monkeypatch):
    plain = [watched(5, 5, Plan(jobs=(Rows(),)))]
    expected = run(make_core(model, ahead=False), plain)
    core = make_core(model)
    one = watched(5, 5, Plan(jobs=(Rows(),)))
    core.submit(one)
    while core._run_ahead.steps < 2:
        core.step()
    commit = core._commit_launched

    def stop(step) -> None:
        monkeypatch.setattr(core, "_commit_launched", commit)
        raise KeyboardInterrupt

    monkeypatch.setattr(core, "_commit_launched", stop)
    with pytest.raises(KeyboardInterrupt):
        core.step()
    while core.step():
        pass
    assert [one.output_ids] == expected and results([one]) == results(plain)


def prompts_alone() -> list[Request]:
    """Prompts read for their rows or their next token alone, among which one request goes on."""
    return [
        watched(5, 1, Plan(jobs=(Rows(),))),
        request(11, 1, logprobs=2),
        watched(23, 1, Plan(jobs=(Rows(),))),
        request(31, 1, repetition_penalty=1.2),
        request(40, 2),
    ]


def test_the_token_of_a_prompt_is_read_after_the_next_prompt_was_launched(model):
    plain, ahead = prompts_alone(), prompts_alone()
    expected = run(make_core(model, ahead=False, max_batch_tokens=3), plain)
    core = make_core(model, max_batch_tokens=3)
    core.submit(*ahead)
    core.step()
    assert len(core._ending) == 1 and not ahead[0].done
    core.step()
    assert ahead[0].done and not ahead[1].done, "the second prompt runs while the first one is read"
    while core.step():
        assert len(core._ending) <= 1
    assert not core._ending and core.scheduler.slots.num_free == 3
    assert [each.output_ids for each in ahead] == expected and results(ahead) == results(plain)
    for ours, theirs in zip((ahead[0], ahead[2]), (plain[0], plain[2])):
        for rows, others in zip(ours.plan.jobs[0].tensors, theirs.plan.jobs[0].tensors, strict=True):
            assert torch.equal(rows, others)


@pytest.mark.parametrize("kind", [None, ValueError, KeyboardInterrupt])
def test_prompts_end_as_they_should_when_the_next_step_is_cancelled_or_fails(model, kind, monkeypatch):
    expected = run(make_core(model, ahead=False), [request(5, 1), request(11, 1)])
    core = make_core(model, max_batch_tokens=3)
    first, second, third = request(5, 1), request(11, 1), request(20, 1)
    core.submit(first, second, third)
    core.step()
    compute = core.runner._compute

    def fail(*arguments):
        monkeypatch.setattr(core.runner, "_compute", compute)
        raise kind("stopped")

    if kind is None:
        core.cancel(first)
    else:
        monkeypatch.setattr(core.runner, "_compute", fail)
    if kind is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            core.step()
    while core.step():
        pass
    assert first.finish_reason == ("cancelled" if kind is None else "length")
    assert second.finish_reason == ("error" if kind is ValueError else "length")
    done = [each for each in (first, second) if each.finish_reason == "length"]
    assert [each.output_ids for each in done] == [
        ids for ids, each in zip(expected, (first, second)) if each in done
    ]
    assert third.finish_reason == "length" and core.scheduler.slots.num_free == 3 and not core._ending


def test_rows_read_on_the_device_come_from_no_recorded_step(model, monkeypatch):
    """Recorded steps copy rows to the host; the last token of a prompt may be a step of its own."""
    jobs = [Rows(), Rows()]
    jobs[1].on_device = True
    core = make_core(model, max_batch_tokens=2)
    replayed, replay = [], core.runner._replay
    monkeypatch.setattr(core.runner, "_replay", lambda *given: replayed.append(given) or replay(*given))
    for count, job in enumerate(jobs):
        run(core, [watched(5 + 9 * count, 1, Plan(jobs=(job,)))])
        assert [position for position, _ in job.labels] == [0, 1, 2]
        assert len(replayed) == 1, "only the rows of the first job are captured by a recorded step"
