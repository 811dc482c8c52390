import gc
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch.utils._python_dispatch import TorchDispatchMode

from birkhoff.engine.request import Request, TokenLogprob
from birkhoff.engine.sampler import Sampled, Sampler, SamplingState, sample, seed_for
from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.errors import LogitsError, TokenError
from tests.sizes import scaled

LOGITS = [2.0, 1.5, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.0, -2.0, -3.0, -4.0]
PROMPT, OUTPUT, EOS = [1, 3, 3, 7], [0, 0, 4], [5]
DRAWS = scaled(60_000, 12_000)


def exact(options, logits=LOGITS, prompt=PROMPT, output=OUTPUT, step=None):
    """The distribution by definition: plain loops over a short vocabulary, in the documented order."""
    x = list(map(float, logits))
    for token in {*prompt, *output}:
        r = options.repetition_penalty
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in set(output):
        x[token] -= options.presence_penalty + options.frequency_penalty * output.count(token)
    for token, bias in options.logit_bias:
        x[token] += bias
    if (len(output) if step is None else step) < options.min_tokens:
        for token in {*EOS, *options.stop_token_ids}:
            x[token] = -math.inf
    x = [value / options.temperature for value in x]
    kept = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if options.top_k:
        kept = [i for i in kept if x[i] >= x[kept[min(options.top_k, len(kept)) - 1]]]
    weight = {i: math.exp(x[i] - max(x)) for i in kept}
    nucleus, reached = [], 0.0
    for i in kept:
        if reached < options.top_p * sum(weight.values()) * (1 - 1e-9):
            nucleus.append(i)
        reached += weight[i]
    nucleus = [i for i in nucleus if weight[i] >= options.min_p * max(weight.values())]
    total = sum(weight[i] for i in nucleus)
    return np.array([weight[i] / total if i in nucleus else 0.0 for i in range(len(x))])


def counts(options, draws=DRAWS, logits=LOGITS):
    """How often each token is drawn, over many seeds and steps."""
    rows = []
    for seed in range(min(draws, 1000)):
        row = SamplingState(options, len(logits), seed=seed, prompt_ids=PROMPT, eos_ids=EOS)
        for token in OUTPUT:
            row.accept(token)
        rows.append(row)
    batch = torch.tensor(logits).expand(len(rows), -1)
    seen = np.zeros(len(logits))
    for _ in range(draws // len(rows)):
        for drawn in sample(batch, rows):
            seen[drawn.token] += 1
        for row in rows:
            row.step += 1
    return seen


def fit(seen, probabilities):
    """p-value of the counts under the distribution; 0 when a token of probability zero was drawn."""
    possible = probabilities > 0
    if seen[~possible].sum():
        return 0.0
    return (
        chisquare(seen[possible], probabilities[possible] * seen.sum()).pvalue if possible.sum() > 1 else 1.0
    )


def options(**keywords):
    return SamplingParams(seed=0, **keywords)


CASES = {
    "plain": options(),
    "cold": options(temperature=0.6),
    "hot": options(temperature=1.7),
    "top_k": options(top_k=5),
    "top_k_tie": options(top_k=2),
    "top_p": options(top_p=0.8),
    "min_p": options(min_p=0.2),
    "repetition": options(repetition_penalty=1.5),
    "presence": options(presence_penalty=1.2),
    "frequency": options(frequency_penalty=0.7),
    "bias": options(logit_bias={10: 5.0, 0: -100.0}),
    "min_tokens": options(min_tokens=10_000, max_tokens=10_000, stop_token_ids=[6]),
    "all": options(
        temperature=0.8,
        top_k=9,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        logit_bias={9: 3.5},
        min_tokens=10_000,
        max_tokens=10_000,
        stop_token_ids=[6],
    ),
}

# The same settings with a subtle error each. The check must distinguish every one from the correct settings.
WRONG = {
    "plain": options(temperature=1.1),
    "cold": options(temperature=0.65),
    "hot": options(),
    "top_k": options(top_k=6),
    "top_k_tie": options(top_k=1),
    "top_p": options(top_p=0.9),
    "min_p": options(min_p=0.1),
    "repetition": options(repetition_penalty=1 / 1.5),
    "presence": options(frequency_penalty=1.2),
    "frequency": options(presence_penalty=0.7),
    "bias": options(logit_bias={10: 4.7, 0: -100.0}),
    "min_tokens": options(stop_token_ids=[6]),
    "all": options(
        temperature=0.8,
        top_k=9,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.3,
        presence_penalty=0.2,
        frequency_penalty=0.7,
        logit_bias={9: 3.5},
        min_tokens=10_000,
        max_tokens=10_000,
        stop_token_ids=[6],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_exact_distribution(case):
    seen = counts(CASES[case])
    assert fit(seen, exact(CASES[case])) > 1e-3, seen
    assert fit(seen, exact(WRONG[case])) < 1e-6


def test_bias_is_added_after_the_penalties():
    """The penalty turns -1 into -2 and the bias adds 4; in the other order -1 + 4 = 3 is halved."""
    both = options(repetition_penalty=2.0, logit_bias={7: 4.0})
    seen = counts(both)
    biased_first = [value + (4.0 if i == 7 else 0.0) for i, value in enumerate(LOGITS)]
    assert fit(seen, exact(both)) > 1e-3
    assert fit(seen, exact(options(repetition_penalty=2.0), logits=biased_first)) < 1e-6


def test_top_p_applies_after_top_k():
    """Each truncation applies to the renormalised result of the previous one, so `top_p` keeps fewer tokens."""
    both = options(top_k=3, top_p=0.6)
    assert np.count_nonzero(exact(both)) == 2 and np.count_nonzero(exact(options(top_p=0.6))) == 3
    assert fit(counts(both), exact(both)) > 1e-3


@pytest.mark.parametrize(
    ("shares", "top_p", "kept"), [(10, 0.3, 3), (10, 0.31, 4), (4, 0.5, 2), (3, 0.999999, 3), (7, 1e-9, 1)]
)
def test_top_p_breaks_ties_by_token_id(shares, top_p, kept):
    seen = counts(options(top_p=top_p), draws=3000, logits=[0.0] * shares + [-50.0] * (12 - shares))
    assert np.flatnonzero(seen).tolist() == list(range(kept))  # lower ids first on a tie


def test_noise_is_uniform_and_independent_across_steps_and_seeds():
    width, draws = 16, scaled(80_000, 20_000)
    flat = torch.zeros(1000, width)
    rows = [SamplingState(options(), width, seed=seed) for seed in range(1000)]
    tokens = []
    for step in range(draws // 1000):
        for row in rows:
            row.step = step
        tokens.append([drawn.token for drawn in sample(flat, rows)])
    table = np.array(tokens)  # [step, seed]
    even = np.full(width, table.size / width)
    assert chisquare(np.bincount(table.ravel(), minlength=width), even).pvalue > 1e-3
    for first, second in ((table[:-1], table[1:]), (table[:, :-1], table[:, 1:])):  # next step; next seed
        pairs = np.bincount((first * width + second).ravel(), minlength=width**2)
        assert chisquare(pairs, np.full(width**2, first.size / width**2)).pvalue > 1e-3


def make_row(kind, seed, vocab, step):
    made = SamplingState(kind, vocab, seed=seed, prompt_ids=[1, 2, 3], eos_ids=[0])
    for token in range(step):
        made.accept(token % vocab)
    return made


KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9, logprobs=3),
    SamplingParams(top_k=5, min_p=0.01, temperature=1.3),
    SamplingParams(top_k=40, top_p=0.5),
    SamplingParams(temperature=0, repetition_penalty=1.2, logprobs=0),
    SamplingParams(presence_penalty=0.5, frequency_penalty=0.5, logit_bias={3: 2.0}, min_tokens=4),
]


@given(data=st.data())
def test_draws_are_bit_identical_in_any_batch(data):
    vocab, count = 1031, data.draw(st.integers(2, 9))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    logits = torch.randn(count, vocab, generator=generator) * 3
    logits[data.draw(st.integers(0, count - 1))] *= data.draw(st.sampled_from([1.0, math.nan]))
    chosen = [
        (
            data.draw(st.sampled_from(KINDS)),
            data.draw(st.integers(0, 2**64 - 1)),
            data.draw(st.integers(0, 6)),
        )
        for _ in range(count)
    ]
    together = sample(logits, [make_row(kind, seed, vocab, step) for kind, seed, step in chosen])
    order = data.draw(st.permutations(range(count)))
    shuffled = sample(logits[order], [make_row(*chosen[i][:2], vocab, chosen[i][2]) for i in order])
    for i, (kind, seed, step) in enumerate(chosen):
        (alone,) = sample(logits[i : i + 1], [make_row(kind, seed, vocab, step)])
        for other in (together[i], shuffled[order.index(i)]):
            assert str(other) == str(alone) if isinstance(alone, LogitsError) else other == alone


def test_a_seed_repeats_and_another_differs():
    logits = torch.zeros(1, 4096)

    def run(seed):
        row = SamplingState(SamplingParams(), 4096, seed=seed)
        tokens = []
        for _ in range(20):
            (drawn,) = sample(logits, [row])
            tokens.append(drawn.token)
            row.accept(drawn.token)
        return tokens

    assert run(5) == run(5) and len({tuple(run(seed)) for seed in range(20)}) == 20
    assert len(set(run(5))) > 15  # successive steps differ


def test_a_step_can_be_drawn_again_and_out_of_order():
    logits, row = torch.zeros(1, 4096), SamplingState(SamplingParams(), 4096, seed=1)
    forward = []
    for row.step in range(8):
        forward.append(sample(logits, [row])[0].token)
    backward = []
    for row.step in reversed(range(8)):
        backward.append(sample(logits, [row])[0].token)
    assert forward == backward[::-1]


def race_by_hand(seed, step, logits):
    """The documented draw in plain integers and loops."""

    def mix64(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    def mix32(x):
        x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
        x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
        return x ^ (x >> 16)

    key = mix64((mix64(seed) + (step + 1) * 0x9E3779B97F4A7C15) % 2**64)
    scores = []
    for token, logit in enumerate(logits):
        noise = mix32(mix32(token ^ key % 2**32) ^ key >> 32)
        scores.append(
            math.exp(logit - max(logits)) / -math.log((noise - 2**32 * (noise >> 31) + 2**31 + 0.5) / 2**32)
        )
    return max(range(len(scores)), key=scores.__getitem__)


def test_draws_equal_the_documented_algorithm_and_recorded_values():
    """Changing the recorded numbers would change the output of every seed."""
    seeds = (0, 1, 2**64 - 1, 123456789)
    rows = [SamplingState(SamplingParams(), 1000, seed=seed) for seed in seeds]
    logits = torch.arange(1000).float().remainder(7).expand(len(seeds), -1)
    for step in range(10):
        for row in rows:
            row.step = step
        tokens = [drawn.token for drawn in sample(logits, rows)]
        assert tokens == [race_by_hand(seed, step, logits[0].tolist()) for seed in seeds]
    assert tokens == RECORDED


RECORDED = [391, 468, 19, 40]


def test_greedy_takes_the_largest_logit_and_the_lowest_id_on_a_tie():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    for kind in (
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, logprobs=1),
        SamplingParams(top_k=1),
    ):
        assert [drawn.token for drawn in sample(logits, [SamplingState(kind, 4, seed=0)] * 2)] == [1, 0]


@given(seed=st.integers(0, 10**6), temperature=st.sampled_from([0, 0.3, 2.0]), count=st.integers(0, 20))
def test_log_probabilities_are_the_models_own(seed, temperature, count):
    logits = torch.randn(1, 257, generator=torch.Generator().manual_seed(seed)) * 8
    kind = SamplingParams(
        temperature=temperature,
        logprobs=count,
        top_k=30,
        repetition_penalty=1.5,
        logit_bias={3: 5.0},
        seed=seed,
    )
    (drawn,) = sample(logits, [SamplingState(kind, 257, seed=seed, prompt_ids=[1, 2])])
    x = logits[0].numpy().astype(np.float64)
    expected = x - x.max() - np.log(np.exp(x - x.max()).sum())
    assert drawn.logprob.logprob == pytest.approx(expected[drawn.token], abs=1e-12)
    best = np.argsort(-expected, kind="stable")[:count]
    assert [token for token, _ in drawn.logprob.top] == best.tolist()
    assert [value for _, value in drawn.logprob.top] == pytest.approx(expected[best].tolist(), abs=1e-12)


def test_tied_alternatives_are_in_id_order():
    (drawn,) = sample(torch.zeros(1, 50), [SamplingState(SamplingParams(logprobs=4), 50, seed=3)])
    assert [token for token, _ in drawn.logprob.top] == [0, 1, 2, 3]


def test_processed_logits_equal_the_definition():
    kind = SamplingParams(
        repetition_penalty=1.7, presence_penalty=0.3, frequency_penalty=-0.2, logit_bias={2: 1.5}
    )
    row = SamplingState(kind, 6, seed=0, prompt_ids=[0, 1])
    for token in (2, 2, 5):
        row.accept(token)
    x = torch.tensor([1.0, -1.0, 2.0, 3.0, -3.0, 0.0])
    expected = [1.0 / 1.7, -1.7, 2.0 / 1.7 + 0.4 - 0.3 + 1.5, 3.0, -3.0, 0.2 - 0.3]
    assert row.reshape(x).tolist() == pytest.approx(expected)
    assert x.tolist() == [1.0, -1.0, 2.0, 3.0, -3.0, 0.0]  # the caller's logits are not modified


def test_min_tokens_bans_stop_tokens():
    kind = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[3])
    row = SamplingState(kind, 5, seed=0, eos_ids=[4])
    logits = torch.tensor([[0.0, 1.0, 2.0, 8.0, 9.0]])
    tokens = []
    for _ in range(3):
        (drawn,) = sample(logits, [row])
        tokens.append(drawn.token)
        row.accept(drawn.token)
    assert tokens == [2, 2, 4]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("bad", "message"),
    [(math.nan, "NaN"), (math.inf, "infinite"), (-math.inf, "no token above minus infinity")],
)
def test_a_bad_row_fails_only_its_request(kind, bad, message):
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    rows = [make_row(kind, seed, 64, 5) for seed in range(3)]
    good = sample(logits, rows)
    broken = logits.clone()
    broken[1, 7 if bad > 0 or math.isnan(bad) else slice(None)] = bad
    result = sample(broken, rows)
    assert [result[0], result[2]] == [good[0], good[2]]
    assert isinstance(result[1], LogitsError) and message in str(result[1])


def test_tokens_at_minus_infinity_are_never_drawn():
    logits = torch.zeros(200, 4)
    logits[:, 1:] = -math.inf
    rows = [SamplingState(KINDS[i % 2], 4, seed=i) for i in range(200)]
    assert {drawn.token for drawn in sample(logits, rows)} == {0}


def test_extreme_temperatures_give_finite_results():
    logits = torch.tensor([[1e4, -1e4, 9.99e3, 0.0]]).expand(100, -1)
    for temperature, expected in ((1e-12, {0}), (1e-3, {0}), (100.0, {0})):
        rows = [SamplingState(SamplingParams(temperature=temperature), 4, seed=i) for i in range(100)]
        tokens = {drawn.token for drawn in sample(logits, rows)}
        assert expected <= tokens <= {0, 2}


def test_ids_of_options_are_checked_against_the_model():
    with pytest.raises(TokenError, match="stop_token_ids: there is no token 64"):
        SamplingState(SamplingParams(stop_token_ids=[64]), 64, seed=0)


def test_choices_of_one_request_have_different_seeds():
    fixed = SamplingParams(seed=-1)
    assert seed_for(fixed) == 2**64 - 1 and len({seed_for(fixed, choice) for choice in range(64)}) == 64
    assert seed_for(fixed, 3) == seed_for(fixed, 3)
    assert seed_for(SamplingParams()) != seed_for(SamplingParams())  # fresh entropy each time


def request(kind, seed=1, prompt=(1, 2)):
    return Request(prompt_ids=prompt, params=kind, max_tokens=100, seed=seed, eos_ids=frozenset({0}))


def test_sampling_does_not_change_the_request():
    kind = SamplingParams(temperature=0, frequency_penalty=2.0, logprobs=1)
    sampled, sampler = request(kind), Sampler()
    logits = torch.tensor([0.0, 5.0, 4.0, 3.0])
    tokens = []
    for _ in range(4):
        ((token, logprob),) = sampler.sample([(sampled, logits)])
        assert sampler.sample([(sampled, logits)]) == [(token, logprob)]  # drawing again gives the same token
        assert isinstance(logprob, TokenLogprob) and logprob.token_id == token and len(logprob.top) == 1
        sampled.output_ids.append(token)
        tokens.append(token)
    assert tokens == [1, 2, 1, 3]
    del sampled.output_ids[2:]  # tokens removed, as after a rejected draft
    assert sampler.sample([(sampled, logits)])[0][0] == 1


def test_each_request_gets_its_own_token_or_error():
    logits = torch.randn(64, generator=torch.Generator().manual_seed(2))
    requests = [request(SamplingParams(), seed) for seed in range(5)]
    sampler = Sampler()
    alone = [sampler.sample([(one, logits)])[0] for one in requests]
    rows = [logits, logits, torch.full_like(logits, math.nan), logits, logits]
    together = sampler.sample(list(zip(requests, rows)))
    assert [together[i] for i in (0, 1, 3, 4)] == [alone[i] for i in (0, 1, 3, 4)]
    assert isinstance(together[2], LogitsError) and sampler.sample([]) == []


def test_state_of_finished_requests_is_dropped():
    sampler = Sampler()
    sampled = request(SamplingParams())
    sampler.sample([(sampled, torch.zeros(8))])
    assert len(sampler._states) == 1
    del sampled
    gc.collect()
    assert len(sampler._states) == 0


def test_greedy_sampling_takes_a_maximum_and_nothing_else():
    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            seen.append(str(operator))
            return operator(*args, **(kwargs or {}))

    seen: list[str] = []
    logits, rows = torch.randn(1, 4096), [SamplingState(SamplingParams(temperature=0), 4096, seed=0)]
    with Operators():
        sample(logits, rows)
    assert seen == ["aten.max.dim"]


@pytest.mark.gpu
def test_a_gpu_draws_the_same_tokens():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    logits = torch.randn(14, 5003, generator=torch.Generator().manual_seed(4)) * 2
    here = [SamplingState(kind, 5003, seed=i, prompt_ids=[1]) for i, kind in enumerate(KINDS * 2)]
    there = [
        SamplingState(kind, 5003, seed=i, prompt_ids=[1], device="cuda") for i, kind in enumerate(KINDS * 2)
    ]
    for step in range(50):
        for row in (*here, *there):
            row.step = step
        a, b = sample(logits, here), sample(logits.cuda(), there)
        assert [drawn.token for drawn in a] == [drawn.token for drawn in b]
        assert [isinstance(drawn, Sampled) for drawn in a] == [True] * 14
