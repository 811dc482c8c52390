"""Measure what armed sites cost in steps that do not use them: processor time of a step of four decoding requests on
the small Llama, with nothing armed and with its twelve residuals armed, in turns in one process.

python -m tests.vllm.idle_cost eager|compiled [TEXTS]      in the environment of make test-vllm; prints one JSON line

An engine that was made later is up to 1 % faster, whatever is armed. So there are three: one with nothing armed before
the armed one, one after it. What the first two engines of a kind differ by is in the result as `control`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tests.vllm.conftest import ENVIRONMENT

TOKENS, SKIPPED = 200, 4
PERCENTILES = (10, 25, 50)


def main(mode: str, texts: int) -> None:
    os.environ.update(ENVIRONMENT)
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
        engines = [birkhoff.load(path, hooks=hooks, **options) for hooks in ("none", None, "none")]
        steps = []
        for text in range(texts + 1):
            started = [start(engine) for engine in engines]
            for _ in range(TOKENS - 2 * SKIPPED):
                spent = [0.0] * len(engines)
                for index in random.sample(range(len(engines)), len(engines)):
                    spent[index] = step(started[index])
                if text:  # the first warms up
                    steps.append(spent)
            for each in started:
                while each.has_unfinished_requests():
                    each.step()
        times = np.array(steps)
        before, armed, after = np.percentile(times, PERCENTILES, axis=0).T
        result = {
            "mode": mode,
            "steps": len(steps),
            "percentiles": PERCENTILES,
            "plain_ms": [before.round(4).tolist(), after.round(4).tolist()],
            "armed_ms": armed.round(4).tolist(),
            "ratio": (armed / np.sqrt(before * after)).round(4).tolist(),
            "median_of_ratios": _median(times[:, 1] / np.sqrt(times[:, 0] * times[:, 2])),
            "control": _median(times[:, 2] / times[:, 0]),
        }
        print(json.dumps(result))
        for engine in engines:
            engine.close()


def _median(ratios):
    return round(float(np.median(ratios)), 4)


def start(engine):
    """Four requests that decode, on vLLM's own engine."""
    from vllm import SamplingParams

    from tests.vllm.models import prompts_of

    llm = engine._core.engine
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    for index, prompt in enumerate(prompts_of(8, 8, 8, 8, seed=1)):
        llm.add_request(f"{time.monotonic_ns()}-{index}", {"prompt_token_ids": prompt}, params)
    for _ in range(SKIPPED):
        llm.step()
    return llm


def step(llm):
    before = time.thread_time_ns()
    llm.step()
    return (time.thread_time_ns() - before) / 1e6


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 8)
