"""Start vLLM's engine with hooks: its arguments, composed from the options of `birkhoff.load`, and the front of it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from birkhoff.dtype_names import dtype_name
from birkhoff.errors import OptionError, did_you_mean, quoted
from birkhoff.hooks.schema import HookSchema
from birkhoff.vllm.armed_sites import architecture_of, armed_schema, parse_hooks
from birkhoff.vllm.compatibility import check_config, check_names, check_version

# Arguments of vLLM that are set here, and the option that sets each of them, if there is one.
COMPOSED: Mapping[str, str | None] = {
    "model": None,
    "worker_cls": None,
    "scheduler_cls": None,
    "additional_config": None,
    "skip_tokenizer_init": None,
    "async_scheduling": None,
    "dtype": "dtype",
    "max_model_len": "max_context",
    "max_num_seqs": "max_requests",
    "max_num_batched_tokens": "max_batch_tokens",
    "kv_cache_memory_bytes": "cache_bytes",
    "enable_prefix_caching": "prefix_cache",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
}
CPU_WORKER = "birkhoff.vllm.worker.HookedCpuWorker"
GPU_WORKER = "birkhoff.vllm.worker.HookedGpuWorker"
SCHEDULER = "birkhoff.vllm.scheduler.SaltingScheduler"


@dataclass(frozen=True)
class VllmSettings:
    """How vLLM runs a checkpoint directory. `further` are arguments of its engine besides `COMPOSED`."""

    path: Path
    name: str
    hooks: Any = None
    dtype: str = "auto"
    max_requests: int = 8
    max_batch_tokens: int = 2048
    max_context: int | None = None
    cache_bytes: int | None = None
    prefix_cache: bool | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    capture_root: str | Path | None = None
    capture_queues: Mapping[str, Any] = field(default_factory=dict)
    further: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path, name: str | Path, options: Any) -> VllmSettings:
        """From the options of `birkhoff.load` (an `EngineOptions`)."""
        queues = {
            "overload_policy": options.capture_overload_policy,
            "queue_size": options.capture_dispatch_queue_size,
            "spill_dir": None if options.capture_spill_dir is None else str(options.capture_spill_dir),
            "spill_max_bytes": options.capture_spill_max_bytes,
        }
        return cls(
            path,
            str(name),
            options.hooks,
            options.dtype,
            options.max_requests,
            options.max_batch_tokens,
            options.max_context,
            options.cache_bytes,
            None if options.prefix_cache == "auto" else bool(options.prefix_cache),
            options.tensor_parallel_size,
            options.pipeline_parallel_size,
            options.capture_root,
            queues,
            options.vllm or {},
        )

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
        return config

    @property
    def armed(self) -> dict[str, tuple[int, ...]]:
        """Layers by armed hook."""
        config = self.config
        return parse_hooks(self.hooks, architecture_of(config), int(config["num_hidden_layers"]))

    def check_further(self) -> None:
        """Refuse arguments of vLLM that are set here."""
        for name, option in COMPOSED.items():
            if name in self.further:
                instead = f"use the option {option}" if option else "it is set by this backend"
                raise OptionError(f"vllm has {quoted(name)}: {instead}.")

    def additional_config(self) -> dict[str, Any]:
        """What the workers read of us; vLLM makes it part of the key of compiled graphs."""
        root = None if self.capture_root is None else str(Path(self.capture_root).absolute())
        return {
            "birkhoff": {
                "hooks": {hook: list(layers) for hook, layers in self.armed.items()},
                "model": self.name,
                "capture_root": root,
                "capture_queues": dict(self.capture_queues),
            }
        }

    def arguments(self, on_cpu: bool) -> dict[str, Any]:
        """Keywords of vLLM's `EngineArgs`; what is not given is left to vLLM."""
        chosen = {
            "model": str(self.path),
            "dtype": self.dtype,
            "max_num_seqs": self.max_requests,
            "max_num_batched_tokens": self.max_batch_tokens,
            "max_model_len": self.max_context,
            "kv_cache_memory_bytes": self.cache_bytes,
            "enable_prefix_caching": self.prefix_cache,
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "skip_tokenizer_init": True,
            "async_scheduling": False,
            "scheduler_cls": SCHEDULER,
            "worker_cls": CPU_WORKER if on_cpu else GPU_WORKER,
            "additional_config": self.additional_config(),
        }
        if not on_cpu and self.armed:
            chosen["enforce_eager"] = True
        return {name: value for name, value in chosen.items() if value is not None} | dict(self.further)


@dataclass(frozen=True, eq=False)
class StartedEngine:
    """vLLM's engine and what was decided. `sampling` makes sampling parameters whose outputs are new tokens only."""

    engine: Any
    sampling: Any
    dtype: torch.dtype
    max_context: int
    settings: Mapping[str, Any]


def start(settings: VllmSettings) -> StartedEngine:
    """Check and start. Everything that can be refused is refused before a process is started or a weight is read."""
    settings.check_further()
    armed = settings.armed
    vllm = library()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.llm_engine import LLMEngine

    known = set(EngineArgs.__dataclass_fields__)
    for name in settings.further:
        if name not in known:
            raise OptionError(
                f"vllm has {quoted(name)}, no argument of vLLM's engine.{did_you_mean(name, known)}"
            )
    on_cpu = current_platform.is_cpu()
    if on_cpu and settings.tensor_parallel_size * settings.pipeline_parallel_size > 1:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # ranks may share one NUMA node
    if not on_cpu and armed:
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    arguments = EngineArgs(**settings.arguments(on_cpu), disable_log_stats=True)
    config = arguments.create_engine_config()
    if armed:
        check_names()
        check_config(config)
    with _modules_hidden("llvmlite"):
        engine = LLMEngine.from_engine_args(arguments)
    decided = {
        "vllm": vllm.__version__,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "compiled": config.compilation_config.mode.name != "NONE",
    }

    def sampling(**keywords: Any) -> Any:
        return vllm.SamplingParams(output_kind=RequestOutputKind.DELTA, **keywords)

    model_config = engine.vllm_config.model_config
    return StartedEngine(engine, sampling, model_config.dtype, model_config.max_model_len, decided)


@contextmanager
def _modules_hidden(package: str) -> Iterator[None]:
    """Hide the loaded modules of a package. vLLM searches all loaded modules for Triton kernels when a worker starts in
    this process, and an object of llvmlite (of Numba, which our own kernels use) is not made to be looked at so."""
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == package}
    for name in hidden:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(hidden)


def installed_version() -> str:
    """The version of vLLM that is installed, if it is supported; it is not imported."""
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        raise OptionError(
            "the backend vllm needs the package vllm, which is not installed: pip install 'birkhoff-v4[vllm]' "
            "(docs/vllm.md)."
        ) from None
    check_version(version)
    return version


def library() -> Any:
    """The package vllm, in the supported version."""
    installed_version()
    import vllm

    return vllm


def schema_for(settings: VllmSettings, dtype: torch.dtype) -> dict[str, HookSchema]:
    """The schema of the armed hooks of a model that computes in `dtype`."""
    return armed_schema(settings.config, dtype_name(dtype), settings.armed)
