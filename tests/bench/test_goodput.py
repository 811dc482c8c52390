"""The traffic of `bench goodput`: reproducible lengths, fresh tokens, and every request is answered."""

from __future__ import annotations

import pytest

from birkhoff.bench.goodput import GoodputSetting, KernelTimes, run_arrivals, run_at_once, run_threads
from birkhoff.engine.engine import EngineCore
from tests.models import random_model, variant

SETTING = GoodputSetting(requests=3, prompt_tokens=(4, 9), output_tokens=(2, 5))


def test_runs_have_equal_lengths_and_different_tokens():
    first, same, other = SETTING.make(100, 1), SETTING.make(100, 1), SETTING.make(100, 2)
    assert [r.prompt_ids for r in first] == [r.prompt_ids for r in same] != [r.prompt_ids for r in other]
    assert [(len(r.prompt_ids), r.max_tokens) for r in first] == [
        (len(r.prompt_ids), r.max_tokens) for r in other
    ]


def test_kernel_time_counts_prompts_in_chunks_and_steps_by_remaining_requests():
    kernels = KernelTimes.__new__(KernelTimes)
    kernels.chunk_tokens, kernels.chunk_seconds = 10, 1.0
    kernels.step_seconds = {1: 0.1, 2: 0.2, 4: 0.4}
    requests = SETTING.make(100)
    steps = [request.max_tokens - 1 for request in requests]
    expected = sum(len(request.prompt_ids) for request in requests) / 10 + 0.1 * sum(steps)
    assert kernels.work(requests) == pytest.approx(expected), "a step costs 0.1 for each request in it"


def test_every_request_is_answered_in_each_kind_of_run():
    config = variant(compress_ratios=(0, 4), num_nextn_predict_layers=0)
    core = EngineCore(random_model(config), max_requests=2, max_context=64, num_pages=4)
    for run in (run_at_once, lambda core, requests: run_arrivals(core, requests, 100.0)):
        requests = SETTING.make(config.vocab_size)
        seconds, progress = run(core, requests)
        assert seconds > progress.idle_seconds >= 0 and len(progress.first) == len(requests)
        assert sum(progress.decoded) == len(progress.between) == sum(r.max_tokens - 1 for r in requests)
        assert max(progress.decoded) <= 2, "two requests run at the same time"
        assert all(len(request.output_ids) == request.max_tokens for request in requests)
    requests = SETTING.make(config.vocab_size)
    assert run_threads(core, requests) > 0 and all(request.done for request in requests)
    core.close()
