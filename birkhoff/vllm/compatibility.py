"""What is needed of vLLM, checked by name and signature when an engine starts, and which of its modes are refused.

The hooks use names of vLLM that are not public. One minor version is supported; a build of it that differs in one of
these names is refused at start, with the name, instead of failing in the middle of a step."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from birkhoff.errors import OptionError, quoted
from birkhoff.vllm.armed_sites import V4, architecture_of, parse_hooks

SUPPORTED = "0.32"
_LAYER = ("positions", "hidden_states", "residual")
# Every function of vLLM that is called or overridden: module, qualified name, parameters that it must have.
USED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner.execute_model",
        ("scheduler_output", "intermediate_tensors"),
    ),
    (
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._model_forward",
        ("input_ids", "positions", "intermediate_tensors", "inputs_embeds"),
    ),
    (
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._dummy_run",
        ("num_tokens", "force_attention", "cudagraph_runtime_mode", "uniform_decode"),
    ),
    (
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._determine_batch_execution_and_padding",
        ("num_tokens", "force_eager"),
    ),
    (
        "vllm.v1.worker.gpu.model_runner",
        "GPUModelRunner.execute_model",
        ("scheduler_output", "intermediate_tensors", "dummy_run"),
    ),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner._dummy_run", ("num_tokens", "is_profile")),
    ("vllm.v1.worker.gpu.model_states.interface", "ModelState.add_request", ("req_index", "new_req_data")),
    ("vllm.v1.worker.gpu.model_states.interface", "ModelState.remove_request", ("req_id",)),
    ("vllm.v1.worker.gpu.model_states.interface", "ModelState.prepare_inputs", ("input_batch", "req_states")),
    ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner.__init__", ("vllm_config", "device")),
    ("vllm.v1.worker.cpu_worker", "CPUWorker.init_device", ()),
    ("vllm.v1.worker.cpu_worker", "CPUWorker.determine_available_memory", ()),
    ("vllm.v1.worker.gpu_worker", "Worker._make_model_runner", ()),
    ("vllm.v1.worker.gpu_worker", "Worker.load_model", ("load_dummy_weights",)),
    ("vllm.v1.worker.gpu_worker", "Worker.compile_or_warm_up_model", ()),
    ("vllm.v1.worker.gpu_worker", "Worker.shutdown", ()),
    ("vllm.v1.core.sched.scheduler", "Scheduler.add_request", ("request",)),
    ("vllm.v1.request", "Request.update_block_hashes", ()),
    ("vllm.v1.engine.llm_engine", "LLMEngine.add_request", ("request_id", "prompt", "params")),
    ("vllm.v1.engine.llm_engine", "LLMEngine.step", ()),
    ("vllm.v1.engine.llm_engine", "LLMEngine.abort_request", ("request_ids",)),
    ("vllm.v1.engine.llm_engine", "LLMEngine.collective_rpc", ("method", "timeout", "args")),
    (
        "vllm.compilation.wrapper",
        "TorchCompileWithNoGuardsWrapper.__init__",
        ("compile_prefix", "is_encoder"),
    ),
    ("vllm.forward_context", "get_forward_context", ()),
    (
        "vllm.forward_context",
        "ForwardContext",
        ("no_compile_layers", "cudagraph_runtime_mode", "batch_descriptor"),
    ),
    ("vllm.model_executor.models.llama", "LlamaDecoderLayer.forward", _LAYER),
)


def check_version(version: str) -> None:
    """Refuse another minor version than the supported one."""
    if version.split("+")[0].split(".")[:2] != SUPPORTED.split("."):
        raise OptionError(
            f"vLLM {version} is installed, and hooks are known for {SUPPORTED}. Install it: "
            "pip install 'birkhoff-v4[vllm]'."
        )


def check_names() -> None:
    """Refuse a build of vLLM in which a used name is missing or has other parameters."""
    for module, name, parameters in USED:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is None:
            raise OptionError(f"this build of vLLM has no {module}.{name}. Install an official {SUPPORTED}.")
        has = inspect.signature(found).parameters
        missing = [parameter for parameter in parameters if parameter not in has]
        if missing:
            raise OptionError(
                f"{module}.{name} of this build of vLLM takes {', '.join(has)}, expected {missing[0]} too. Install an "
                f"official {SUPPORTED}."
            )


def check_layer(layer: Any) -> None:
    """Refuse a decoder layer that is called in another way than the known ones."""
    has = tuple(inspect.signature(layer.forward).parameters)
    if has[:3] != _LAYER:
        raise OptionError(
            f"{type(layer).__name__} is called with {', '.join(has)}, expected {', '.join(_LAYER)}. Use the backend "
            "transformers for this model."
        )


def refusals(config: Any) -> Iterator[str]:
    """Why captures and edits would be wrong or missing in an engine with this `VllmConfig`, one reason each."""
    parallel, scheduler = config.parallel_config, config.scheduler_config
    if parallel.data_parallel_size > 1:
        yield "data_parallel_size is above 1: start one server per replica"
    if parallel.enable_expert_parallel:
        yield "expert parallelism may divide the tokens of a step among ranks"
    if parallel.prefill_context_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        yield "context parallelism divides the tokens of a step among ranks"
    if parallel.enable_dbo or parallel.ubatch_size > 1:
        yield "micro-batches divide the rows of a step"
    if scheduler.async_scheduling:
        yield "asynchronous scheduling runs ahead of the accepted tokens"
    if config.use_v2_model_runner and config.compilation_config.cudagraph_mode.name != "NONE":
        yield (
            "the V2 model runner chooses a CUDA graph before a step can refuse it; set enforce_eager, or "
            "VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if config.use_v2_model_runner and config.device_config.device_type == "cpu":
        yield "the V2 model runner of CPUs has no adapter; set VLLM_USE_V2_MODEL_RUNNER=0"
    if config.kv_transfer_config is not None:
        yield "KV connectors bring cached state that was computed without the edits"
    if config.model_config.enable_prompt_embeds:
        yield "prompts of embeddings have no token ids"
    if config.model_config.is_multimodal_model:
        yield "multimodal prompts have rows that are no tokens"
    if config.lora_config is not None:
        yield "LoRA adapters change the model from request to request"
    speculation = config.speculative_config
    if speculation is not None and speculation.method != "ngram":
        yield f"speculation by {quoted(speculation.method)}: only n-gram drafts are settled row by row"
    if config.compilation_config.mode.name == "STOCK_TORCH_COMPILE":
        yield "a decoder compiled as a whole by PyTorch cannot be switched; use another compilation mode of vLLM"
    names = getattr(config.model_config.hf_config, "architectures", None) or ()
    if V4 in names and config.compilation_config.mode.name != "NONE":
        yield "hooks of DeepSeek-V4 are not compiled; set enforce_eager"


def check_config(config: Any) -> None:
    reasons = list(refusals(config))
    if reasons:
        raise OptionError(f"hooks on vLLM refuse this engine: {'; '.join(reasons)}.")


def armed_of(config: Any) -> dict[str, tuple[int, ...]]:
    """Layers by armed hook, of an engine with this `VllmConfig`; empty if its `additional_config` does not name us."""
    if "birkhoff" not in (config.additional_config or {}):
        return {}
    raw = config.model_config.hf_text_config.to_dict()
    layers = config.model_config.get_total_num_hidden_layers()
    return parse_hooks(own_config(config).get("hooks"), architecture_of(raw), layers)


def own_config(config: Any) -> Mapping[str, Any]:
    """What the front gave its workers, in vLLM's `additional_config`."""
    given: Mapping[str, Any] = (config.additional_config or {}).get("birkhoff", {})
    return given
