"""Does a GPU write what the CPU writes? The embedded model's greedy answers, through ordinary engines on both.

The CPU computes in float32. On the GPU the same requests run in float32 and in bfloat16 with packed weights and
replayed graphs, and plainly. A row tells for how many tokens each answer is the same and, at the first that differs, by
how much the CPU preferred its own token to the GPU's (in natural logarithms of probability): a difference must be a
near tie.
"""

from __future__ import annotations

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
WAYS = (("float32", "triton"), ("bfloat16", "triton"), ("float32", "reference"))
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.1}


def bench_nano(tokens: int = 96) -> Iterator[dict[str, Any]]:
    import torch

    options: dict[str, Any] = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    with birkhoff.load("nano", device="cpu", dtype="float32") as cpu:
        true = [cpu.generate(prompt, logprobs=20, **options) for prompt in PROMPTS]
    common = {
        "bench": "nano",
        **device_facts(torch.device("cuda")),
        "prompts": len(PROMPTS),
        "tokens": tokens,
    }
    for dtype, kernels in WAYS:
        with birkhoff.load("nano", device="cuda", dtype=dtype, kernels=kernels) as engine:
            mine = [engine.generate(prompt, **options) for prompt in PROMPTS]
            began = time.perf_counter()
            for prompt in PROMPTS:
                engine.generate(prompt, **options)
            seconds = time.perf_counter() - began
        found = [_first_difference(a, b) for a, b in zip(mine, true)]
        margins = [margin for _, margin in found if margin is not None]
        yield common | {
            "kind": "nano",
            "dtype": dtype,
            "kernels": kernels,
            "same_for": [count for count, _ in found],
            "margins": [significant(margin) for margin in margins],
            "tokens_per_second_one_by_one": significant(len(PROMPTS) * tokens / seconds),
            "passed": all(margin < NEAR_TIE[dtype] for margin in margins),
        }


def _first_difference(mine: Any, true: Any) -> tuple[int, float | None]:
    """Tokens that agree, and the CPU's preference where they part; infinite when the other is not among its best."""
    pairs = enumerate(zip(mine.token_ids, true.token_ids))
    at = next((step for step, (a, b) in pairs if a != b), None)
    if at is None:
        return len(true.token_ids), None
    known = dict(true.logprobs[at].top)
    other = known.get(mine.token_ids[at], float("-inf"))
    return at, true.logprobs[at].logprob - other


def main() -> None:
    import json

    for row in bench_nano():
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
