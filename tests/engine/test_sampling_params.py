import math
from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.errors import OptionError, TokenError

KEYWORDS = [
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "logprobs",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "n",
    "context",
]


def test_fields_equal_the_public_keywords():
    assert [field.name for field in fields(SamplingParams)] == KEYWORDS


def test_defaults_equal_those_of_the_release():
    options = SamplingParams()
    assert (options.temperature, options.top_p, options.top_k, options.min_p) == (1.0, 1.0, 0, 0.0)
    assert not options.greedy and not options.reshapes_logits and options.max_tokens == 512


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("max_tokens", [1, 2**31 - 1, np.int64(7)]),
        ("temperature", [0, 0.0, 1, 100.0, np.float32(0.5)]),
        ("top_p", [1, 1.0, 1e-9]),
        ("top_k", [-1, 0, 1, 10**6]),
        ("min_p", [0, 1, 0.5]),
        ("seed", [None, 0, -(2**63), 2**64 - 1]),
        ("stop", ["x", ["a", "b"], (), []]),
        ("stop_token_ids", [[], [0, 5], (7,), {1, 2}]),
        ("logprobs", [None, 0, 20]),
        ("presence_penalty", [-2, 2.0]),
        ("frequency_penalty", [-2, 2.0]),
        ("repetition_penalty", [0.01, 1, 100]),
        ("logit_bias", [{}, {1: 2, "3": -100.0}]),
        ("n", [1, 64]),
    ],
)
def test_allowed_values(name, good):
    for value in good:
        SamplingParams.from_kwargs(**{name: value})


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("max_tokens", [0, -1, 2**31, 1.0, "5", True, math.nan]),
        ("temperature", [-0.1, 100.1, math.nan, math.inf, -math.inf, "1", True, 10**400, 1j, [1]]),
        ("top_p", [0, 0.0, -1, 1.01, math.nan, math.inf, "0.5", False]),
        ("top_k", [-2, 1.5, True, "1", 2**31]),
        ("min_p", [-0.1, 1.1, math.nan, True]),
        ("seed", [-(2**63) - 1, 2**64, 1.0, "1", True]),
        ("stop", [5, [5], [""], ["x" * 1025], ["x"] * 65, {"a": 1}, b"x", [None]]),
        ("stop_token_ids", [5, "5", [-1], [1.0], [True], [2**31], list(range(1025)), ["5"]]),
        ("min_tokens", [-1, 513, True, 1.0]),
        ("ignore_eos", [1, 0, "yes"]),
        ("logprobs", [-1, 21, True, 5.0, "5"]),
        ("presence_penalty", [-2.1, 2.1, math.nan, True]),
        ("frequency_penalty", [-2.1, 2.1, math.inf, "0"]),
        ("repetition_penalty", [0, -1, 1e-150, 0.009, 101, math.nan]),
        (
            "logit_bias",
            [
                5,
                [1],
                {"x": 1},
                {-1: 1},
                {1.5: 1},
                {True: 1},
                {"１": 1},
                {" 1": 1},
                {1: math.nan},
                {1: math.inf},
                {1: 101},
                {1: "2"},
                {1: True},
                dict.fromkeys(range(1025), 1.0),
                {1: 1, "1": 2},
                {"9" * 11: 1},
            ],
        ),
        ("n", [0, 65, True, 1.0]),
    ],
)
def test_a_refusal_names_the_field_value_and_range(name, bad):
    for value in bad:
        with pytest.raises(OptionError, match=name) as caught:
            SamplingParams.from_kwargs(**{name: value})
        message = str(caught.value)
        assert "expected" in message or "give it once" in message
        assert len(message) < 300


def test_an_unknown_keyword_is_refused_with_the_nearest_name():
    with pytest.raises(
        OptionError, match=r"'temprature' is not a sampling option.*Did you mean 'temperature'\?"
    ):
        SamplingParams.from_kwargs(temprature=1)
    with pytest.raises(OptionError, match="'zzz' is not a sampling option"):
        SamplingParams.from_kwargs(zzz=1)


def test_none_means_the_default():
    assert SamplingParams.from_kwargs(**dict.fromkeys(KEYWORDS)) == SamplingParams()


def test_options_are_frozen_hashable_and_copyable():
    options = SamplingParams(stop=["b", "a"], logit_bias={"7": 1, 2: -3}, stop_token_ids=[4])
    assert options.logit_bias == ((2, -3.0), (7, 1.0)) and options.stop == ("b", "a")
    assert replace(options, n=2).logit_bias == options.logit_bias and {options: 1}[replace(options)] == 1
    with pytest.raises(FrozenInstanceError):
        options.n = 3


def test_min_tokens_stays_below_max_tokens():
    assert SamplingParams(max_tokens=4, min_tokens=4).min_tokens == 4
    with pytest.raises(
        OptionError, match=r"min_tokens is 5, expected a whole number from 0 to 4 \(max_tokens\)"
    ):
        SamplingParams(max_tokens=4, min_tokens=5)


def test_ids_outside_the_vocabulary_are_refused_by_name():
    SamplingParams(stop_token_ids=[9], logit_bias={9: 1}).check_vocabulary(10)
    with pytest.raises(TokenError, match="stop_token_ids: there is no token 10, expected 0 to 9"):
        SamplingParams(stop_token_ids=[10]).check_vocabulary(10)
    with pytest.raises(TokenError, match="logit_bias: there is no token 10"):
        SamplingParams(logit_bias={10: 1}).check_vocabulary(10)


@given(
    st.dictionaries(
        st.sampled_from(KEYWORDS),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.floats(),
            st.text(max_size=3),
            st.lists(st.integers(), max_size=3),
            st.dictionaries(st.text(max_size=2), st.floats(), max_size=2),
        ),
        max_size=4,
    )
)
def test_any_value_is_accepted_or_raises_option_error(options):
    try:
        made = SamplingParams.from_kwargs(**options)
    except OptionError:
        return
    values = [made.temperature, made.top_p, made.min_p, made.presence_penalty, made.repetition_penalty]
    assert all(type(value) is float and math.isfinite(value) for value in values) and hash(made) is not None
