"""`vllm serve` with hooks: the command and environment that switch on our worker, scheduler, middleware and routes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from birkhoff.errors import OptionError, quoted
from birkhoff.vllm.open_engine import COMPOSED, CPU_WORKER, GPU_WORKER, SCHEDULER, VllmSettings

MIDDLEWARE = "birkhoff.vllm.http_fields.HookFields"
STEERING_KEY = "BIRKHOFF_STEERING_API_KEY"  # the environment variable of the key for changes
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
    for name in settings.further:
        if name in COMPOSED:
            raise OptionError(
                f"vllm has {quoted(name)}, which an option of birkhoff sets or this backend itself."
            )
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(settings.path)]
    flags: dict[str, Any] = {
        "host": host,
        "port": port,
        "served-model-name": served_name or settings.name,
        "dtype": settings.dtype,
        "max-num-seqs": settings.max_requests,
        "max-num-batched-tokens": settings.max_batch_tokens,
        "max-model-len": settings.max_context,
        "kv-cache-memory-bytes": settings.cache_bytes,
        "tensor-parallel-size": settings.tensor_parallel_size,
        "pipeline-parallel-size": settings.pipeline_parallel_size,
        "worker-cls": CPU_WORKER if on_cpu else GPU_WORKER,
        "scheduler-cls": SCHEDULER,
        "middleware": MIDDLEWARE,
        "additional-config": json.dumps(settings.additional_config()),
        **more,
    }
    for name, value in flags.items():
        if value is not None:
            command += [f"--{name}", str(value)]
    command.append("--no-async-scheduling")
    if settings.prefix_cache is not None:
        command.append("--enable-prefix-caching" if settings.prefix_cache else "--no-enable-prefix-caching")
    if not on_cpu and settings.armed and "enforce_eager" not in settings.further:
        command.append("--enforce-eager")
    if api_keys:
        command += ["--api-key", *api_keys]
    for name, value in settings.further.items():
        command += _flag(name, value)
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
