"""Scheduling: nothing leaks, every request finishes, the oldest goes first, none is starved.

`Drive` replaces the engine and the model: it records scheduled chunks as computed and appends fixed tokens, so prompts
can have any length. Whole engines are tested in `test_engine.py`.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.engine.cache_plan import plan_pages
from birkhoff.engine.id_pool import IdPool
from birkhoff.engine.request import Request
from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.engine.scheduler import Scheduler
from birkhoff.errors import CapacityError
from birkhoff.model.cache_size import page_bytes, pages_for, slot_bytes
from birkhoff.model.state import State
from tests.models import TINY, variant
from tests.sizes import scaled

MODES = pytest.mark.parametrize("invariant", [False, True], ids=["shared", "invariant"])


def ask(prompt: int, tokens: int = 4) -> Request:
    return Request((1,) * prompt, SamplingParams(max_tokens=tokens), tokens, seed=0)


class Drive:
    """Steps a scheduler and checks its invariants in every step."""

    def __init__(self, slots: int, pages: int, max_batch_tokens: int, invariant: bool = False):
        self.scheduler = Scheduler(slots, pages, max_batch_tokens, invariant)
        self.numbers: dict[Request, int] = {}
        self.steps = 0

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.numbers[request] = len(self.numbers)
            self.scheduler.submit(request)

    def cancel(self, request: Request) -> None:
        if not request.done:
            request.finish("cancelled")
            self.scheduler.release(request)

    def step(self, stops: bool = False) -> set[Request]:
        """One step; returns the scheduled requests. With `stops`, the oldest sampled request ends."""
        scheduler = self.scheduler
        decoding = [
            r for r in scheduler.running if r.output_ids and r.num_computed_tokens == r.num_tokens - 1
        ]
        oldest = min(scheduler.running, key=self.numbers.__getitem__, default=None)
        before = None if oldest is None else oldest.timings.preemptions
        work, alive = scheduler.schedule(), not scheduler.idle
        assert bool(work) == alive, "a step without work although requests are waiting"
        self.steps += 1
        assert sum(w.stop - w.start for w in work) <= max(scheduler.max_batch_tokens, len(decoding))
        assert len({w.request for w in work}) == len(work)
        for item in work:
            request = item.request
            assert (
                item.start == request.num_computed_tokens < item.stop <= request.num_tokens
                and not request.done
            )
            assert (
                pages_for(item.stop) <= len(request.pages) <= pages_for(request.num_tokens)
            )  # enough, and none in advance
        running = {w.request for w in work}
        assert all(r in running or r in scheduler.waiting for r in decoding), (
            "a decoding request was not scheduled"
        )
        assert oldest is None or oldest.timings.preemptions == before, "the oldest request was preempted"
        for item in work:
            item.request.num_computed_tokens = item.stop
            if item.stop == item.request.num_tokens:
                item.request.append_token(1, None)
                if stops and not item.request.done:
                    item.request.finish("stop")
                    stops = False
                if item.request.done:
                    scheduler.release(item.request)
        self.check_memory()
        return running

    def check_memory(self) -> None:
        s = self.scheduler
        slots, pages = [r.slot for r in s.running], [p for r in s.running for p in r.pages]
        assert len(set(slots)) == len(slots) == s.slots.size - s.slots.num_free
        assert len(set(pages)) == len(pages) == s.pages.size - s.pages.num_free
        assert all(r.slot is None and not r.pages and r.num_computed_tokens == 0 for r in s.waiting)
        order = [self.numbers[r] for r in [*s.running, *s.waiting]]
        assert order == sorted(order), "requests are not in order of arrival"

    def finish(self, most: int = 100_000) -> int:
        before = self.steps
        while not self.scheduler.idle:
            self.step()
            assert self.steps - before < most, "a request never ends"
        assert self.scheduler.slots.num_free == self.scheduler.slots.size
        assert self.scheduler.pages.num_free == self.scheduler.pages.size
        assert all(r.done and r.slot is None and not r.pages for r in self.numbers)
        return self.steps - before


@settings(max_examples=scaled(2000, 200))
@given(data=st.data())
def test_random_programs_leak_nothing_and_terminate(data):
    """Any sequence of submit, cancel, step and stop, with so few pages that requests are preempted."""
    draw = data.draw
    slots, pages = draw(st.integers(1, 5), label="slots"), draw(st.integers(2, 7), label="pages")
    batch = draw(st.sampled_from([slots + 1, slots + 2, 16, 100, 600]), label="max_batch_tokens")
    drive = Drive(slots, pages, max(batch, slots + 1), draw(st.booleans(), label="invariant"))
    lengths = st.sampled_from([1, 2, 7, 100, 126, 127, 128, 129, 200, 255, 256, 300])
    for _ in range(draw(st.integers(1, 25), label="actions")):
        action = draw(st.sampled_from(["submit", "submit", "step", "step", "steps", "cancel", "stop"]))
        if action == "submit":
            request = ask(draw(lengths), draw(st.sampled_from([1, 2, 5, 40, 140])))
            if pages_for(request.max_cached_tokens) <= pages:
                drive.submit(request)
        elif action == "cancel" and drive.numbers:
            drive.cancel(draw(st.sampled_from(list(drive.numbers)), label="whom"))
            drive.check_memory()
        elif action in ("step", "steps", "stop"):
            for _ in range(1 if action != "steps" else draw(st.integers(2, 40))):
                drive.step(stops=action == "stop")
    drive.finish()


@MODES
def test_decoding_continues_during_a_long_prefill(invariant):
    drive = Drive(4, 2000, 256, invariant)
    talker, reader = ask(5, 2000), ask(100_000, 2)
    drive.submit(talker)
    drive.step()
    drive.submit(reader)
    while not reader.output_ids:
        before = len(talker.output_ids)
        assert talker in drive.step() and len(talker.output_ids) == before + 1
    assert drive.steps > 1000
    print(f"{len(talker.output_ids)} tokens while {len(reader.prompt_ids)} were read in pieces")


@MODES
@pytest.mark.parametrize("talking", [0, 1, 3])
def test_a_short_prompt_after_a_very_long_one_is_not_delayed(invariant, talking):
    drive = Drive(8, 2000, 256, invariant)
    drive.submit(*(ask(5, 2000) for _ in range(talking)))
    drive.step()
    drive.submit(ask(100_000))
    for _ in range(5):
        drive.step()
    short = ask(20)
    drive.submit(short)
    before = drive.steps
    while not short.output_ids:
        drive.step()
    waited = drive.steps - before
    print(f"first token after {waited} steps; the long prompt alone takes {100_000 // 64}")
    assert waited <= 3


@MODES
def test_several_long_prompts_all_make_progress(invariant):
    drive = Drive(8, 4000, 40, invariant)
    drive.submit(ask(5, 10_000), *(ask(5_000) for _ in range(7)))
    readers = list(drive.numbers)[1:]
    for _ in range(10):
        drive.step()
    for _ in range(20):
        before = {r: r.num_computed_tokens for r in readers}
        for _ in range(8):
            drive.step()
        assert all(r.num_computed_tokens > before[r] for r in readers)


@MODES
def test_a_budget_smaller_than_the_number_of_prefills_reaches_the_oldest(invariant):
    """Shares are whole tokens: three tokens for eleven prefilling requests must not round to zero for the oldest."""
    drive = Drive(12, 40, 13, invariant)
    drive.submit(ask(2, 500))
    drive.step()
    drive.submit(*(ask(50, 1) for _ in range(11)))
    oldest = list(drive.numbers)[1]
    for _ in range(30):
        drive.step()
    assert oldest.num_computed_tokens >= 10 or oldest.done


@MODES
@pytest.mark.parametrize("slots, batch, tokens", [(8, 9, 3), (8, 64, 3), (15, 16, 3)])
def test_a_stream_of_short_requests_does_not_starve_a_long_one(invariant, slots, batch, tokens):
    drive = Drive(slots, 60, batch, invariant)
    long = ask(200, 3)
    drive.submit(*(ask(1, tokens + 5 * i) for i in range(slots - 1)), long)  # they end at different steps
    while not long.done:
        while len(drive.scheduler.waiting) < 3:
            drive.submit(ask(1, tokens))
        drive.step()
        assert drive.steps < 400
    print(f"ended after {drive.steps} steps among {len(drive.numbers)} others")


@MODES
def test_prefill_continues_while_other_requests_decode(invariant):
    """Fourteen requests decode in every step; the remaining two tokens of the budget go to the prefill."""
    drive = Drive(15, 400, 16, invariant)
    reader = ask(200)
    drive.submit(*(ask(1, 3000) for _ in range(14)), reader)
    while not reader.output_ids:
        drive.step()
        assert drive.steps < 120


@MODES
def test_admission_is_in_order_of_arrival(invariant):
    """The first request needs more memory than is free; later ones would fit and still wait."""
    drive = Drive(4, 4, 600, invariant)
    first, big, small = ask(200, 30), ask(400, 2), ask(3, 2)
    drive.submit(first)
    drive.step()
    drive.submit(big, small)
    for _ in range(5):
        drive.step()
    assert drive.scheduler.running == [first] and list(drive.scheduler.waiting) == [big, small]
    drive.finish()
    assert first.timings.admitted < big.timings.admitted < small.timings.admitted


@MODES
def test_the_newest_is_preempted_and_readmitted_first(invariant):
    drive = Drive(3, 3, 600, invariant)
    oldest, middle, youngest, later = ask(127, 150), ask(100, 20), ask(100, 20), ask(1, 1)
    drive.submit(oldest, middle, youngest, later)
    while not youngest.timings.preemptions:
        drive.step()
    assert drive.scheduler.waiting[0] is youngest and later in drive.scheduler.waiting
    assert not oldest.timings.preemptions and not middle.timings.preemptions
    drive.finish()
    assert len(youngest.output_ids) == 20  # tokens generated before the preemption are kept


@pytest.mark.parametrize(
    "prompt, tokens", [(1, 1), (1, 128), (1, 129), (128, 1), (127, 2), (128, 2), (200, 57), (9, 900)]
)
def test_the_maximum_pages_of_a_request_are_enough(prompt, tokens):
    drive = Drive(1, pages_for(prompt + tokens - 1), 64)
    drive.submit(ask(prompt, tokens))
    drive.finish()


@given(budget=st.integers(1, 50), slots=st.integers(1, 12), invariant=st.booleans())
def test_more_decoding_requests_than_the_budget_still_finish(budget, slots, invariant):
    """`load` refuses such numbers; a scheduler built directly still runs every request."""
    drive = Drive(slots, 30, budget, invariant)
    drive.submit(*(ask(3, 5) for _ in range(slots + 2)))
    drive.finish()


@MODES
def test_restarting_after_an_interrupt_keeps_order_and_frees_memory(invariant):
    drive = Drive(3, 9, 64, invariant)
    requests = [ask(100, 30), ask(20, 5), ask(30, 5), ask(10, 5)]
    drive.submit(*requests)
    for _ in range(3):
        drive.step()
    running = list(drive.scheduler.running)
    drive.scheduler.recompute(running)
    drive.check_memory()
    assert not drive.scheduler.running and list(drive.scheduler.waiting) == [
        r for r in requests if not r.done
    ]
    drive.finish()
    assert [len(r.output_ids) for r in requests] == [30, 5, 5, 5]


@given(steps=st.lists(st.integers(-3, 3).filter(bool), max_size=40), size=st.integers(0, 8))
def test_a_pool_allocates_each_id_once(steps, size):
    pool, allocated = IdPool(size), []
    for step in steps:
        if step > 0:
            taken = pool.allocate(step)
            assert (taken is None) == (size - len(allocated) < step)
            allocated += taken or []
        elif allocated:
            pool.release(allocated[step:])
            allocated = allocated[:step]
        assert (
            len(set(allocated)) == len(allocated)
            and set(allocated) <= set(range(size))
            and pool.num_free == size - len(allocated)
        )


def test_a_pool_detects_a_double_release():
    pool = IdPool(3)
    taken = pool.allocate(2)
    pool.release(taken)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(taken[:1])
    with pytest.raises(AssertionError, match="released twice"):
        IdPool(3).release([2])
    assert pool.allocate(4) is None and sorted(pool.allocate(3)) == [0, 1, 2]


@pytest.mark.parametrize(
    "config",
    [TINY, variant(compress_ratios=(0,)), variant(compress_ratios=(4, 4, 0, 128))],
    ids=["tiny", "sliding", "mixed"],
)
@pytest.mark.parametrize("slots", [1, 3])
def test_planned_bytes_equal_allocated_bytes(config, slots):
    state = State(config, slots, 5)
    tensors = [t for layer in state.layers for t in (*layer.pages.values(), layer.keys.rows)]
    tensors += [ring.rows for layer in state.layers for ring in layer.raw.values()]
    nbytes = sum(t.numel() * t.itemsize for t in tensors)
    assert nbytes == 5 * page_bytes(config, 4) + slots * slot_bytes(config, 4)


@given(
    requests=st.integers(1, 9), extra=st.integers(0, 40), context=st.one_of(st.none(), st.integers(1, 1024))
)
def test_a_cache_plan_uses_all_of_its_bytes(requests, extra, context):
    fixed, each = requests * slot_bytes(TINY, 4), page_bytes(TINY, 4)
    given_bytes = fixed + each * (requests + extra) + each // 2
    pages, longest = plan_pages(TINY, 4, given_bytes, requests, context)
    assert fixed + pages * each <= given_bytes and 1 <= longest <= TINY.max_position_embeddings
    if context is None:  # the model's limit, or what the memory allows for all requests
        assert pages == requests * pages_for(longest)
        assert longest == 1024 or requests * (pages_for(longest) + 1) * each + fixed > given_bytes
    else:
        assert longest == context and pages == min(requests + extra, requests * pages_for(context))


def test_a_cache_plan_that_is_too_small_states_the_needed_bytes():
    least = 4 * slot_bytes(TINY, 4) + 4 * page_bytes(TINY, 4)
    plan_pages(TINY, 4, least, 4, None)
    with pytest.raises(
        CapacityError, match=r"cache_bytes is \d+\.\d+ KiB, but 4 requests need at least .*Raise cache_by"
    ):
        plan_pages(TINY, 4, least - 1, 4, None)
    sliding = variant(compress_ratios=(0, 0))
    assert plan_pages(sliding, 4, slot_bytes(sliding, 4), 1, None) == (8, 1024)
    with pytest.raises(CapacityError, match="Raise cache_bytes or lower max_requests"):
        plan_pages(sliding, 4, slot_bytes(sliding, 4) - 1, 1, None)


def test_pages_are_rounded_up():
    assert [pages_for(n) for n in (0, 1, 127, 128, 129, 256, 257)] == [0, 1, 1, 1, 2, 2, 3]
    assert all(pages_for(n) * 128 >= n for n in itertools.chain(range(400)))
