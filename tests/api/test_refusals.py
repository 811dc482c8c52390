"""Bad input raises a typed error with a stable code, what was seen and what to do, and the engine keeps running."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

from birkhoff.errors import (
    BirkhoffError,
    CapacityError,
    OptionError,
    PromptError,
    TextUnavailable,
    TokenError,
)
from tests.api.conftest import CONTEXT, open_engine

PROMPTS = [
    ("", PromptError, "empty. Pass some text"),
    ([], PromptError, "empty. Pass a text"),
    ([[]], PromptError, "token ids is empty. Pass at least one"),
    (["a", ""], PromptError, "empty. Pass some text"),
    (b"abc", PromptError, r"^bytes was given .*\(decode bytes first\)"),
    (bytearray(b"abc"), PromptError, "bytearray was given"),
    (memoryview(b"abc"), PromptError, "memoryview was given"),
    ([b"abc"], PromptError, "bytes was given"),
    (["a", b"abc"], PromptError, "bytes was given"),
    ("a\ud800b", PromptError, r"character 1 .* lone surrogate U\+D800.* Repair"),
    (["ok", "\udfff"], PromptError, r"lone surrogate U\+DFFF"),
    (None, PromptError, "NoneType was given"),
    (5, PromptError, "^int was given"),
    (2.5, PromptError, "^float was given"),
    ({"role": "user"}, PromptError, "^dict was given"),
    ({1, 2}, PromptError, "^set was given"),
    (object(), PromptError, "^object was given"),
    (["a", 5], PromptError, "^int was given"),
    (torch.tensor(5), PromptError, "array of 0 axes"),
    (torch.zeros(1, 1, 2, dtype=torch.long), PromptError, "array of 3 axes"),
    (np.zeros((1, 1, 2), int), PromptError, "array of 3 axes"),
    ([5, 512], TokenError, r"token_ids\[1\] is 512, this model has ids 0\.\.511.* another model's tokenizer"),
    ([-1], TokenError, r"token_ids\[0\] is -1"),
    ([10**30], TokenError, r"token_ids\[0\] is 1000"),
    ([5, True], TokenError, r"token_ids\[1\] is True, expected a whole number from 0 to 511"),
    ([5.0], TokenError, r"token_ids\[0\] is 5.0"),
    ([math.nan], TokenError, r"token_ids\[0\] is nan"),
    ([None], TokenError, r"token_ids\[0\] is None"),
    ([5, "a"], TokenError, r"token_ids\[1\] is 'a'.* Text goes in as one string"),
    ([["a", "b"]], TokenError, r"token_ids\[0\] is 'a'"),
    (torch.tensor([1.5]), TokenError, r"token_ids\[0\] is 1.5"),
    (torch.tensor([True]), TokenError, r"token_ids\[0\] is True"),
    (np.array([1.5]), TokenError, "1.5"),
    (
        [5] * CONTEXT,
        PromptError,
        f"prompt has {CONTEXT} tokens, the context holds {CONTEXT} .* Shorten the prompt",
    ),
    ("a" * CONTEXT, PromptError, f"prompt has {CONTEXT + 1} tokens"),
    ([5] * 5000, PromptError, "5000 tokens, the model's limit is 4096. Shorten"),
]


@pytest.mark.parametrize(
    "prompt, kind, says", PROMPTS, ids=[re.sub(" at 0x.*", "", repr(p))[:24] for p, _, _ in PROMPTS]
)
def test_prompts(idle, prompt, kind, says):
    for call in (idle.generate, idle.stream):
        if (
            call == idle.stream
            and isinstance(prompt, list)
            and (not prompt or isinstance(prompt[0], (str, list, bytes)))
        ):
            continue  # a stream refuses lists of prompts before it checks their items
        with pytest.raises(kind, match=says) as caught:
            call(prompt)
        assert (
            caught.value.code in ("prompt-invalid", "token-invalid", "context-length")
            and len(str(caught.value)) < 400
        )


ODD_IDS = [
    "",
    b"abc",
    5,
    None,
    [],
    [512],
    [True],
    [1.5],
    [[1, 512]],
    ["a", ""],
    [[]],
    torch.zeros(2, 2, 2).long(),
]


@pytest.mark.parametrize("ids", ODD_IDS, ids=str)
def test_token_ids_of_logits_and_trace(idle, ids):
    for call in (idle.logits, idle.trace):
        with pytest.raises((PromptError, TokenError)):
            call(ids)


OPTIONS = [
    {"temperature": -1},
    {"temperature": math.nan},
    {"temperature": "hot"},
    {"top_p": 0},
    {"top_p": 1.5},
    {"top_k": -2},
    {"min_p": 2},
    {"seed": 1.5},
    {"stop": 5},
    {"stop": [""]},
    {"stop_token_ids": 5},
    {"min_tokens": -1},
    {"min_tokens": 9, "max_tokens": 8},
    {"ignore_eos": 1},
    {"logprobs": 21},
    {"presence_penalty": 3},
    {"frequency_penalty": math.inf},
    {"repetition_penalty": 0},
    {"logit_bias": [1]},
    {"logit_bias": {1: 1000}},
    {"n": 0},
    {"n": 10**9},
    {"max_tokens": 0},
    {"max_tokens": -5},
    {"max_tokens": True},
    {"max_tokens": 10**12},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_sampling_values(idle, options):
    chat = [{"role": "user", "content": "hi"}]
    for call in (
        lambda: idle.generate("a", **options),
        lambda: idle.stream("a", **options),
        lambda: idle.chat(chat, **options),
    ):
        with pytest.raises(OptionError, match=r"expected|give it once") as caught:
            call()
        assert caught.value.code == "option-invalid" and next(iter(options)) in str(caught.value)


def test_token_ids_in_options_outside_the_vocabulary(idle):
    for options in ({"stop_token_ids": [512]}, {"logit_bias": {512: 1}}):
        with pytest.raises(TokenError, match="there is no token 512, expected 0 to 511"):
            idle.generate("a", **options)


def test_unknown_keywords_name_the_nearest_known_one(idle):
    chat = [{"role": "user", "content": "hi"}]
    for call in (
        lambda: idle.generate("a", max_token=5),
        lambda: idle.stream("a", max_token=5),
        lambda: idle.chat(chat, max_token=5),
    ):
        with pytest.raises(
            OptionError, match=r"'max_token' is not a sampling option.* Did you mean 'max_tokens'\?"
        ):
            call()


def test_max_tokens_beyond_the_context(idle):
    with pytest.raises(
        PromptError, match=rf"the prompt has 5 tokens and max_tokens is {CONTEXT}: together {CONTEXT + 5}"
    ):
        idle.generate([5] * 5, max_tokens=CONTEXT)
    assert (
        len(idle.generate([5] * 5, max_tokens=CONTEXT - 5, temperature=0, logit_bias={1: 100}).token_ids) == 1
    )


def test_one_bad_prompt_refuses_the_whole_call(idle):
    with pytest.raises(TokenError):
        idle.generate([[5, 6], [5, 999]], max_tokens=3)
    with pytest.raises(PromptError, match="together"):
        idle.generate([[5, 6], [5] * 590], max_tokens=20)
    assert idle._core.scheduler.idle


def test_a_request_larger_than_the_cache_is_refused(checkpoint):
    """Pages for four requests of one page each; one request may use them all, but no more."""
    config = open_engine(checkpoint).config
    from birkhoff.model.cache_size import page_bytes, slot_bytes

    room = 4 * (slot_bytes(config, 4) + page_bytes(config, 4))
    with open_engine(checkpoint, cache_bytes=room, prefix_cache=False, speculative=False) as small:
        with pytest.raises(
            CapacityError, match=r"needs .* KiB of cache \(5 pages\), .* KiB can ever be free \(4 pages\)"
        ) as caught:
            small.generate([5] * 520, max_tokens=5)
        assert caught.value.code == "engine-full"
        assert len(small.generate([5] * 500, max_tokens=5, ignore_eos=True).token_ids) == 5
        assert (
            len(small.generate([[5] * 300] * 6, max_tokens=3, ignore_eos=True)) == 6
        )  # these run one after another


def test_a_checkpoint_without_a_tokenizer_accepts_ids_and_refuses_text(wordless, idle):
    with open_engine(wordless) as silent:
        out = silent.generate([5, 80, 200], temperature=0, max_tokens=6)
        assert (
            out.token_ids == idle.generate([5, 80, 200], temperature=0, max_tokens=6).token_ids
            and out.text == ""
        )
        assert [e.text for e in silent.stream([5], max_tokens=3, ignore_eos=True)] == [""] * 3
        chat = [{"role": "user", "content": "hi"}]
        for call in (
            lambda: silent.generate("hi"),
            lambda: silent.stream("hi"),
            lambda: silent.chat(chat),
            lambda: silent.encode_chat(chat),
            lambda: silent.tokenizer,
            lambda: silent.generate([5], stop="x"),
        ):
            with pytest.raises(
                TextUnavailable, match=r"no tokenizer\.json.*Pass token ids, or put"
            ) as caught:
                call()
            assert caught.value.code == "text-unavailable"
        assert silent.generate([5, 80, 200], max_tokens=2).finish_reason in ("length", "stop")


def test_every_refusal_is_a_birkhoff_error(idle):
    """Every refusal derives from `BirkhoffError`, so one except clause is enough."""
    for call in (
        lambda: idle.generate(None),
        lambda: idle.generate("a", n=0),
        lambda: idle.logits([600]),
        lambda: idle.trace([5], hooks="x"),
        lambda: idle.chat([{"role": "nobody", "content": "x"}]),
        lambda: idle.chat("hello"),
        lambda: idle.chat([]),
    ):
        with pytest.raises(BirkhoffError):
            call()
