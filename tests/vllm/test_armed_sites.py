"""Which sites are armed, and what is refused before vLLM starts."""

from __future__ import annotations

import pytest

import birkhoff
from birkhoff.errors import OptionError, SiteError, UnsupportedModel
from birkhoff.vllm.armed_sites import (
    ARCHITECTURES,
    ORDINARY,
    RESIDUALS,
    V4,
    V4_HOOKS,
    architecture_of,
    armed_schema,
    check_armed,
    parse_hooks,
)
from birkhoff.vllm.compatibility import check_version
from birkhoff.vllm.open_engine import VllmSettings
from tests.hf.models import make

LLAMA = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "num_hidden_layers": 4}
ALL = (0, 1, 2, 3)


@pytest.mark.parametrize(
    "value, armed",
    [
        (None, dict.fromkeys(RESIDUALS, ALL)),
        ("none", {}),
        ("", {}),
        ("post_mlp, mlp_out", {"post_mlp": ALL, "mlp_out": ALL}),
        ('{"post_mlp": [1, -1], "final_hidden": "all"}', {"post_mlp": (1, 3), "final_hidden": (3,)}),
        (["attn_out"], {"attn_out": ALL}),
        ({"pre_attn": {"ranges": [[1, 2]]}}, {"pre_attn": (1, 2)}),
    ],
)
def test_hooks_are_layers_by_name(value, armed):
    found = parse_hooks(value, "LlamaForCausalLM", 4)
    assert {name: tuple(sorted(layers)) for name, layers in found.items()} == armed


@pytest.mark.parametrize(
    "value, says",
    [
        ("post_mpl", "post_mlp"),
        ("attn_z", "cannot be armed on vLLM"),
        ("{broken", "not JSON"),
        (7, "expected names of hooks"),
        ({"mhc_streams_pre_attn": "all"}, "cannot be armed"),
    ],
)
def test_other_hooks_are_refused(value, says):
    with pytest.raises(OptionError, match=says):
        parse_hooks(value, "LlamaForCausalLM", 4)


def test_the_schema_is_of_the_armed_hooks_only():
    schema = armed_schema(LLAMA, "bfloat16", ["post_mlp", "final_hidden"])
    assert set(schema) == {"post_mlp", "final_hidden"} and schema["post_mlp"].width == 8
    v4 = {"architectures": [V4], "hidden_size": 8, "hc_mult": 4}
    schema = armed_schema(v4, "bfloat16", V4_HOOKS)
    assert set(schema) == set(V4_HOOKS) and schema["mhc_streams_final"].width == 32
    assert not schema["mhc_attn_res_mix"].steerable
    assert set(armed_schema(LLAMA, "float32", ORDINARY)) == set(ORDINARY)


def test_a_site_that_is_not_armed_is_named():
    check_armed([("post_mlp", 1)], {"post_mlp": (1,)})
    with pytest.raises(SiteError, match=r"post_mlp\[2\] is not armed.*\[1\]"):
        check_armed([("post_mlp", 2)], {"post_mlp": (1,)})


def test_architectures_and_versions():
    assert architecture_of(LLAMA) == "LlamaForCausalLM" and V4 not in ARCHITECTURES
    for names in ([], ["OPTForCausalLM"], None):
        with pytest.raises(UnsupportedModel, match="the architecture is"):
            architecture_of({"architectures": names})
    check_version("0.32.0")
    check_version("0.32.7+cpu")
    for version in ("0.31.9", "0.33.0", "1.32.0"):
        with pytest.raises(OptionError, match=r"known for 0\.32"):
            check_version(version)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama") / "model"
    make("llama", path)
    return path


@pytest.mark.parametrize(
    "options, says",
    [
        ({"hooks": "attn_z"}, "cannot be armed"),
        ({"vllm": {"worker_cls": "evil"}}, "worker_cls.*set by this backend"),
        ({"vllm": {"max_model_len": 5}}, "use the option max_context"),
        ({"numerics": "released"}, "numerics is 'released', an option of other backends"),
        ({"speculative": 2}, "speculative is 2"),
        ({"batch_invariant": True}, "batch_invariant is True"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
        ({"vllm": "[1]"}, "expected arguments of vLLM's engine"),
    ],
)
def test_load_refuses_before_anything_starts(folder, options, says):
    with pytest.raises(OptionError, match=says):
        birkhoff.load(folder, backend="vllm", **options)


def test_the_arguments_of_vllm_are_composed(folder):
    settings = VllmSettings(folder, "m", {"post_mlp": [1]}, max_context=64, further={"enforce_eager": False})
    cpu, gpu = settings.arguments(True), VllmSettings(folder, "m").arguments(False)
    assert cpu["worker_cls"] == "birkhoff.vllm.worker.HookedCpuWorker" and cpu["max_model_len"] == 64
    assert cpu["additional_config"]["birkhoff"]["hooks"] == {"post_mlp": [1]} and not cpu["enforce_eager"]
    assert gpu["worker_cls"] == "birkhoff.vllm.worker.HookedGpuWorker" and gpu["enforce_eager"]
    assert "kv_cache_memory_bytes" not in cpu and not cpu["async_scheduling"]
