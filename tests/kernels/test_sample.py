"""CUDA sampling kernel compared with the reference sampler: same tokens and log-probabilities in any batch."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from birkhoff.engine.sampler import Sampled, SamplingState, _DeviceSampling, _mix64, _mix64_array, sample
from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.kernels.sample.device import MAX_VOCAB, ROW_PARAMS, SOURCE, DeviceSampler

VOCAB = 129280


class FixedMask:
    def __init__(self, allowed: torch.Tensor):
        self._allowed = allowed

    def allowed(self, accepted, vocab_size):
        return self._allowed


def test_row_params_match_the_struct_of_the_kernel():
    text = SOURCE.read_text()
    struct = text[text.index("struct RowParams {") : text.index("};", text.index("struct RowParams {"))]
    names = [part.split("//")[0] for part in struct.splitlines()[1:]]
    declared = [word.strip(" *;") for line in names for word in line.replace(",", " ").split()]
    assert all(name in declared for name in ROW_PARAMS.names) and ROW_PARAMS.itemsize == 128
    assert f"ITEMS = {MAX_VOCAB // (8 * 512)}" in text


def test_mix64_of_an_array_matches_the_scalar_function():
    values = [random.Random(7).getrandbits(64) for _ in range(64)]
    assert _mix64_array(np.array(values, np.uint64)).tolist() == [_mix64(value) for value in values]


def test_a_cpu_has_no_device_sampler():
    assert not DeviceSampler.supported(torch.device("cpu"), VOCAB)


@pytest.fixture(scope="module")
def kernel():
    device = torch.device("cuda")
    if not DeviceSampler.supported(device, VOCAB):
        pytest.skip("needs compute capability 9.0")
    return _DeviceSampling(device)


def random_params(draw: random.Random) -> SamplingParams:
    fields = {
        "temperature": draw.choice([0, 0.3, 0.8, 1.0, 3.0]),
        "top_k": draw.choice([0, 0, 1, 5, 40, 5000]),
        "top_p": draw.choice([1.0, 1.0, 0.05, 0.5, 0.95, 0.999]),
        "min_p": draw.choice([0, 0, 0.05, 0.5]),
        "logprobs": draw.choice([None, None, 0, 5, 20]),
        "presence_penalty": draw.choice([0, 0, 0.7]),
        "frequency_penalty": draw.choice([0, 0, 0.3]),
        "repetition_penalty": draw.choice([1.0, 1.0, 1.3]),
        "min_tokens": draw.choice([0, 0, 3]),
    }
    if draw.random() < 0.3:
        fields["logit_bias"] = {draw.randrange(VOCAB): draw.uniform(-20, 20) for _ in range(50)}
    return SamplingParams.from_kwargs(max_tokens=10, **fields)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_the_kernel_matches_the_reference_sampler(kernel, seed):
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    count = draw.choice([1, 2, 8, 17, 64])
    logits = torch.randn(count, VOCAB, generator=generator) * draw.choice([0.3, 1, 3, 6])
    if seed % 3 == 0:
        logits = (logits * 4).round() / 4  # ties
    if seed % 4 == 1:
        logits[-1] = -math.inf
        logits[0, 7] = math.inf
    rows: dict[str, list[SamplingState]] = {"cpu": [], "cuda": []}
    for _ in range(count):
        params, noise = random_params(draw), draw.getrandbits(64)
        prompt = [draw.randrange(VOCAB) for _ in range(50)]
        mask = FixedMask(torch.rand(VOCAB, generator=generator) < 0.3) if draw.random() < 0.2 else None
        accepted = [draw.randrange(VOCAB) for _ in range(draw.choice([0, 2, 5]))]
        for device, states in rows.items():
            row = SamplingState(
                params, VOCAB, seed=noise, prompt_ids=prompt, eos_ids=[1, 2], device=device, mask=mask
            )
            for token in accepted:
                row.accept(token)
            states.append(row)
    plain = sample(logits, rows["cpu"])
    fast = kernel.sample(logits.cuda(), rows["cuda"])
    assert [type(drawn) for drawn in plain] == [type(drawn) for drawn in fast]
    for a, b in zip(plain, fast):
        if isinstance(a, Sampled) and isinstance(b, Sampled):
            assert a.token == b.token
            if a.logprob is None or b.logprob is None:
                assert a.logprob is b.logprob
                continue
            assert [token for token, _ in a.logprob.top] == [token for token, _ in b.logprob.top]
            assert b.logprob.logprob == pytest.approx(a.logprob.logprob, abs=1e-6)
            for (_, x), (_, y) in zip(a.logprob.top, b.logprob.top):
                assert y == pytest.approx(x, abs=1e-6)


@pytest.mark.gpu
def test_a_row_does_not_depend_on_the_batch(kernel):
    logits = torch.randn(64, VOCAB, device="cuda") * 3
    params = SamplingParams.from_kwargs(temperature=0.8, top_p=0.95)
    rows = [SamplingState(params, VOCAB, seed=seed, device="cuda") for seed in range(64)]
    together = [drawn.token for drawn in kernel.sample(logits, rows)]
    assert together == [kernel.sample(logits[i : i + 1], [rows[i]])[0].token for i in range(64)]


@pytest.mark.gpu
def test_draws_follow_the_distribution(kernel):
    logits = torch.full((64, VOCAB), -30.0, device="cuda")
    logits[:, :6] = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -1.0])
    counts, draws = np.zeros(6), 4096
    params = SamplingParams.from_kwargs(temperature=1.0)
    for start in range(0, draws, 64):
        rows = [SamplingState(params, VOCAB, seed=1000 + start + i, device="cuda") for i in range(64)]
        for drawn in kernel.sample(logits, rows):
            counts[drawn.token] += 1
    expected = logits[0, :6].softmax(0).cpu().double().numpy() * draws
    # The 99.99 % quantile of a chi-square distribution with 5 degrees of freedom.
    assert ((counts - expected) ** 2 / expected).sum() < 25.7
