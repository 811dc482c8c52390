"""The engine core with a very small model: random programs, refusals, failing and interrupted steps."""

from __future__ import annotations

import gc
import re
import threading
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from birkhoff.decode.cpu import install_cpu_decode
from birkhoff.engine.engine import EngineCore
from birkhoff.engine.request import Request
from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.errors import CapacityError, EngineClosed, LogitsError, PromptError
from birkhoff.kernels.select import select
from birkhoff.model.cache_size import page_bytes, pages_for
from birkhoff.model.linear import Numerics
from birkhoff.model.transformer import Transformer
from tests.models import MICRO, fill_random, fused_model, random_tokens
from tests.sizes import scaled

POISON = 39  # a token that makes the failing models below raise
LENGTHS = (1, 2, 9, 60, 127, 128, 129, 200)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(t % POISON for t in random_tokens(MICRO, length, seed).tolist())


def ask(tokens: tuple[int, ...], count: int = 5, **options) -> Request:
    made = SamplingParams(**{"temperature": 0, "max_tokens": count, "logprobs": 0, **options})
    return Request(tokens, made, count, seed=3)


def engine(model, **options) -> EngineCore:
    return EngineCore(model, **{"max_requests": 4, "max_context": 1024, "num_pages": 24, **options})


@pytest.fixture(scope="module")
def model():
    return fused_model(MICRO, kernels="cpu")


def run(core: EngineCore, *requests: Request) -> list[Request]:
    for request in requests:
        core.submit(request)
    while core.step():
        pass
    check_empty(core)
    return list(requests)


def check_empty(core: EngineCore) -> None:
    scheduler = core.scheduler
    assert scheduler.idle and scheduler.slots.num_free == scheduler.slots.size
    assert scheduler.pages.num_free == scheduler.pages.size


class Program(RuleBasedStateMachine):
    """Submit, step and cancel in any order on a real engine with little memory. Every request that is not cancelled
    completes; in batch-invariant mode its log-probabilities are bit-identical to those of a run alone."""

    invariant_mode = False
    requests = Bundle("requests")
    model = fused_model(MICRO, kernels="cpu")
    solo: ClassVar[
        dict[tuple[int, int, int], list]
    ] = {}  # log-probabilities of each request run alone, cached between programs
    budget = 64

    @initialize(slots=st.integers(1, 4), pages=st.integers(2, 5))
    def load(self, slots, pages):
        self.core = self.make(slots, pages)
        self.submitted: list[tuple[tuple[int, int, int], Request]] = []

    def make(self, slots, pages):
        options = {"max_batch_tokens": self.budget, "batch_invariant": self.invariant_mode}
        return engine(self.model, max_requests=slots, num_pages=pages, **options)

    @rule(
        target=requests,
        length=st.sampled_from(LENGTHS),
        count=st.sampled_from([1, 3, 20]),
        seed=st.integers(0, 1),
    )
    def submit(self, length, count, seed):
        request = ask(prompt(length, seed), count)
        if pages_for(length + count - 1) > self.core.scheduler.pages.size:
            with pytest.raises(CapacityError):
                self.core.submit(request)
        else:
            self.core.submit(request)
            self.submitted.append(((length, count, seed), request))
        return request

    @rule(steps=st.integers(1, 12))
    def step(self, steps):
        for _ in range(steps):
            assert self.core.step() or self.core.scheduler.idle

    @rule(request=requests)
    def cancel(self, request):
        free, had = self.core.scheduler.slots.num_free, request.slot is not None
        self.core.cancel(request)
        assert request.done and request.slot is None and self.core.scheduler.slots.num_free == free + had

    @invariant()
    def memory_adds_up(self):
        if hasattr(self, "core"):
            s = self.core.scheduler
            pages = [page for r in s.running for page in r.pages]
            assert len(set(pages)) == len(pages) == s.pages.size - s.pages.num_free
            assert len(s.running) == s.slots.size - s.slots.num_free

    def teardown(self):
        if not hasattr(self, "core"):
            return
        steps = 0
        while self.core.step():
            steps += 1
            assert steps < 5000, "a request never ends"
        check_empty(self.core)
        for kind, request in self.submitted:
            assert request.finish_reason in ("length", "cancelled") and request.error is None
            if request.finish_reason == "length":
                assert len(request.output_ids) == kind[1]
                if self.invariant_mode:
                    assert request.logprobs == self.expected_alone(kind), kind

    def expected_alone(self, kind):
        if kind not in self.solo:
            length, count, seed = kind
            self.solo[kind] = run(self.make(1, 5), ask(prompt(length, seed), count))[0].logprobs
        return self.solo[kind]


class InvariantProgram(Program):
    invariant_mode = True


TestProgram = Program.TestCase
TestInvariantProgram = InvariantProgram.TestCase
TestProgram.settings = TestInvariantProgram.settings = settings(
    max_examples=scaled(150, 15), stateful_step_count=25, deadline=None
)


def test_a_request_that_can_never_run_is_refused_with_the_sizes(model):
    core = engine(model, num_pages=2, max_context=400)
    with pytest.raises(
        PromptError, match=r"390 tokens and max_tokens is 11: together 401, the context holds 400\. Shor"
    ):
        core.submit(ask(prompt(390), 11))
    with pytest.raises(
        CapacityError,
        match=r"needs \d+\.\d+ KiB of cache \(3 pages\), \d+\.\d+ KiB can ever be free \(2 pages\)",
    ):
        core.submit(ask(prompt(250), 8))
    check_empty(core)
    assert (
        run(core, ask(prompt(250), 7))[0].finish_reason == "length"
    )  # 256 tokens in the cache: two pages exactly


def test_the_refusal_states_the_bytes_of_the_cache(model):
    core, each = engine(model, num_pages=3), page_bytes(MICRO, 4)
    needed, free = 4 * each / 1024, 3 * each / 1024
    message = f"needs {needed:.2f} KiB of cache (4 pages), {free:.2f} KiB can ever be free (3 pages)"
    with pytest.raises(CapacityError, match=re.escape(message)):
        core.submit(ask(prompt(400), 100))


def test_a_request_that_does_not_fit_now_is_queued(model):
    """Slots and pages that are only in use temporarily do not cause a refusal."""
    core = engine(model, num_pages=2, max_requests=1)
    requests = run(core, *(ask(prompt(200, seed), 4) for seed in range(4)))
    assert [r.finish_reason for r in requests] == ["length"] * 4
    ended = [r.timings.finished for r in requests]
    assert ended == sorted(ended) and requests[3].timings.admitted >= requests[2].timings.finished


class Failing(Transformer):
    """Raises after the layers when a batch contains `POISON`: the caches already contain the step by then."""

    def run(self, batch, state, tap):
        out = super().run(batch, state, tap)
        if (batch.token_ids == POISON).any():
            raise RuntimeError("the model broke")
        return out


@pytest.fixture(params=[False, True], ids=["shared", "invariant"])
def failing_engine(request):
    made = Failing(MICRO, Numerics(kernels=select("cpu")))
    fill_random(made, 0)
    return engine(
        install_cpu_decode(made.eval()), max_requests=2, max_batch_tokens=64, batch_invariant=request.param
    )


def test_a_step_that_raises_ends_only_its_own_requests(failing_engine):
    expected = run(failing_engine, ask(prompt(70)))[0].output_ids
    failing, concurrent, queued = ask((*prompt(70), POISON)), ask(prompt(70)), ask(prompt(70))
    run(failing_engine, failing, concurrent, queued)
    assert (
        failing.finish_reason == "error"
        and str(failing.error) == "the model broke"
        and not failing.output_ids
    )
    last = failing.events[-1]
    assert last.finish_reason == "error" and last.error is failing.error and last.token_id is None
    assert (
        queued.finish_reason == "length" and queued.output_ids == expected
    )  # it was queued and is not affected
    assert concurrent.finish_reason in ("error", "length")  # it may have been in the failing step
    assert run(failing_engine, ask(prompt(70)))[0].output_ids == expected


@pytest.mark.parametrize("failing", [0, 3], ids=["first half", "second half"])
def test_a_split_step_fails_as_a_whole(failing):
    """With two threads a decode step is split; if either half raises, both have ended before the engine continues."""
    made = Failing(MICRO, Numerics(kernels=select("cpu")))
    fill_random(made, 0)
    core, threads = engine(install_cpu_decode(made.eval())), torch.get_num_threads()
    expected = run(core, ask(prompt(9), 8))[0].output_ids
    torch.set_num_threads(2)
    try:
        poisoned = {"logit_bias": {POISON: 100.0}}
        requests = [ask(prompt(9, i), 8, **(poisoned if i == failing else {})) for i in range(4)]
        run(core, *requests)
        assert [r.finish_reason for r in requests] == ["error"] * 4
        assert [r.output_ids for r in run(core, *(ask(prompt(9), 8) for _ in range(4)))] == [expected] * 4
        core.close()
    finally:
        torch.set_num_threads(threads)


def test_nan_logits_fail_only_their_request():
    """One request's logits are NaN; the outputs of the other requests in the same steps do not change."""
    for kernels in ("cpu", "reference"):
        made = fused_model(MICRO, kernels=kernels)
        with torch.no_grad():
            made.embed[POISON] = torch.nan
        expected = [
            r.logprobs for r in run(engine(made), ask(prompt(70), 8), ask(prompt(3, 1), 8), ask(prompt(5), 8))
        ]
        core = engine(made)
        failing, late = ask((*prompt(60), POISON, *prompt(9)), 8), ask((1, 2, 3), 8)
        healthy = [ask(prompt(70), 8), ask(prompt(3, 1), 8), ask(prompt(5), 8)]
        run(core, failing, *healthy)
        assert (
            failing.finish_reason == "error"
            and isinstance(failing.error, LogitsError)
            and "NaN" in str(failing.error)
        )
        assert [[p.token_id for p in r.logprobs] for r in healthy] == [
            [p.token_id for p in e] for e in expected
        ]
        for request, true in zip(healthy, expected):
            assert all(
                a.logprob == pytest.approx(b.logprob, abs=1e-4) for a, b in zip(request.logprobs, true)
            )
        run(core, late)
        assert late.finish_reason == "length"  # it reuses the slot and pages of the failed request


def test_a_request_with_every_token_banned_fails_alone(model):
    core = engine(model)
    none_left = ask(prompt(5), 5, min_tokens=2, stop_token_ids=list(range(40)))
    other = ask(prompt(5), 5)
    run(core, none_left, other)
    assert none_left.finish_reason == "error" and "every token is banned" in str(none_left.error)
    assert other.finish_reason == "length"


class Interrupted(Transformer):
    """Raises KeyboardInterrupt at the end of its second step."""

    calls = 0

    def run(self, batch, state, tap):
        out = super().run(batch, state, tap)
        self.calls += 1
        if self.calls == 2:
            raise KeyboardInterrupt
        return out


@pytest.mark.parametrize("mode", [False, True], ids=["shared", "invariant"])
def test_an_interrupted_step_is_recomputed_for_the_remaining_requests(mode):
    """After the interrupt the rings contain the keys of the step, which overwrote earlier keys that a retry needs."""
    made = Interrupted(MICRO, Numerics(kernels=select("cpu")))
    fill_random(made, 0)
    core = engine(install_cpu_decode(made.eval()), max_batch_tokens=64, batch_invariant=mode)
    cancelled, other = ask(prompt(9), 30), ask(prompt(150), 30)
    core.submit(other)
    core.submit(cancelled)
    with pytest.raises(KeyboardInterrupt):
        while core.step():
            pass
    core.cancel(cancelled)
    while core.step():
        pass
    check_empty(core)
    expected = run(core, ask(prompt(150), 30))[0]
    assert other.output_ids == expected.output_ids and other.timings.preemptions == 1


def test_cancelling_at_every_stage_frees_memory_at_once(model):
    core = engine(model, max_requests=1, max_batch_tokens=64)
    running, waiting = ask(prompt(200), 50), ask(prompt(5))
    core.submit(running)
    core.submit(waiting)
    core.cancel(waiting)
    assert waiting.finish_reason == "cancelled" and waiting not in core.scheduler.waiting
    core.step()
    assert 0 < running.num_computed_tokens < 200 and core.scheduler.slots.num_free == 0
    core.cancel(running)
    check_empty(core)
    again = ask(prompt(5), 50)
    core.submit(again)
    for _ in range(10):
        core.step()
    core.cancel(again)
    check_empty(core)
    assert again.events[-1].finish_reason == "cancelled" and len(again.output_ids) == 10
    core.cancel(again)  # no effect
    assert [e.finish_reason for e in again.events].count("cancelled") == 1
    done = run(core, ask(prompt(5)))[0]
    core.cancel(done)
    assert done.finish_reason == "length"


class Collecting(Transformer):
    """Runs the garbage collector in the middle of every step."""

    def run(self, batch, state, tap):
        gc.collect()
        return super().run(batch, state, tap)


def test_a_finalizer_may_run_in_the_middle_of_a_step():
    """An owner of a request becomes garbage in a reference cycle and is collected in the thread that holds the lock."""
    made = Collecting(MICRO, Numerics(kernels=select("cpu")))
    fill_random(made, 0)
    core = engine(install_cpu_decode(made.eval()), max_requests=2)

    class Holder:
        def __init__(self, request):
            self.request, self.cycle = request, self

        def __del__(self):
            core.request_cancel(self.request)

    dropped, other = ask(prompt(9), 50), ask(prompt(5), 6)
    core.submit(dropped)
    core.submit(other)
    gc.disable()
    try:
        Holder(dropped)
        worker = threading.Thread(target=lambda: [core.step() for _ in range(3)], daemon=True)
        worker.start()
        worker.join(300)
    finally:
        gc.enable()
    assert not worker.is_alive(), "the step deadlocked on its own lock"
    assert dropped.finish_reason == "cancelled" and core.scheduler.slots.num_free == 1
    while core.step():
        pass
    check_empty(core)
    assert other.finish_reason == "length"


def test_a_requested_cancellation_takes_effect_before_the_next_step(model):
    core = engine(model, max_requests=1)
    first, second = ask(prompt(9), 50), ask(prompt(9), 5)
    core.submit(first)
    core.step()
    core.request_cancel(first)
    core.submit(second)
    assert first.finish_reason == "cancelled" and core.scheduler.slots.num_free == 1
    core.step()
    assert len(second.output_ids) == 1 and len(first.output_ids) == 1
    core.request_cancel(second)
    core.process_cancellations()
    check_empty(core)
    core.request_cancel(second)  # no effect
    core.process_cancellations()
    assert [e.finish_reason for e in second.events].count("cancelled") == 1


def test_close_cancels_all_requests_and_refuses_new_ones(model):
    core = engine(model, max_requests=1)
    requests = [ask(prompt(5), 50), ask(prompt(5), 50)]
    for request in requests:
        core.submit(request)
    core.step()
    core.close()
    core.close()
    assert [r.finish_reason for r in requests] == ["cancelled"] * 2
    check_empty(core)
    with pytest.raises(EngineClosed, match="was closed"):
        core.submit(ask(prompt(5)))
    assert core.step() is False


def test_many_threads_can_step_one_engine(model):
    core, answers = engine(model, max_requests=3, num_pages=6), {}
    expected = {seed: run(engine(model), ask(prompt(20 + seed, seed), 12))[0].output_ids for seed in range(8)}

    def wait_for(seed):
        request = ask(prompt(20 + seed, seed), 12)
        core.submit(request)
        while not request.done:
            request.events.clear()
            core.step_until_output(request)
        answers[seed] = request.output_ids

    threads = [threading.Thread(target=wait_for, args=(seed,)) for seed in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert answers == expected
    check_empty(core)


def test_tokens_span_prompt_and_output():
    request = ask((5, 6, 7), 4)
    request.output_ids += [8, 9]
    assert request.num_tokens == 5 and request.max_cached_tokens == 6
    assert [request.tokens(a, b) for a, b in ((0, 5), (0, 2), (2, 4), (3, 5), (4, 5), (5, 5))] == [
        [5, 6, 7, 8, 9],
        [5, 6],
        [7, 8],
        [8, 9],
        [9],
        [],
    ]


def test_finish_reasons_of_stop_tokens_and_length():
    """A stop token at the last allowed position ends with "stop"; with `ignore_eos` an EOS token has no effect."""
    for ids, options, reason, kept in (
        ([4, 1, 6], {}, "stop", [4, 1]),
        ([4, 6, 1], {}, "stop", [4, 6, 1]),
        ([4, 6, 6], {}, "length", [4, 6, 6]),
        ([4, 1, 6], {"ignore_eos": True}, "length", [4, 1, 6]),
        ([4, 9, 6], {"stop_token_ids": [9]}, "stop", [4, 9]),
        ([4, 9, 6], {"stop_token_ids": [9], "ignore_eos": True}, "stop", [4, 9]),
    ):
        request = Request((2,), SamplingParams(max_tokens=3, **options), 3, seed=0, eos_ids=frozenset({1}))
        for token in ids:
            if not request.done:
                request.append_token(token, None)
        assert request.finish_reason == reason and request.output_ids == kept
        assert [e.token_id for e in request.events] == kept and request.events[-1].finish_reason == reason
        assert all(e.finish_reason is None for e in list(request.events)[:-1])


def test_one_waiting_thread_steps_for_all_of_them(model):
    """Stepping changes threads when a request ends, not after every step."""
    core = engine(model, max_requests=6, num_pages=12)
    requests = [ask(prompt(10, seed), 12) for seed in range(6)]
    core.submit(*requests)
    stepped: list[int] = []
    plain_step = core.step

    def step() -> bool:
        stepped.append(threading.get_ident())
        return plain_step()

    core.step = step
    threads = [threading.Thread(target=core.step_until_done, args=(each,)) for each in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert all(each.done for each in requests) and not core._waiters
    changes = sum(a != b for a, b in pairwise(stepped))
    assert len(stepped) >= 12 and changes < len(requests)
