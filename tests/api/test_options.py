"""`EngineOptions` and `SamplingParams`: one source of keywords, signatures, help texts and documentation."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest
import torch

import birkhoff
from birkhoff import Engine, EngineOptions, SamplingParams
from birkhoff.api.options import EngineKwargs, describe
from birkhoff.api.options_docs import document
from birkhoff.cli.options import ENGINE, SAMPLING
from birkhoff.engine.sampling_params import SamplingKwargs
from birkhoff.errors import OptionError

ROOT = Path(__file__).parent.parent.parent


def names(options: type) -> list[str]:
    return [each.name for each in fields(options)]


@pytest.mark.parametrize(
    ("options", "keywords"), [(EngineOptions, EngineKwargs), (SamplingParams, SamplingKwargs)]
)
def test_keywords_are_the_fields_and_every_field_is_described(options, keywords):
    assert list(keywords.__annotations__) == names(options)
    for name in names(options):
        text, default = describe(options, name)
        assert text.endswith(".") and text[0].isalpha() and default


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (birkhoff.load, EngineOptions),
        (Engine.generate, SamplingParams),
        (Engine.chat, SamplingParams),
        (Engine.stream, SamplingParams),
        (Engine.astream, SamplingParams),
    ],
)
def test_signatures_show_every_keyword_with_its_default(function, options):
    parameters = inspect.signature(function).parameters
    assert {name: parameters[name].default for name in names(options)} == {
        each.name: each.default for each in fields(options)
    }
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def test_command_line_flags_have_the_same_help_and_defaults():
    for flags, options in ((ENGINE[1:], EngineOptions), (SAMPLING, SamplingParams)):
        for flag in flags:
            text, default = describe(options, flag.name)
            assert flag.help.startswith(text) and flag.default == default


def test_options_are_frozen_values():
    options = EngineOptions(device=torch.device("cpu"), max_requests=2)
    assert options.device == "cpu" and hash(options) == hash(replace(options))
    assert options == EngineOptions(device="cpu", max_requests=2) != EngineOptions()
    assert EngineOptions(dtype=torch.bfloat16) == EngineOptions(dtype="bfloat16")
    with pytest.raises(FrozenInstanceError):
        options.device = "cuda"
    with pytest.raises(OptionError, match="dtype is 'int8', expected one of"):
        EngineOptions(dtype="int8")


def test_keywords_override_options():
    base = EngineOptions(max_requests=2, cache_bytes=2**24)
    assert EngineOptions.from_kwargs(base, max_requests=3) == EngineOptions(max_requests=3, cache_bytes=2**24)
    with pytest.raises(OptionError, match=r"options is 5, expected a birkhoff\.EngineOptions"):
        EngineOptions.from_kwargs(5)
    with pytest.raises(TypeError, match=r"keyword argument 'cache_byte'\. Did you mean 'cache_bytes'\?"):
        EngineOptions.from_kwargs(base, cache_byte=1)
    params = SamplingParams(temperature=0, stop=["x"], logit_bias={3: 1})
    assert SamplingParams.from_kwargs(params, temperature=None) == params
    assert SamplingParams.from_kwargs(params, temperature=1) == replace(params, temperature=1.0)
    with pytest.raises(OptionError, match=r"params is 5, expected a birkhoff\.SamplingParams"):
        SamplingParams.from_kwargs(5)


def test_loading_and_generating_with_objects(checkpoint):
    options = EngineOptions(device="cpu", max_requests=2, max_context=600, cache_bytes=2**24)
    greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with birkhoff.load(checkpoint, options=options, max_requests=1) as engine:
        assert engine.max_requests == 1 and engine.max_context == 600
        short = engine.generate([5, 80], params=greedy)
        long = engine.generate([5, 80], params=greedy, max_tokens=5)
        assert (
            len(short.token_ids) == 3 and long.token_ids[:3] == short.token_ids and len(long.token_ids) == 5
        )
        assert [event.token_id for event in engine.stream([5, 80], params=greedy)] == short.token_ids
        with pytest.raises(OptionError, match=r"'temprature' is not a sampling option.*Did you mean"):
            engine.generate([5, 80], temprature=0)


def test_the_page_is_current():
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert page == document(), "write it again: python -m birkhoff.api.options_docs > docs/options.md"


def test_the_module_prints_the_page_without_pytorch():
    code = (
        "import runpy, sys; runpy.run_module('birkhoff.api.options_docs', run_name='__main__'); "
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, encoding="utf-8"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, document(), "")
