"""Which sites are armed, and what is refused before vLLM starts."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from types import SimpleNamespace

import pytest
from starlette.requests import Request

import birkhoff
from birkhoff.errors import OptionError, SiteError, UnsupportedModel
from birkhoff.vllm import http_plugin
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
from birkhoff.vllm.compatibility import check_config, check_version
from birkhoff.vllm.open_engine import VllmSettings
from birkhoff.vllm.serve_command import STEERING_KEY, serve_command, serve_environment
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


def test_the_command_of_the_server_has_the_same_arguments(folder):
    further = {"seed": 3, "compilation_config": {"mode": 0}}
    settings = VllmSettings(
        folder, "m", {"post_mlp": [1]}, prefix_cache=False, max_context=64, further=further
    )
    command = serve_command(settings, False, "::1", 7, api_keys=["a", "b"], more={"ssl-keyfile": "k"})
    assert command[3:5] == ["serve", str(folder)] and "--skip-tokenizer-init" not in command
    given = dict(pairwise(command))
    assert given["--host"] == "::1" and given["--port"] == "7" and given["--ssl-keyfile"] == "k"
    assert given["--served-model-name"] == "m" and given["--max-model-len"] == "64" and given["--seed"] == "3"
    assert given["--worker-cls"].endswith("HookedGpuWorker") and given["--scheduler-cls"].endswith(
        "SaltingScheduler"
    )
    assert json.loads(given["--additional-config"])["birkhoff"]["hooks"] == {"post_mlp": [1]}
    assert json.loads(given["--compilation-config"]) == {"mode": 0}
    assert {"--no-async-scheduling", "--no-enable-prefix-caching", "--enforce-eager"} <= set(command)
    assert command[-3:] == ["--api-key", "a", "b"]
    assert "--enforce-eager" not in serve_command(settings, True, "127.0.0.1", 7)
    with pytest.raises(OptionError, match="use the option max_context"):
        serve_command(VllmSettings(folder, "m", further={"max_model_len": 5}), True, "127.0.0.1", 7)
    environment = serve_environment(settings, False, {"VLLM_PLUGINS": "other"})
    assert environment == {"VLLM_PLUGINS": "other,birkhoff", "VLLM_USE_V2_MODEL_RUNNER": "0"}


@pytest.mark.parametrize(
    "keys, sent, local, status",
    [
        ("", "", True, 400),
        ("", "", False, 401),
        ("one two", "two", False, 400),
        ("one two", "", True, 401),
        ("one two", "one two", True, 401),
    ],
)
def test_changes_over_http_need_a_key_or_a_loopback_address(keys, sent, local, status, monkeypatch):
    """The body is no JSON object, which is seen after the key."""
    monkeypatch.setenv(STEERING_KEY, keys)
    app = SimpleNamespace(state=SimpleNamespace(birkhoff=None, birkhoff_is_local=local))
    headers = [(b"x-steering-key", sent.encode())] if sent else []

    async def receive():
        return {"type": "http.request", "body": b"[]", "more_body": False}

    request = Request(
        {"type": "http", "method": "POST", "path": "/", "headers": headers, "app": app}, receive
    )
    assert asyncio.run(http_plugin._endpoint(http_plugin.unregister)(request)).status_code == status


def vllm_config(**changes):
    """A `VllmConfig` that is taken, changed at dotted paths."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            data_parallel_size=1,
            enable_expert_parallel=False,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            enable_dbo=False,
            ubatch_size=0,
        ),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        compilation_config=SimpleNamespace(
            mode=SimpleNamespace(name="NONE"), cudagraph_mode=SimpleNamespace(name="NONE")
        ),
        device_config=SimpleNamespace(device_type="cuda"),
        model_config=SimpleNamespace(
            enable_prompt_embeds=False,
            is_multimodal_model=False,
            hf_config=SimpleNamespace(architectures=[V4]),
        ),
        use_v2_model_runner=False,
        kv_transfer_config=None,
        lora_config=None,
        speculative_config=None,
    )
    for path, value in changes.items():
        *parents, name = path.split("__")
        holder = config
        for parent in parents:
            holder = getattr(holder, parent)
        assert hasattr(holder, name)
        setattr(holder, name, value)
    return config


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"parallel_config__data_parallel_size": 2}, "one server per replica"),
        ({"parallel_config__enable_expert_parallel": True}, "expert parallelism"),
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism"),
        ({"parallel_config__enable_dbo": True}, "micro-batches"),
        ({"scheduler_config__async_scheduling": True}, "asynchronous scheduling"),
        ({"use_v2_model_runner": True, "device_config__device_type": "cpu"}, "V2 model runner of CPUs"),
        (
            {"use_v2_model_runner": True, "compilation_config__cudagraph_mode__name": "FULL"},
            "V2 model runner chooses a CUDA graph",
        ),
        ({"kv_transfer_config": object()}, "KV connectors"),
        ({"model_config__enable_prompt_embeds": True}, "embeddings"),
        ({"model_config__is_multimodal_model": True}, "multimodal"),
        ({"lora_config": object()}, "LoRA"),
        ({"speculative_config": SimpleNamespace(method="eagle")}, "'eagle'"),
        ({"compilation_config__mode__name": "STOCK_TORCH_COMPILE"}, "compiled as a whole by PyTorch"),
        ({"compilation_config__mode__name": "VLLM_COMPILE"}, "DeepSeek-V4 are not compiled"),
    ],
)
def test_modes_of_vllm_are_refused_by_name(changes, says):
    with pytest.raises(OptionError, match=says):
        check_config(vllm_config(**changes))


def test_modes_of_vllm_that_are_taken():
    check_config(vllm_config())
    check_config(vllm_config(use_v2_model_runner=True))
    check_config(vllm_config(speculative_config=SimpleNamespace(method="ngram")))
    llama = {"model_config__hf_config__architectures": ["LlamaForCausalLM"]}
    check_config(
        vllm_config(
            **llama,
            compilation_config__mode__name="VLLM_COMPILE",
            compilation_config__cudagraph_mode__name="FULL",
        )
    )
