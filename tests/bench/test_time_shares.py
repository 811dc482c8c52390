"""Where the time goes: every moment of a step belongs to exactly one part, and watching changes no token."""

import time

import pytest
import torch

from birkhoff.bench.baselines import OurEngine, OurModel
from birkhoff.bench.time_shares import ClockTap, Stopwatch, engine_shares, model_shares
from tests.models import TINY, random_model, random_tokens

STEPS = 6
PROMPTS = [random_tokens(TINY, 20, seed).tolist() for seed in range(2)]


@pytest.fixture(scope="module")
def model():
    return random_model()


def test_the_parts_of_a_step_add_up_to_the_step(model):
    clock = ClockTap()
    contender = OurModel(model, 2, 20, STEPS, tap=clock)
    tokens, gaps = contender.prefill(PROMPTS), []
    for _ in range(STEPS):
        began = time.perf_counter()
        clock.start()
        tokens = contender.step(tokens)
        clock.mark("head")
        whole = time.perf_counter() - began
        gaps.append(whole - sum(clock.seconds.values()))
        assert set(clock.seconds) == {"other", "mhc", "attention", "experts", "head"}
        assert min(clock.seconds.values()) > 0 and gaps[-1] >= 0
    assert min(gaps) < 1e-4  # a busy machine may pause us between two looks at the clock, but not every time


def test_a_slow_part_is_found(model):
    """The same model with experts that sleep: their share grows by what they slept, and no other."""

    class Sleepy(ClockTap):
        def see(self, site, *parts: torch.Tensor) -> None:
            if site.name == "mlp_out":
                time.sleep(0.005)
            super().see(site, *parts)

    plain, sleepy = ClockTap(), Sleepy()
    first = model_shares(OurModel(model, 2, 20, STEPS, tap=plain), plain, PROMPTS, STEPS)
    second = model_shares(OurModel(model, 2, 20, STEPS, tap=sleepy), sleepy, PROMPTS, STEPS)
    assert second["experts"] > 6 * 5 and second["experts"] > 2 * max(
        second["mhc"], second["attention"], second["head"]
    )
    assert set(first) == set(second)


def test_an_engine_is_put_back_as_it_was_and_its_tokens_are_those_of_the_bare_model(model):
    engine, bare = OurEngine(model, 2, 20, STEPS), OurModel(model, 2, 20, STEPS)
    runner, sampler = engine.core.runner, engine.core.sampler
    parts = engine_shares(engine, PROMPTS, STEPS)
    assert set(parts) == {"model", "sampling", "engine"} and parts["model"] > 0 and parts["sampling"] > 0
    assert engine.core.runner is runner and engine.core.sampler is sampler
    ours, theirs = [engine.prefill(PROMPTS)], [bare.prefill(PROMPTS)]
    for _ in range(STEPS):
        ours.append(engine.step(ours[-1]))
        theirs.append(bare.step(theirs[-1]))
    assert ours == theirs


def test_a_stopwatch_times_one_call_and_passes_the_others_on():
    class Worker:
        def work(self, seconds: float) -> str:
            time.sleep(seconds)
            return "done"

        def rest(self) -> str:
            return "resting"

    watched = Stopwatch(Worker(), "work")
    assert (watched.work(0.01), watched.rest()) == ("done", "resting")
    assert len(watched.seconds) == 1 and watched.seconds[0] >= 0.01
