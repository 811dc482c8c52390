"""The CUDA sampler (sample.cu), compiled for a CPU and compared with the plain sampler: tokens, log-probabilities and
unusable rows, with the parameters that the engine writes."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch

from birkhoff.engine.sampler import Sampled, SamplingState, _DeviceBatch, _results, sample
from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.errors import LogitsError
from birkhoff.kernels.sample.device import COLUMNS, MAX_VOCAB, THREADS
from tests.kernels.cuda_on_cpu import SANITIZER, KernelsOnCpu
from tests.sizes import FULL

CONSTANTS = "THREADS = 512, ITEMS = 32"
SMALL_THREADS, SMALL_VOCAB = 64, 8 * 64 * 4  # the same source with fewer threads, and its largest vocabulary
SEEDS = (0, 1, 2, 3) if FULL else (0, 1)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> KernelsOnCpu:
    smaller = {CONSTANTS: f"THREADS = {SMALL_THREADS}, ITEMS = 4"}
    folder = tmp_path_factory.mktemp("sample_on_cpu")
    return KernelsOnCpu(("common.cuh", "sample.cu"), ("sample_rows",), folder, smaller)


class FixedMask:
    def __init__(self, allowed: torch.Tensor):
        self._allowed = allowed

    def allowed(self, accepted, vocab_size):
        return self._allowed


def draw_on_kernels(kernels: KernelsOnCpu, logits: torch.Tensor, states, threads: int, seed: int) -> list:
    """As `_DeviceSampling.sample`."""
    batch = _DeviceBatch(states)
    masks = batch.fill(logits, 0)
    params = torch.from_numpy(batch.params.view(np.uint8).reshape(len(states), -1).copy())
    out = torch.full((len(states), COLUMNS), torch.nan, dtype=torch.float64)
    arguments = (logits, logits.stride(0), params, out, logits.shape[1])
    kernels.launch("sample_rows", (8 * len(states), 1), threads, *arguments, pdl=False)
    kernels.run(seed)
    assert len(masks) == sum(state.masked for state in states)
    return _results(out.numpy(), batch.logprobs)


def compare(drawn: list, expected: list) -> None:
    assert [type(each) for each in drawn] == [type(each) for each in expected]
    for a, b in zip(drawn, expected):
        if not isinstance(b, Sampled):
            continue
        assert a.token == b.token
        if b.logprob is None:
            assert a.logprob is None
            continue
        assert [token for token, _ in a.logprob.top] == [token for token, _ in b.logprob.top]
        assert a.logprob.logprob == pytest.approx(b.logprob.logprob, abs=1e-5)
        for (_, x), (_, y) in zip(a.logprob.top, b.logprob.top):
            assert x == pytest.approx(y, abs=1e-5)


PARAMS = {
    "greedy": {"temperature": 0, "logprobs": 20},
    "plain": {"logprobs": 0},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
    "top-p of nearly nothing": {"top_p": 1e-9},
    "top-p of nearly everything": {"top_p": 1 - 1e-9},
    "top-k": {"top_k": 5, "temperature": 3.0},
    "top-k and top-p": {"top_k": 40, "top_p": 0.5, "logprobs": 3},
    "top-k of everything": {"top_k": 100_000, "top_p": 0.9},
    "min-p": {"min_p": 0.5, "temperature": 2.0},
    "cold": {"temperature": 0.01},
    "colder than float32": {"temperature": 1e-40},
    "colder than float32, truncated": {"temperature": 1e-300, "top_p": 0.5, "top_k": 3, "min_p": 0.1},
    "hot": {"temperature": 100.0},
    "penalties": {
        "repetition_penalty": 1.7,
        "presence_penalty": 0.7,
        "frequency_penalty": -0.3,
        "logprobs": 2,
    },
    "bias": {"logit_bias": {0: 3.0, 7: -20.0, 4: 100.0}, "logprobs": 1},
    "banned": {"min_tokens": 9, "temperature": 0},
}


def random_logits(kind: str, rows: int, vocab: int) -> torch.Tensor:
    logits = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab))
    if kind == "ties":
        logits = logits.round()
    if kind == "equal":
        logits = torch.full_like(logits, -2.5)
    if kind == "one finite":
        logits[:, torch.arange(vocab) != vocab - 1] = -math.inf
    return logits


def state_of(name: str, vocab: int, seed: int, mask: FixedMask | None = None) -> SamplingState:
    params = SamplingParams.from_kwargs(max_tokens=10, **PARAMS[name])
    prompt = [token % vocab for token in (1, 2, 2, vocab - 1)]
    state = SamplingState(params, vocab, seed=seed, prompt_ids=prompt, eos_ids=[1, vocab - 1], mask=mask)
    for token in (3, 3, 0):
        state.accept(token)
    return state


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["random", "ties", "equal", "one finite"] if FULL else ["random", "ties"])
@pytest.mark.parametrize("vocab", [21, 1999, SMALL_VOCAB] if FULL else [1999])
def test_every_way_of_sampling_is_that_of_the_plain_sampler(kernels, vocab, kind, seed):
    logits = random_logits(kind, len(PARAMS), vocab)
    states = [state_of(name, vocab, 77 * seed + row) for row, name in enumerate(PARAMS)]
    compare(draw_on_kernels(kernels, logits, states, SMALL_THREADS, seed), sample(logits, states))


@pytest.mark.parametrize("seed", SEEDS)
def test_masks_and_unusable_rows(kernels, seed):
    """NaN, infinity and nothing finite, in a row of their own and where a mask or a ban leaves something finite."""
    vocab = 700
    logits = random_logits("random", 8, vocab)
    logits[0, 5], logits[1, 5], logits[2] = math.nan, math.inf, -math.inf
    logits[3, 5], logits[4, 5] = math.nan, math.inf
    half = torch.rand(vocab, generator=torch.Generator().manual_seed(1)) < 0.5
    half[5] = False
    last = torch.arange(vocab) == vocab - 1
    masks = [None, None, None, half, half, last, ~half, torch.zeros_like(half)]
    states = [
        state_of("top-p", vocab, 5 * seed + row, None if mask is None else FixedMask(mask))
        for row, mask in enumerate(masks)
    ]
    drawn = draw_on_kernels(kernels, logits, states, SMALL_THREADS, seed)
    compare(drawn, sample(logits, states))
    unusable = [isinstance(each, LogitsError) for each in drawn]
    assert unusable == [True, True, True, False, False, False, False, True]


@pytest.mark.skipif(not FULL, reason="4,096 threads for a row: runs with the full suite")
@pytest.mark.skipif(
    os.environ.get(SANITIZER) == "thread", reason="the same source with fewer threads is checked"
)
def test_the_largest_vocabulary(tmp_path):
    kernels = KernelsOnCpu(("common.cuh", "sample.cu"), ("sample_rows",), tmp_path)
    logits = random_logits("random", 3, MAX_VOCAB)
    states = [state_of(name, MAX_VOCAB, 3) for name in ("top-k and top-p", "penalties", "greedy")]
    compare(draw_on_kernels(kernels, logits, states, THREADS, 0), sample(logits, states))
