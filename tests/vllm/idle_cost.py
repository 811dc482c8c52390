"""Measure what armed sites cost in steps that do not use them: processor time of a step of four decoding requests on
the small Llama, whose twelve residuals are armed.

python -m tests.vllm.idle_cost eager|compiled [ROUNDS]      in the environment of make test-vllm; prints one JSON line

One engine runs its steps in turns as it is, and as vLLM: with vLLM's own runner class and with its own decoder in place
of the switch. Nothing else differs, the memory neither: two engines in two processes differ by several per cent
whatever is armed, and two in one process share Python's attribute caches in vLLM's runner, which the rarer class misses
more often. A round is a text each of vLLM, armed, and vLLM again, in random order; what the two of vLLM differ by is in
the result as `control`. Steps have real-time priority where that is allowed: other processes then wait.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from tests.vllm.conftest import ENVIRONMENT

TOKENS, SKIPPED = 240, 40  # Python needs some steps to adapt to another class
KINDS = ("plain", "armed", "again")
PERCENTILES = (10, 25, 50)


def main(mode: str, rounds: int) -> None:
    os.environ.update(ENVIRONMENT, OMP_NUM_THREADS="1")
    import birkhoff
    from tests.vllm.models import make_model

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model")
        make_model("llama", path)
        options = {
            "backend": "vllm",
            "dtype": "float32",
            "max_requests": 4,
            "max_batch_tokens": 64,
            "max_context": 256,
            "cache_bytes": 64 << 20,
            "prefix_cache": False,
            "vllm": {"enforce_eager": mode == "eager", "seed": 0},
        }
        with birkhoff.load(path, **options) as engine:
            with suppress(PermissionError):
                os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
            switch = Switch(engine._core.engine)
            times = np.empty((rounds + 1, len(KINDS), TOKENS - 2 * SKIPPED))
            for taken in times:
                for kind in random.sample(range(len(KINDS)), len(KINDS)):
                    switch.arm(KINDS[kind] == "armed")
                    taken[kind] = run_text(engine._core.engine)
            switch.arm(True)
            real_time = os.sched_getscheduler(0) == os.SCHED_FIFO
    times = times[1:]  # the first round warms up
    plain, armed, again = np.percentile(times, PERCENTILES, axis=(0, 2)).T
    texts = np.median(times, axis=2)
    ratios = texts[:, 1] / np.sqrt(texts[:, 0] * texts[:, 2])
    result = {
        "mode": mode,
        "steps": times[:, 0].size,
        "percentiles": PERCENTILES,
        "plain_ms": [plain.round(4).tolist(), again.round(4).tolist()],
        "armed_ms": armed.round(4).tolist(),
        "ratio": (armed / np.sqrt(plain * again)).round(4).tolist(),
        "median_of_ratios": round(float(np.median(ratios)), 4),
        "error_of_mean": round(float(ratios.std() / np.sqrt(rounds)), 4),
        "control": (again / plain).round(4).tolist(),
        "real_time": real_time,
    }
    print(json.dumps(result))


class Switch:
    """Lets an armed engine run as vLLM alone does."""

    def __init__(self, llm):
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        self._runner = llm.model_executor.driver_worker.worker.model_runner
        decoder = self._runner.model.model
        self._armed = type(self._runner), decoder
        self._plain = CPUModelRunner, decoder.own

    def arm(self, armed: bool) -> None:
        self._runner.__class__, self._runner.model.model = self._armed if armed else self._plain


def run_text(llm) -> list[float]:
    """The milliseconds of the steps in which four requests decode, by vLLM's own engine."""
    from vllm import SamplingParams

    from tests.vllm.models import prompts_of

    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    for index, prompt in enumerate(prompts_of(8, 8, 8, 8, seed=1)):
        llm.add_request(f"{time.monotonic_ns()}-{index}", {"prompt_token_ids": prompt}, params)
    spent = []
    while llm.has_unfinished_requests():
        before = time.thread_time_ns()
        llm.step()
        spent.append((time.thread_time_ns() - before) / 1e6)
    return spent[SKIPPED : TOKENS - SKIPPED]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 12)
