"""How a checkpoint runs on a device: kernels, dtype, the form of its weights, and its memory plan.

Everything follows from headers, options and the free memory of a device, which need not be present: `load` carries
these plans out, `birkhoff inspect` prints them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from birkhoff.api.options import EngineOptions, PlacementOptions, SpeculationOptions, parse_speculation
from birkhoff.byte_size import format_bytes
from birkhoff.engine.cache_plan import default_cache_bytes
from birkhoff.engine.memory_plan import (
    HostBudget,
    MemoryBudget,
    cache_within,
    model_bytes,
    plan_budget,
    plan_host,
)
from birkhoff.errors import CapacityError, OptionError
from birkhoff.free_memory import free_host_bytes
from birkhoff.kernels import gpu, jit
from birkhoff.kernels.packed import TYPES, PackedType, gpu_type, native
from birkhoff.kernels.select import Choice, KernelSet, select
from birkhoff.model.linear import Numerics
from birkhoff.model.transformer import Transformer
from birkhoff.weights.checkpoint import Checkpoint
from birkhoff.weights.layout import model_tensors

WEIGHTS_SHARE = 0.85  # of free device memory, from which the MTP block is left out
PROJECTIONS = ("dense", "expert")  # storage of weights that are multiplied in the model's dtype
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class RunPlan:
    """How a checkpoint runs here. `packed`: weights stay in the types in which they are stored, which kernels read
    directly. `on_gpu`: by Triton and CUDA kernels."""

    device: torch.device
    numerics: Numerics
    on_gpu: bool
    packed: bool
    speculation: SpeculationOptions
    with_mtp: bool


def check_context(options: EngineOptions, checkpoint: Checkpoint) -> None:
    limit = checkpoint.config.max_position_embeddings
    if options.max_context is not None and options.max_context > limit:
        raise OptionError(
            f"max_context is {options.max_context}, the model's limit is {limit}. Ask for that or less."
        )


def plan_run(options: EngineOptions, checkpoint: Checkpoint) -> RunPlan:
    device = select_device(options.device)
    kernels = select_kernels(options.kernels, device)
    return _run_on(options, checkpoint, device, kernels, select(kernels), free_bytes_of(device))


def _run_on(
    options: EngineOptions,
    checkpoint: Checkpoint,
    device: torch.device,
    kernels: Choice,
    kernel_set: KernelSet,
    free_bytes: int,
) -> RunPlan:
    """The decisions for a device with this much free memory, which need not be present."""
    on_gpu = kernels == "triton"
    packed = _runs_packed(options, kernels, checkpoint, _compute_dtype(options, device))
    # The MTP block is as large as a layer: where experts may have to leave the GPU, it is not worth its memory.
    tight = packed and on_gpu and not _fits_device(options, checkpoint, free_bytes)
    speculative = False if tight and options.speculative == "auto" else options.speculative
    speculation = parse_speculation(
        speculative, checkpoint.has_mtp, options.batch_invariant, checkpoint.drafter
    )
    dtype = _compute_dtype(options, device)
    numerics = Numerics(dtype, options.numerics == "released", kernel_set)
    # Saves device memory.
    with_mtp = checkpoint.has_mtp and not (packed and on_gpu and speculation.depth == 0)
    return RunPlan(device, numerics, on_gpu, packed, speculation, with_mtp)


def _compute_dtype(options: EngineOptions, device: torch.device) -> torch.dtype:
    on_cpu = options.dtype == "auto" and device.type == "cpu"
    return torch.float32 if on_cpu else DTYPES.get(options.dtype, torch.bfloat16)


def _fits_device(options: EngineOptions, checkpoint: Checkpoint, free_bytes: int) -> bool:
    """Whether all weights clearly fit the memory that is free on the device, and nothing else was asked for."""
    stored = sum(checkpoint[name].nbytes for name in checkpoint)
    return options.placement.is_default and stored <= WEIGHTS_SHARE * free_bytes


def _runs_packed(options: EngineOptions, kernels: Choice, checkpoint: Checkpoint, dtype: torch.dtype) -> bool:
    """Whether weights stay as stored: if the kernels can read them, unless they are to be dense."""
    if options.weights == "dense":
        return False
    if kernels == "triton":
        packed = experts_as_stored(checkpoint, dtype)
    else:
        packed = (
            kernels == "cpu"
            and options.numerics == "plain"
            and options.dtype in ("auto", "float32")
            and native.available()
        )
    if options.weights == "packed" and not packed:
        raise OptionError(
            "weights is 'packed', which needs on a CPU plain numerics, float32, Numba and a C++ compiler, on a GPU "
            "Triton and experts whose gate and up have one type that kernels read. Use weights='auto'."
        )
    return packed


def _stored_types(checkpoint: Checkpoint) -> dict[str, PackedType]:
    """The type of every matrix that kernels can read as stored, by name."""
    types = {name: checkpoint[name].packed_type for name in checkpoint if name.endswith(".weight")}
    return {name: kind for name, kind in types.items() if kind is not None}


def _gpu_types(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, PackedType]:
    """The type of every matrix that stays packed on a GPU, by name.

    MXFP4 is loaded as FP4 and projections of Q8_0 as Q8_ROWS, the same codes and scales in another order. Without the
    embedding, which decode kernels read in the model's dtype, and without float32 numbers that would be multiplied in
    fewer bits."""
    storage = {tensor.name: tensor.storage for tensor in model_tensors(checkpoint.config)}
    types = {}
    for name, kind in _stored_types(checkpoint).items():
        if kind == TYPES["MXFP4"]:
            types[name] = TYPES["FP4"]
        elif name != "embed.weight" and (
            kind.dtype is not torch.float32 or dtype is torch.float32 or storage.get(name) not in PROJECTIONS
        ):
            expert = storage.get(name) == "expert"
            types[name] = kind if expert else gpu_type(kind, checkpoint[name].value_shape[1])
    return types


def experts_as_stored(checkpoint: Checkpoint, dtype: torch.dtype) -> bool:
    """Whether a GPU reads the experts of every layer as they are stored: all of one layer alike, gate and up too."""
    types = _gpu_types(checkpoint, dtype)
    layers = [f"layers.{layer}" for layer in range(checkpoint.config.num_hidden_layers)]
    for prefix in [*layers, *(["mtp.0"] if checkpoint.has_mtp else [])]:
        first = [types.get(f"{prefix}.ffn.experts.0.{part}.weight") for part in ("w1", "w3", "w2")]
        if None in first or first[0] != first[1]:
            return False
        for expert in range(checkpoint.config.n_routed_experts):
            names = [f"{prefix}.ffn.experts.{expert}.{part}.weight" for part in ("w1", "w3", "w2")]
            if [types.get(name) for name in names] != first:
                return False
    return True


def select_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    selected = torch.device(device)
    if selected.type == "cuda" and not torch.cuda.is_available():
        raise OptionError("device is 'cuda', but PyTorch sees no CUDA device here. Use device='cpu'.")
    return selected


def select_kernels(kernels: str, device: torch.device) -> Choice:
    if kernels == "triton" and not gpu.available():
        raise OptionError(
            "kernels='triton' needs the package triton and a CUDA device, or its interpreter (TRITON_INTERPRET=1); "
            "there is none here. Use 'auto' or 'reference'."
        )
    if kernels == "triton" and device.type == "cpu" and not gpu.interpreted():
        raise OptionError(
            "kernels='triton' runs on a CUDA device, but device is 'cpu'. Use device='cuda' or 'auto'."
        )
    if kernels == "triton" or (kernels == "auto" and device.type == "cuda" and gpu.available()):
        return "triton"
    return "cpu" if kernels == "auto" and device.type == "cpu" and jit.AVAILABLE else "reference"


def meta_model(checkpoint: Checkpoint, run: RunPlan) -> Transformer:
    """The model without memory, in the form in which it will hold its weights."""
    with torch.device("meta"):
        network = Transformer(checkpoint.config, run.numerics, mtp=run.with_mtp)
        if run.packed:
            dtype = run.numerics.dtype
            network.store_as(_gpu_types(checkpoint, dtype) if run.on_gpu else _stored_types(checkpoint))
    return network


def device_network(checkpoint: Checkpoint, options: EngineOptions, device_bytes: int) -> Transformer | None:
    """The model without memory that `load` would place on a GPU with `device_bytes` of free memory; None if its weights
    would not stay packed there. The GPU need not be present."""
    check_context(options, checkpoint)
    device = torch.device("cuda")
    run = _run_on(options, checkpoint, device, "triton", select("reference"), device_bytes)
    return meta_model(checkpoint, run) if run.packed else None


def host_budget(checkpoint: Checkpoint, options: EngineOptions, host_bytes: int) -> HostBudget:
    """The plan that `load` carries out for a checkpoint on a CPU with `host_bytes` of free memory."""
    check_context(options, checkpoint)
    return plan_cpu(options, meta_model(checkpoint, plan_run(options, checkpoint)), host_bytes)


def plan_cpu(options: EngineOptions, network: Transformer, host_bytes: int) -> HostBudget:
    """The memory plan of a model on the CPU, which need not have memory yet."""
    placement = options.placement
    if placement.mapped and not all(stack.packed for stack in network.expert_stacks()):
        raise OptionError(
            "experts is 'mapped', which needs experts that kernels read as stored: a C++ compiler, Numba, plain "
            "numerics, and gate and up of one type. Use 'auto'."
        )
    mapped = True if placement.mapped else False if placement.all_on_device else None
    return plan_host(
        network, host_bytes, options.cache_bytes, options.max_requests, options.max_context, mapped
    )


def plan_device(
    network: Transformer,
    options: PlacementOptions,
    free_bytes: int,
    host_bytes: int,
    cache_bytes: int | None,
    requests: int,
    context: int | None,
) -> MemoryBudget:
    """The memory plan of a packed model on a GPU; neither needs to exist yet.

    `free_bytes` and `host_bytes` are the free memory of the device and the host. Where all experts fit the device, the
    cache gets a quarter of what they leave, and at least what `context` needs. Raises `CapacityError` when the
    requested experts do not fit."""
    config, dtype = network.config, network.numerics.dtype
    total = min(options.gpu_memory or free_bytes, free_bytes)
    cache = cache_bytes
    if cache is None:
        cache = default_cache_bytes(config, total, requests, context, dtype.itemsize)
    budget = plan_budget(
        config,
        total,
        cache,
        share=options.share,
        expert_bytes=options.expert_bytes,
        weights=model_bytes(network),
    )
    if not is_divided(budget, options):
        if cache_bytes is None:
            held = budget.dense_bytes + budget.hot_bytes
            within = cache_within(total, held)
            least = min(cache, within) if context is not None else 0
            budget = replace(budget, cache_bytes=max(least, min((free_bytes - held) // 4, within)))
        return budget
    if options.all_on_device and budget.hot < budget.experts:
        raise CapacityError(
            f"experts is 'device', but {budget.hot} of {budget.experts} fit {format_bytes(total)} beside weights "
            f"{format_bytes(budget.dense_bytes)}, cache {format_bytes(cache)} and working space "
            f"{format_bytes(budget.working_bytes)}. Use 'auto', or a larger device."
        )
    if budget.host_bytes > host_bytes:
        raise CapacityError(
            f"{budget.experts - budget.hot} experts would lie in {format_bytes(budget.host_bytes)} of host memory, and "
            f"{format_bytes(host_bytes)} are free. Free host memory, or give the device more."
        )
    return budget


def is_divided(budget: MemoryBudget, options: PlacementOptions) -> bool:
    """Whether experts are kept in a store: some of them in host memory, or counted for a file."""
    return budget.hot < budget.experts or options.share is not None or options.counts_file is not None


def free_bytes_of(device: torch.device) -> int:
    """Free memory of the GPU or the host."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()
