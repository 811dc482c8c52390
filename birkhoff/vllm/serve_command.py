"""`vllm serve` with hooks: the command and environment that switch on our worker, scheduler, middleware and routes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from birkhoff.vllm.open_engine import VllmSettings

MIDDLEWARE = "birkhoff.vllm.http_fields.HookFields"
# The environment variable of the keys for changes, separated by spaces.
STEERING_KEY = "BIRKHOFF_STEERING_API_KEY"
PLUGIN = "birkhoff"  # the endpoint plugin, as VLLM_PLUGINS names it


def serve_command(
    settings: VllmSettings,
    on_cpu: bool,
    host: str,
    port: int,
    served_name: str = "",
    api_keys: Sequence[str] = (),
    more: Mapping[str, str] = {},
) -> list[str]:
    """The arguments of a process that serves the model. `more` are further flags with their values."""
    settings.check_further()
    arguments = settings.arguments(on_cpu)
    arguments.pop("skip_tokenizer_init")  # the server makes text
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", arguments.pop("model")]
    flags = {
        "host": host,
        "port": port,
        "served_model_name": served_name or settings.name,
        "middleware": MIDDLEWARE,
        **more,
        **arguments,
    }
    for name, value in flags.items():
        command += _flag(name, value)
    if api_keys:
        command += ["--api-key", *api_keys]
    return command


def _flag(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else "--no-" + flag[2:]]
    return [flag, json.dumps(value) if isinstance(value, (dict, list)) else str(value)]


def serve_environment(settings: VllmSettings, on_cpu: bool, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of that process."""
    out = dict(environment)
    plugins = [name for name in out.get("VLLM_PLUGINS", "").split(",") if name]
    out["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*plugins, PLUGIN]))
    if on_cpu and settings.tensor_parallel_size * settings.pipeline_parallel_size > 1:
        out.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if not on_cpu and settings.armed:
        out.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    return out
