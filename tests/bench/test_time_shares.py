"""Time shares: every part of a step is counted exactly once, and measuring changes no token."""

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
    # On a busy machine some steps may be interrupted between two readings of the clock, but not all.
    assert min(gaps) < 1e-4


def test_a_slow_part_is_attributed(model):
    """With experts that sleep, their share grows by the time slept, and no other share grows."""

    class SlowExperts(ClockTap):
        def see(self, site, *parts: torch.Tensor) -> None:
            if site.name == "mlp_out":
                time.sleep(0.005)
            super().see(site, *parts)

    plain, slow = ClockTap(), SlowExperts()
    first = model_shares(OurModel(model, 2, 20, STEPS, tap=plain), plain, PROMPTS, STEPS)
    second = model_shares(OurModel(model, 2, 20, STEPS, tap=slow), slow, PROMPTS, STEPS)
    assert second["experts"] > 6 * 5 and second["experts"] > 2 * max(
        second["mhc"], second["attention"], second["head"]
    )
    assert set(first) == set(second)


def test_an_engine_is_restored_and_its_tokens_match_the_model(model):
    engine, model_alone = OurEngine(model, 2, 20, STEPS), OurModel(model, 2, 20, STEPS)
    runner, sampler = engine.core.runner, engine.core.sampler
    parts = engine_shares(engine, PROMPTS, STEPS)
    assert set(parts) == {"model", "sampling", "engine"} and parts["model"] > 0 and parts["sampling"] > 0
    assert engine.core.runner is runner and engine.core.sampler is sampler
    engine_tokens, model_tokens = [engine.prefill(PROMPTS)], [model_alone.prefill(PROMPTS)]
    for _ in range(STEPS):
        engine_tokens.append(engine.step(engine_tokens[-1]))
        model_tokens.append(model_alone.step(model_tokens[-1]))
    assert engine_tokens == model_tokens


def test_a_stopwatch_times_one_method_and_forwards_others():
    class Worker:
        def work(self, seconds: float) -> str:
            time.sleep(seconds)
            return "done"

        def rest(self) -> str:
            return "resting"

    watched = Stopwatch(Worker(), "work")
    assert (watched.work(0.01), watched.rest()) == ("done", "resting")
    assert len(watched.seconds) == 1 and watched.seconds[0] >= 0.01
