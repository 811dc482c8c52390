"""`load`: options, refusals, and checkpoints written by other tools."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

import birkhoff
from birkhoff.errors import (
    BirkhoffError,
    CapacityError,
    CheckpointError,
    ConfigError,
    OptionError,
    UnsupportedModel,
)
from birkhoff.kernels import jit
from tests.api.conftest import open_engine
from tests.models import TINY, random_model, random_tokens
from tests.oracle import build_oracle

IDS = [5, 80, 200, 7, 91]
PROMISED = {
    "backend": "auto",
    "device": "auto",
    "dtype": "auto",
    "numerics": "plain",
    "kernels": "auto",
    "experts": "auto",
    "max_requests": 8,
    "max_batch_tokens": 2048,
    "max_context": None,
    "cache_bytes": None,
    "batch_invariant": False,
    "prefix_cache": "auto",
    "speculative": "auto",
    "capture_root": None,
}


def test_options_and_defaults_are_the_documented_ones():
    parameters = inspect.signature(birkhoff.load).parameters
    assert next(iter(parameters)) == "model"
    options = {name: p.default for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert PROMISED.items() <= options.items() and set(options) - set(PROMISED) <= {
        "options",
        "progress",
        "context_root",
        "context_bytes",
        "gpu_memory",
        "weights",
        "expert_counts",
        "experts_on",
        "background_experts",
        "revision",
        "download",
        "capture_overload_policy",
        "capture_dispatch_queue_size",
        "capture_spill_dir",
        "capture_spill_max_bytes",
        "hooks",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "vllm",
    }


@pytest.mark.parametrize(
    "options, says",
    [
        ({"device": "tpu"}, "device is 'tpu', expected 'auto', 'cpu' or 'cuda'"),
        ({"device": "meta"}, "device is 'meta', expected"),
        ({"device": None}, "device is None, expected"),
        ({"device": 0}, "device is 0, expected"),
        ({"dtype": "float16"}, "dtype is 'float16', expected one of 'auto', 'float32', 'bfloat16'"),
        ({"dtype": torch.float16}, "dtype is 'float16', expected one of"),
        ({"numerics": "exact"}, "numerics is 'exact', expected one of 'plain', 'released'"),
        ({"kernels": "cuda"}, "kernels is 'cuda', expected one of 'auto', 'reference', 'triton'"),
        ({"kernels": ["auto"]}, "kernels is"),
        ({"max_requests": 0}, "max_requests is 0, expected a positive whole number"),
        ({"max_requests": True}, "max_requests is True, expected"),
        ({"max_requests": 2.0}, "max_requests is 2.0"),
        ({"max_batch_tokens": "many"}, "max_batch_tokens is 'many'"),
        ({"max_batch_tokens": 4}, r"max_batch_tokens is 4, expected more than max_requests \(4\)"),
        ({"max_context": 0}, "max_context is 0"),
        ({"max_context": 4097}, "max_context is 4097, the model's limit is 4096. Ask for that or less"),
        ({"max_context": 10**400}, "max_context is 1000"),
        ({"cache_bytes": -1}, "cache_bytes is -1"),
        ({"cache_bytes": 1.5e9}, "cache_bytes is 1500000000.0"),
        ({"batch_invariant": "no"}, "batch_invariant is 'no', expected True or False"),
        ({"batch_invariant": None}, "batch_invariant is None"),
    ],
    ids=str,
)
def test_impossible_values_are_refused_by_name(checkpoint, options, says):
    with pytest.raises(OptionError, match=says):
        open_engine(checkpoint, **options)


UNKNOWN = [
    {"prefix_cache": "yes"},
    {"prefix_cache": 3},
    {"speculative": "maybe"},
    {"experts": "moon"},
    {"experts": -5},
]


@pytest.mark.parametrize("options", UNKNOWN, ids=str)
def test_unknown_values_are_refused_by_name(checkpoint, options):
    with pytest.raises(OptionError, match=next(iter(options))):
        open_engine(checkpoint, **options)


def test_an_unknown_keyword_is_an_error(checkpoint):
    with pytest.raises(TypeError, match="max_request"):
        birkhoff.load(checkpoint, max_request=3)


def test_a_missing_cuda_device_is_refused(checkpoint):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(OptionError, match=r"sees no CUDA device here. Use device='cpu'"):
        open_engine(checkpoint, device="cuda")


def test_paths_without_a_checkpoint_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"is missing; expected .* Check the path"):
        birkhoff.load(tmp_path / "nowhere")
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises(CheckpointError, match="is a file; expected"):
        birkhoff.load(str(tmp_path / "file.txt"))
    for model in (None, 5, b"path", ["a"]):
        with pytest.raises(OptionError, match=r"model is .*, expected 'nano' or"):
            birkhoff.load(model)
    with pytest.raises((ConfigError, CheckpointError), match=r"config\.json"):
        birkhoff.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "rwkv"}')
    with pytest.raises(UnsupportedModel, match=r"rwkv.*no row in the table of families: llama, .*models\.md"):
        birkhoff.load(tmp_path)
    with pytest.raises(UnsupportedModel, match="rwkv"):
        birkhoff.load(tmp_path, backend="birkhoff")
    with pytest.raises(BirkhoffError):
        birkhoff.load(tmp_path / "model.gguf")


def test_resolved_options_are_printed(checkpoint, capsys):
    with open_engine(checkpoint, max_requests=3) as opened:
        printed = capsys.readouterr()
        match = re.search(r"3 requests of up to (\d+) tokens, cache_bytes (\d+)", printed.err)
        assert (
            match
            and int(match[1]) == opened.max_context == 600
            and int(match[2]) == 2**24
            and printed.out == ""
        )
    with birkhoff.load(
        checkpoint, max_requests=2
    ) as opened:  # defaults: a quarter of the free memory, the context limit of the model
        match = re.search(r"2 requests of up to (\d+) tokens, cache_bytes (\d+)", capsys.readouterr().err)
        assert match and int(match[1]) == opened.max_context == 4096 and int(match[2]) > 2**24


def test_little_memory_lowers_the_context_and_too_little_is_refused(checkpoint):
    with open_engine(checkpoint, max_context=None, cache_bytes=1_000_000) as small:
        assert 128 <= small.max_context < 4096 and small.max_context % 128 == 0
        full = small.generate([5] * (small.max_context - 2), max_tokens=2, ignore_eos=True)
        assert len(full.token_ids) == 2
    with pytest.raises(
        CapacityError, match=r"4 requests need at least .* KiB\. Raise cache_bytes or lower max_requests"
    ):
        open_engine(checkpoint, cache_bytes=1000)


def test_progress_is_reported(checkpoint):
    calls = []
    open_engine(checkpoint, progress=lambda done, total: calls.append((done, total))).close()
    assert calls and calls[-1][0] == calls[-1][1] and [d for d, _ in calls] == sorted(d for d, _ in calls)


def test_kernels_and_batch_invariance_do_not_change_outputs(checkpoint, engine):
    expected = engine.logits(IDS)
    tokens = engine.generate(IDS, temperature=0, max_tokens=10).token_ids
    with open_engine(checkpoint, kernels="reference") as plain:
        assert plain.model.numerics.kernels.name == "reference"
        assert (plain.logits(IDS) - expected).abs().max() < 1e-4
        assert plain.generate(IDS, temperature=0, max_tokens=10).token_ids == tokens
    with open_engine(checkpoint, batch_invariant=True) as fixed:
        assert fixed.generate(IDS, temperature=0, max_tokens=10).token_ids == tokens
        alone = fixed.generate(IDS, temperature=0, max_tokens=10, logprobs=2).logprobs
        batched = fixed.generate([IDS, [9] * 200, [7]], temperature=0, max_tokens=10, logprobs=2)[0].logprobs
        assert alone == batched
    assert engine.model.numerics.kernels.name == ("cpu" if jit.AVAILABLE else "reference")


def test_bfloat16_and_released_numerics_are_close_to_float32(checkpoint, engine):
    expected = engine.logits(IDS)
    for options in (
        {"dtype": "bfloat16"},
        {"numerics": "released"},
        {"dtype": "bfloat16", "numerics": "released"},
    ):
        with open_engine(checkpoint, **options) as other:
            logits = other.logits(IDS)
            assert (
                logits.dtype == torch.float32
                and len(other.generate(IDS, max_tokens=4, ignore_eos=True).token_ids) == 4
            )
            error = (logits - expected).square().mean().sqrt() / expected.square().mean().sqrt()
            print(f"{options}: {error:.1e} of the logits' size")
            assert 1e-6 < error < 0.5
            assert other.schema["mlp_out"].dtype == options.get("dtype", "float32")


@pytest.fixture(scope="module")
def written_by_transformers(tmp_path_factory):
    oracle = build_oracle(random_model(TINY, seed=11))
    path = tmp_path_factory.mktemp("saved")
    oracle.save_pretrained(path)
    return oracle, path


def test_a_checkpoint_written_by_transformers(written_by_transformers, capsys):
    oracle, path = written_by_transformers
    tokens = random_tokens(TINY, 200, 11)
    with birkhoff.load(path, max_requests=2, cache_bytes=2**24) as opened:
        with torch.no_grad():
            expected = oracle(tokens.unsqueeze(0), use_cache=False).logits[0]
        error = (opened.logits(tokens) - expected).abs().max().item()
        print(f"largest logit difference {error:.1e}")
        assert error <= 1e-4
        out = opened.generate(tokens.tolist(), temperature=0, max_tokens=5, ignore_eos=True)
        assert out.token_ids[0] == int(expected[-1].argmax()) and out.text == ""
    assert opened.config.compress_ratios == TINY.compress_ratios


def test_nano_loads_or_the_error_names_the_command():
    try:
        engine = birkhoff.load("nano", max_requests=1, cache_bytes=2**26)
    except CheckpointError as error:
        assert "birkhoff synth OUT --like nano" in str(error)
    else:
        with engine:
            assert engine.generate("Hello", max_tokens=3).prompt_token_ids
