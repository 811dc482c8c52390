"""Whether a GPU generates what the CPU generates: greedy answers of the embedded model from engines on both.

The CPU computes in float32. On the GPU the same requests run in float32 and in bfloat16 with packed weights and CUDA
graphs, and with the reference kernels. A row reports for how many tokens each answer is equal and, at the first
difference, by how much the CPU preferred its own token (in log probability): a difference must be a near tie.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import birkhoff
from birkhoff.bench.decode import device_facts
from birkhoff.bench.report import significant

PROMPTS = (
    "Once upon a time",
    "Tom had a red ball.",
    "The little girl wanted to",
    "One day a dog",
    "There was a big tree",
)
VARIANTS = (("float32", "triton"), ("bfloat16", "triton"), ("float32", "reference"))
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.1}


def bench_nano(tokens: int = 96) -> Iterator[dict[str, Any]]:
    import torch

    options: dict[str, Any] = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    with birkhoff.load("nano", device="cpu", dtype="float32") as cpu:
        expected = [cpu.generate(prompt, logprobs=20, **options) for prompt in PROMPTS]
    common = {
        "bench": "nano",
        **device_facts(torch.device("cuda")),
        "prompts": len(PROMPTS),
        "tokens": tokens,
    }
    for dtype, kernels in VARIANTS:
        with birkhoff.load("nano", device="cuda", dtype=dtype, kernels=kernels) as engine:
            answers = [engine.generate(prompt, **options) for prompt in PROMPTS]
            began = time.perf_counter()
            for prompt in PROMPTS:
                engine.generate(prompt, **options)
            seconds = time.perf_counter() - began
        differences = [_first_difference(a, b) for a, b in zip(answers, expected)]
        margins = [margin for _, margin in differences if margin is not None]
        yield common | {
            "kind": "nano",
            "dtype": dtype,
            "kernels": kernels,
            "same_for": [count for count, _ in differences],
            "margins": [significant(margin) for margin in margins],
            "tokens_per_second_one_by_one": significant(len(PROMPTS) * tokens / seconds),
            "passed": all(margin < NEAR_TIE[dtype] for margin in margins),
        }


def _first_difference(answers: Any, expected: Any) -> tuple[int, float | None]:
    """Number of equal tokens, and the log probability margin at the first difference; infinite if the other token is
    not among the top ones."""
    pairs = enumerate(zip(answers.token_ids, expected.token_ids))
    step = next((index for index, (a, b) in pairs if a != b), None)
    if step is None:
        return len(expected.token_ids), None
    top = dict(expected.logprobs[step].top)
    logprob = top.get(answers.token_ids[step], float("-inf"))
    return step, expected.logprobs[step].logprob - logprob


if __name__ == "__main__":
    for row in bench_nano():
        print(json.dumps(row), flush=True)
